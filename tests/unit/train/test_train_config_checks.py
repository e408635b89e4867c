"""Problems of a training that are detected before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from dasksc import DaskscError, InputError, MissingKeyError
from dasksc.train.config import Config
from dasksc.train.config_checks import check_config
from dasksc.train.data import make_loaders
from dasksc.train.nonfinite_loss import explain_nonfinite_loss

pytestmark = pytest.mark.core

CLASSIFIER = {"name": "mlp_classifier", "label": "cell_type"}
TRANSFORMER = {"model": "transformer_encoder", "tokenizer": {"masking": {"mask_ratio": 0.15}}}


def config(tmp_path: Path, **sections: Any) -> Config:
    training = {"checkpoint_dir": str(tmp_path / "run"), **sections.pop("training", {})}
    return Config.of({"data": {"path": "a.h5ad"}, "model": CLASSIFIER, **sections, "training": training})


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": "vae"},
        {"model": "autoencoder"},
        TRANSFORMER,
        {"model": {"name": "transformer_encoder", "label": "cell_type"}, "tokenizer": {"strategy": "value_bins"}},
        {"model": "torch.nn:Identity"},
        {"data": {"path": "a", "strategy": {"name": "ClassBalancedSampling", "label_key": "cell_type"}}},
        {"training": {"optimizer": {"name": "sgd", "momentum": 0.9}}},
        {"training": {"optimizer": {"name": "torch.optim:RMSprop", "alpha": 0.9}}},
    ],
)
def test_configurations_that_some_data_satisfy_pass(tmp_path, sections):
    check_config(config(tmp_path, **sections))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {**CLASSIFIER, "hiden_dim": 8}}, "model.hiden_dim is not known; did you mean 'hidden_dim'?"),
        (
            {"model": {"name": "mlp_clasifier"}},
            "model.name='mlp_clasifier' is not known; did you mean 'mlp_classifier'?",
        ),
        ({"model": "mlp_classifier"}, "label"),
        ({"model": {**CLASSIFIER, "hidden_dim": "16"}}, "model.hidden_dim='16'"),
        ({"model": {**CLASSIFIER, "num_layers": 2.5}}, "model.num_layers=2.5"),
        ({"model": {**CLASSIFIER, "dropout": 2}}, "model.dropout=2"),
        ({"model": {"name": "vae", "latent_dim": 0}}, "model.latent_dim=0"),
        ({**TRANSFORMER, "model": {"name": "transformer_encoder", "num_layers": -1}}, "num_layers=-1"),
        ({"model": {"name": "vae", "beta": 1, "variational": True}}, "model.variational"),
        ({"model": "os:sep"}, "model.name='os:sep' is not a torch.nn.Module"),
        ({"data": {"path": "a", "strategy": "blok"}}, "data.strategy.name='blok'"),
        (
            {"data": {"path": "a", "strategy": {"block": 4}}},
            "data.strategy.block is not known; did you mean 'block_size'?",
        ),
        ({"training": {"optimizer": "adamwx"}}, "training.optimizer.name='adamwx' is not known; did you mean 'adamw'?"),
        ({"training": {"optimizer": {"weigth_decay": 1}}}, "training.optimizer.weigth_decay"),
        ({"training": {"optimizer": {"betas": [0.9]}}}, "training.optimizer"),
        ({"training": {"optimizer": {"weight_decay": -1}}}, "ValueError.*weight_decay"),
        ({"training": {"optimizer": {"weight_decay": "x"}}}, "training.optimizer"),
        ({"tokenizer": {"max_gene": 4}}, "tokenizer has no setting 'max_gene'; did you mean 'max_genes'?"),
        ({"tokenizer": {"strategy": "rank_vale"}}, "tokenizer.strategy must be 'rank_value' or 'value_bins'"),
        ({"tokenizer": {"masking": {"mask_ratio": "0.15"}}}, "mask_ratio='0.15'"),
        ({"tokenizer": {"vocabulary": "nowhere.json"}}, "'nowhere.json'"),
        ({"training": {"checkpoint_dir": __file__}}, f"cannot be written to: {__file__} is not a directory"),
        ({"training": {"checkpoint_dir": f"{__file__}/run"}}, f"cannot be written to: {__file__} is not a directory"),
    ],
)
def test_settings_that_no_data_can_satisfy_are_refused(tmp_path, sections, message):
    with pytest.raises(DaskscError, match=message):
        check_config(config(tmp_path, **sections))


def test_everything_is_reported_at_once_and_nothing_is_written(tmp_path):
    wrong = config(tmp_path, model="vea", training={"optimizer": "adan"}, tokenizer={"strategy": "x"})
    with pytest.raises(InputError, match="tokenizer.strategy.*; model.name='vea'.*; training.optimizer.name='adan'"):
        check_config(wrong)
    check_config(config(tmp_path))
    assert not list(tmp_path.iterdir())


def test_unknown_names_of_an_atlas_are_reported_at_once_with_their_keys(tmp_path):
    path = tmp_path / "a.h5ad"
    ad.AnnData(
        np.ones((8, 3), np.float32), pd.DataFrame({"cell_type": ["a", "b"] * 4}, index=list("abcdefgh"))
    ).write_h5ad(path)
    data = {"path": str(path), "layers": ["count"], "obsm": ["X_pca"], "filter": "n_gene > 3"}
    wrong = config(tmp_path, data=data, model={**CLASSIFIER, "label": "cel_type"})
    with pytest.raises(MissingKeyError) as error:
        make_loaders(wrong, device=torch.device("cpu"))
    first, *lines = str(error.value).splitlines()
    assert first.endswith("lacks 4 of the names in the configuration:")
    for line, key in zip(lines, ("data.layers", "data.obsm", "model.label", "data.filter"), strict=True):
        assert line.startswith(f"  - {key}: ")
    assert "did you mean 'cell_type'?" in lines[2]
    unfiltered = config(tmp_path, data={"path": str(path)}, model={**CLASSIFIER, "label": "cel_type"})
    with pytest.raises(MissingKeyError, match="model.label.*obs.*'cel_type'"):
        make_loaders(unfiltered, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.array([[-1.5, 2.0]]), "X holds negative values, down to -1.5"),
        (np.array([[np.nan, 2.0]]), "X holds NaN or infinite values"),
        (np.array([[1.0, np.inf]]), "X holds NaN or infinite values"),
        (sp.csr_matrix([[0.0, -0.5]]), "X holds negative values, down to -0.5"),
        (np.array([[0.0, 7.0]]), "the learning rate is probably too high"),
        (sp.csr_matrix((1, 2)), "the learning rate is probably too high"),
        (da.from_array(np.array([[-3.0, 2.0]])), "X holds negative values, down to -3"),
        (np.array([[0.0, 3.25]]), "X holds fractional values, as normalized or scaled data does (maximum 3.25)"),
        (None, "Look for NaN in the data, lower training.optimizer.lr"),
    ],
)
def test_a_loss_that_is_not_finite_is_explained_by_x_or_by_the_learning_rate(x, says):
    assert says in explain_nonfinite_loss(SimpleNamespace(collection=SimpleNamespace(X=x)))

"""Problems of a training that are detected before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch

from dasksc import DaskscError, InputError, MissingKeyError, MissingPathError
from dasksc.train.config import Config
from dasksc.train.config_checks import check_config, load_config
from dasksc.train.data import make_loaders
from dasksc.train.loggers import metrics_line
from dasksc.train.nonfinite_loss import explain_nonfinite_loss

pytestmark = pytest.mark.core

CLASSIFIER = {"name": "mlp_classifier", "label": "cell_type"}
TRANSFORMER = {"model": "transformer_encoder", "tokenizer": {"masking": {"mask_ratio": 0.15}}}


def config(tmp_path: Path, **sections: Any) -> Config:
    training = {"checkpoint_dir": str(tmp_path / "run"), **sections.pop("training", {})}
    return Config.of({"data": {"path": "a.h5ad"}, "model": CLASSIFIER, **sections, "training": training})


def test_lack_of_memory_is_not_reported_as_an_invalid_configuration(tmp_path):
    with (
        patch("torch.optim.AdamW.__init__", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        check_config(config(tmp_path))


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
        ({"model": "mlp_classifier"}, "model lacks required keys: label"),
        ({"model": {**CLASSIFIER, "hidden_dim": "16"}}, "model.hidden_dim='16' must be a whole number of at least 1"),
        ({"model": {**CLASSIFIER, "num_layers": 2.5}}, "model.num_layers=2.5 must be a whole number of at least 0"),
        ({"model": {**CLASSIFIER, "dropout": 2}}, r"model.dropout=2 must be a number in \[0, 1\)"),
        ({"model": {"name": "vae", "latent_dim": 0}}, "model.latent_dim=0 must be a whole number of at least 1"),
        ({**TRANSFORMER, "model": {"name": "transformer_encoder", "num_layers": -1}}, "num_layers=-1 must be"),
        ({"model": {"name": "vae", "beta": 1, "variational": True}}, "model.variational is not known"),
        ({"model": "os:sep"}, "model.name='os:sep' is not a torch.nn.Module"),
        ({"data": {"path": "a", "strategy": "blok"}}, "data.strategy.name='blok' is not known"),
        (
            {"data": {"path": "a", "strategy": {"block": 4}}},
            "data.strategy.block is not known; did you mean 'block_size'?",
        ),
        ({"training": {"optimizer": "adamwx"}}, "training.optimizer.name='adamwx' is not known; did you mean 'adamw'?"),
        ({"training": {"optimizer": {"weigth_decay": 1}}}, "training.optimizer.weigth_decay is not known; did you"),
        ({"training": {"optimizer": {"betas": [0.9]}}}, "training.optimizer has an invalid value: "),
        ({"training": {"optimizer": {"weight_decay": -1}}}, "has an invalid value: ValueError: Invalid weight_decay"),
        ({"training": {"optimizer": {"weight_decay": "x"}}}, "training.optimizer has an invalid value: Ty"),
        ({"tokenizer": {"max_gene": 4}}, "tokenizer has no setting 'max_gene'; did you mean 'max_genes'?"),
        ({"tokenizer": {"strategy": "rank_vale"}}, "tokenizer.strategy must be 'rank_value' or 'value_bins'"),
        ({"tokenizer": {"masking": {"mask_ratio": "0.15"}}}, "mask_ratio='0.15' must be the share of tokens to mask"),
        ({"tokenizer": {"vocabulary": "nowhere.json"}}, "there is no vocabulary file 'nowhere.json'"),
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


def test_mistakes_of_schema_names_and_arguments_are_reported_together(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        f"data: {{path: {__file__}, batchsize: 8, strategy: {{name: block_shufling}}}}\n"
        "model: {name: vae, hiden_dim: 3}\n"
        "training: {max_steps: none, optimizer: {name: adamw, lr: -1, weight: 2}}\n"
    )
    with pytest.raises(InputError) as error:
        load_config(str(path))
    first, *lines = str(error.value).splitlines()
    assert first == f"{path} has 6 mistakes:"
    assert all(line.startswith("  - ") for line in lines)
    for wrong in (
        "data.batchsize",
        "training.max_steps",
        "training.optimizer.lr",
        "block_shufling",
        "hiden_dim",
        "weight",
    ):
        assert sum(wrong in line for line in lines) == 1, wrong


def test_missing_paths_are_reported_with_the_other_mistakes_before_anything_is_written(tmp_path):
    path, run = tmp_path / "c.yaml", tmp_path / "run"
    path.write_text(
        f"data: {{path: [{tmp_path}/a.h5ad, {tmp_path}/*.h5ad], validation: {{path: {tmp_path}/held.h5ad}}}}\n"
        "model: vea\n"
        f"training: {{checkpoint_dir: {run}, resume_from: {run}/step-00000001}}\n"
    )
    with pytest.raises(InputError) as error:
        load_config(str(path))
    first, *lines = str(error.value).splitlines()
    assert first == f"{path} has 4 mistakes:"
    for mistake in (
        f"data.path: there is nothing at {tmp_path}/a.h5ad",
        f"data.validation.path: there is nothing at {tmp_path}/held.h5ad",
        f"training.resume_from='{run}/step-00000001' is not a checkpoint",
        "model.name='vea' is not known",
    ):
        assert sum(mistake in line for line in lines) == 1, mistake
    with pytest.raises(InputError, match=r"has 5 mistakes(?s:.*)training\.sed"):
        load_config(str(path), changes=["training.sed=3"])
    assert not run.exists()
    path.write_text(f"data: {{path: {tmp_path}/a.h5ad}}\nmodel: vae\n")
    with pytest.raises(MissingPathError, match="^data.path: there is nothing at"):
        load_config(str(path))


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
    with pytest.raises(MissingKeyError, match="^model.label: obs has no 'cel_type'; did you mean 'cell_type'"):
        make_loaders(unfiltered, device=torch.device("cpu"))


def test_a_missing_section_does_not_hide_other_mistakes(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("training: {optimizer: {name: adamm}}\n")
    with pytest.raises(InputError) as error:
        load_config(str(path))
    assert [line for line in str(error.value).splitlines() if "adamm" in line]
    assert "data is missing" in str(error.value)
    assert "model is missing" in str(error.value)
    assert "mlp_classifier" not in str(error.value)
    path.write_text(f"data: {{path: {__file__}}}\nmodel: vae\ntraining: {{sed: 3}}\n")
    with pytest.raises(InputError, match=r"c\.yaml: training\.sed is not known; did you mean 'seed'") as one:
        load_config(str(path))
    assert "\n" not in str(one.value)


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


def test_lines_say_whether_they_are_of_training_or_validation():
    assert metrics_line({"step": 2, "epoch": 0, "loss": 0.5}) == "training    step 2  epoch 0  loss 0.5"
    figures = {"step": 2, "epoch": 0, "validation_loss": 0.5, "validation_accuracy": 0.25}
    assert metrics_line(figures) == "validation  step 2  epoch 0  loss 0.5  accuracy 25.0%"

"""scvi-tools models trained through a data module, compared with scvi-tools' own data loading."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

import dasksc
from dasksc import InputError

pytest.importorskip("scvi")
import scvi

from dasksc.integrations.scvi import SCVIDataModule

# scvi-tools and its dependencies emit their own warnings.
pytestmark = [pytest.mark.programs, pytest.mark.filterwarnings("ignore")]

N_OBS, N_VARS = 300, 40


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    """Return two cell types in two batches; the type determines which half of the genes is highly expressed."""
    rng = np.random.default_rng(0)
    types = np.arange(N_OBS) % 2
    donors = np.arange(N_OBS) // 2 % 2
    means = np.where((np.arange(N_VARS) < N_VARS // 2)[None, :] == (types == 0)[:, None], 8.0, 0.5)
    counts = rng.poisson(means * (1 + donors[:, None])).astype(np.float32)
    obs = pd.DataFrame(
        {
            "type": pd.Categorical(np.array(["T", "B"])[types]),
            "donor": pd.Categorical(np.array(["one", "two"])[donors]),
            "sex": pd.Categorical(np.array(["f", "m"])[rng.integers(0, 2, N_OBS)]),
            "age": rng.random(N_OBS).astype(np.float32),
            "holes": pd.Categorical([None, *["x"] * (N_OBS - 1)]),
        },
        index=[f"cell{i}" for i in range(N_OBS)],
    )
    return ad.AnnData(counts, obs=obs, layers={"double": 2 * counts})


@pytest.fixture(scope="module")
def path(adata, tmp_path_factory):
    path = tmp_path_factory.mktemp("atlas") / "atlas.h5ad"
    adata.write_h5ad(path)
    return path


def data_module(path, **options) -> SCVIDataModule:
    options = {"batch_size": 64, "batch_key": "donor", "labels_key": "type", "seed": 0, **options}
    return SCVIDataModule(path, train=dasksc.BlockShuffling(8), **options)


def train(data: SCVIDataModule, tmp_path, max_epochs: int = 20) -> scvi.model.SCVI:
    scvi.settings.seed = 0
    scvi.settings.logging_dir = str(tmp_path)
    model = scvi.model.SCVI(registry=data.registry, n_latent=4, n_hidden=16)
    model.train(datamodule=data, max_epochs=max_epochs, accelerator="cpu", devices=1, enable_progress_bar=False)
    return model


def test_batches_have_the_keys_and_values_of_scvis_own(adata, path):
    data = data_module(path, categorical_covariate_keys=["sex"], continuous_covariate_keys=["age"])
    ours = next(iter(data.inference_dataloader(batch_size=N_OBS)))
    whole = adata.copy()
    scvi.model.SCVI.setup_anndata(
        whole,
        batch_key="donor",
        labels_key="type",
        categorical_covariate_keys=["sex"],
        continuous_covariate_keys=["age"],
    )
    model = scvi.model.SCVI(whole)
    theirs = next(iter(model._make_data_loader(whole, batch_size=N_OBS)))
    assert set(theirs) <= set(ours)
    for key, values in theirs.items():
        assert torch.equal(ours[key].double(), values.double()), key
        assert ours[key].shape == values.shape, key
    # Models created from the registry and from the AnnData have parameters of the same names and shapes.
    ours_made = scvi.model.SCVI(registry=data.registry)
    shapes = {name: tuple(value.shape) for name, value in model.module.state_dict().items()}
    assert shapes == {name: tuple(value.shape) for name, value in ours_made.module.state_dict().items()}


def test_a_model_trained_on_the_file_tells_the_types_apart(adata, path, tmp_path):
    data = data_module(path, validate=dasksc.Streaming(indices=np.arange(0, N_OBS, 10)))
    model = train(data, tmp_path)
    history = model.history["reconstruction_loss_train"].to_numpy().ravel()
    assert len(history) == 20
    assert history[-1] < history[0]
    latent = model.get_latent_representation(dataloader=data.inference_dataloader())
    assert latent.shape == (N_OBS, 4)
    first = (adata.obs["type"] == "T").to_numpy()
    between = latent[first].mean(axis=0) - latent[~first].mean(axis=0)
    spread = latent[first].std(axis=0) + latent[~first].std(axis=0)
    assert (np.abs(between) / spread).max() > 1
    some = model.get_latent_representation(dataloader=data.inference_dataloader(indices=np.arange(100, 130)))
    assert some.shape == (30, 4)


def test_a_saved_model_is_loaded_with_the_module(path, tmp_path):
    data = data_module(path)
    model = train(data, tmp_path, max_epochs=1)
    model.save(tmp_path / "model", datamodule=data, save_anndata=False)
    again = scvi.model.SCVI.load(tmp_path / "model", adata=False, accelerator="cpu")
    expected = model.get_latent_representation(dataloader=data.inference_dataloader())
    found = again.get_latent_representation(dataloader=data.inference_dataloader())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_layer_can_be_read_instead_of_x(adata, path):
    data = data_module(path, layer="double")
    batch = next(iter(data.inference_dataloader(batch_size=N_OBS)))
    np.testing.assert_array_equal(batch["X"].numpy(), adata.layers["double"])


def test_columns_that_do_not_fit_are_refused(path):
    with pytest.raises(InputError, match=r"obs\['age'\] is not categorical"):
        data_module(path, batch_key="age")
    with pytest.raises(InputError, match=r"obs\['holes'\] has missing values"):
        data_module(path, batch_key="holes")
    with pytest.raises(InputError, match="no 'nobody'"):
        data_module(path, labels_key="nobody")

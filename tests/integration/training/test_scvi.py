"""scvi-tools models trained through a data module, compared with scvi-tools' own data loading."""

from __future__ import annotations

from types import SimpleNamespace

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch

import dasksc
from dasksc import InputError, WrongTypeError

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
            "nan": np.r_[np.nan, np.ones(N_OBS - 1)],
            "inf": np.r_[np.inf, np.ones(N_OBS - 1)],
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
    train = dasksc.BlockShuffling(8)
    options = {"batch_size": 64, "train": train, "batch_key": "donor", "labels_key": "type", "seed": 0, **options}
    return SCVIDataModule(path, **options)


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


def test_columns_that_do_not_fit_are_refused(path):
    with pytest.raises(InputError, match=r"obs\['age'\]"):
        data_module(path, batch_key="age")
    with pytest.raises(InputError, match=r"obs\['holes'\]"):
        data_module(path, batch_key="holes")
    with pytest.raises(InputError, match="no 'nobody'"):
        data_module(path, labels_key="nobody")
    for key, fact in (("nan", "'cell0'"), ("inf", "'cell0'"), ("sex", "category")):
        with pytest.raises(InputError, match=rf"obs\['{key}'\] .*{fact}"):
            data_module(path, continuous_covariate_keys=[key])
    # Values of cells that the filter leaves out do not matter.
    data = data_module(path, batch_key="holes", continuous_covariate_keys=["nan"], filter="nan == nan")
    assert data.n_obs == N_OBS - 1


@pytest.mark.parametrize(
    ("options", "error", "fact"),
    [
        ({"layout": "csr"}, InputError, "layout="),
        ({"batch_transform": str}, InputError, "batch_transform="),
        ({"layuot": "csr"}, WrongTypeError, "layuot="),
        ({"rank": 0}, WrongTypeError, "rank="),
        ({"layer": "triple"}, InputError, "'triple'"),
        ({"genes": ["nothing"]}, InputError, "'nothing'"),
        ({"filter": "age > 2"}, InputError, "age > 2"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_at_once(path, options, error, fact):
    with pytest.raises(error, match=fact):
        data_module(path, **options)


def test_every_loader_yields_the_same_keys_and_an_interrupted_epoch_is_resumed(adata, path):
    def module() -> SCVIDataModule:
        options = {"label_key": "type", "continuous_covariate_keys": ["age"], "obs": ["sex"]}
        data = data_module(path, train="balance", validate="stream", transform=double, **options)
        data.setup("fit")
        return data

    def double(batch: dasksc.Batch) -> dasksc.Batch:
        assert "sex" in batch.obs
        batch.X.mul_(2)
        return batch

    data = module()
    batches = iter(data.train_dataloader())
    seen = [next(batches), next(batches)]
    state = data.state_dict()
    for batch in (*seen, next(iter(data.val_dataloader())), next(iter(data.inference_dataloader([7, 200], 2)))):
        rows = batch["ind_x"].ravel()
        assert set(batch) == {"X", "batch", "labels", "ind_x", "extra_continuous_covs"}
        assert np.array_equal(batch["X"], 2 * adata.X[rows])
        assert np.array_equal(batch["labels"].ravel(), adata.obs["type"].cat.codes.to_numpy()[rows])
        assert np.array_equal(batch["extra_continuous_covs"].ravel(), adata.obs["age"].to_numpy()[rows])
    again = module()
    again.load_state_dict(state)
    for ours, expected in zip(again.train_dataloader(), batches, strict=True):
        assert torch.equal(ours["ind_x"], expected["ind_x"])


def rank_of(path, rank: int, world_size: int, **options) -> SCVIDataModule:
    """Return a data module with the data sets of a rank, as a trainer makes them."""
    data = data_module(path, validate="stream", **options)
    ranks = {"rank": rank, "num_replicas": world_size}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=ranks, overfit_batches=0)
    data.setup("fit")
    return data


def test_two_ranks_divide_training_and_validation_and_each_infers_every_cell(path):
    ranks = [rank_of(path, rank, 2) for rank in range(2)]
    for loader in ("train_dataloader", "val_dataloader"):
        rows = [batch["ind_x"].ravel() for data in ranks for batch in getattr(data, loader)()]
        assert sorted(torch.cat(rows).tolist()) == list(range(N_OBS))
    for data in ranks:
        rows = [batch["ind_x"].ravel() for batch in data.inference_dataloader()]
        assert torch.cat(rows).tolist() == list(range(N_OBS))


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 299), (2, 149), (1, 1)])
def test_a_batch_of_one_cell_is_refused_before_training(path, world_size, batch_size):
    with pytest.raises(InputError, match=rf"batch_size={batch_size}\b"):
        rank_of(path, 0, world_size, batch_size=batch_size)
    if batch_size > 1:
        data = rank_of(path, 0, world_size, batch_size=batch_size, drop_last=True)
        assert all(len(batch["X"]) == batch_size for batch in data.train_dataloader())

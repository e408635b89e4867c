"""Guards of `dasksc.predict`: errors for invalid input before any damage, and recovery from faults."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

import dasksc
from dasksc import InputError, WrongTypeError
from dasksc.inference import _WITHOUT_EFFECT
from tests.support.data import make_adata

pytestmark = pytest.mark.core

BATCH = 8


def two(batch: Any) -> Any:
    return (batch if isinstance(batch, torch.Tensor) else batch["X"])[:, :2]


def coded(batch: Any) -> dict[str, Any]:
    return {"predicted": torch.zeros(len(batch), dtype=torch.int64)}


def read(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


def predict(model: Any, data: Any, out: Path, **options: Any) -> dasksc.PredictionReport:
    return dasksc.predict(model, data, out, batch_size=BATCH, **options)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "shuffle"},
        {"drop_last": True},
        {"seed": 0},
        {"filter": "int64 > 0"},
        {"equal_ranks": False},
        {"label_key": "cell_type", "seed": 3},
    ],
)
def test_options_that_select_or_order_cells_are_refused_by_name(atlas, tmp_path, options):
    with pytest.raises(InputError, match="all cells are predicted once, in storage order") as refused:
        predict(two, atlas, tmp_path / "emb.zarr", **options)
    assert all(f"{name}=" in str(refused.value).split(" cannot be given")[0] for name in options)
    assert entries(tmp_path) == ["atlas.h5ad"]


def test_every_option_of_a_data_set_is_either_listed_or_refused():
    listed = set(inspect.signature(dasksc.predict).parameters)
    given = set(inspect.signature(dasksc.scDataset).parameters)
    assert given - listed == {*_WITHOUT_EFFECT, "data_collection", "return_index"}


# --- Names and labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_column", [True, False])
@pytest.mark.parametrize(
    "name", ["_index", "zarr.json", ".hidden", "__private", "a/b", "a\\b", "a\0b", "a\nb", "..", "", "x" * 201, 3, None]
)
def test_a_name_that_a_store_cannot_hold_is_refused(atlas, tmp_path, name, as_column):
    with pytest.raises(InputError, match="obsm.*obs"):
        predict(lambda batch: {name: two(batch)[:, 0] if as_column else two(batch)}, atlas, tmp_path / "emb.zarr")
    assert entries(tmp_path) == ["atlas.h5ad"]


def test_the_names_of_the_cells_are_never_replaced(tmp_path):
    adata = make_adata(203, 17)
    adata.obs.index.name = "barcode"
    path = tmp_path / "named.zarr"
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=3):
        adata.write_zarr(path)
    with pytest.raises(InputError, match="'obs/barcode'"):
        predict(lambda b: {"barcode": two(b)[:, 0]}, path, path, overwrite=True)
    assert list(read(path).obs_names) == list(adata.obs_names)
    assert entries(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ("AB", WrongTypeError, "codes"),
        ({"A", "B"}, WrongTypeError, "codes"),
        (None, WrongTypeError, "codes"),
        ([], InputError, "has no labels"),
        (["A", "B", "A"], InputError, "the label 'A' twice"),
        (["A", 1], InputError, "all text or all numbers"),
        (["A", None], InputError, "none missing"),
        ([0.5, float("nan")], InputError, "none missing"),
        ([object()], InputError, "all text or all numbers"),
    ],
)
def test_labels_that_cannot_be_categories_are_refused(atlas, tmp_path, labels, error, message):
    with pytest.raises(error, match=message):
        predict(coded, atlas, tmp_path / "emb.zarr", categories={"predicted": labels})
    with pytest.raises(WrongTypeError, match="is not a dict"):
        predict(coded, atlas, tmp_path / "emb.zarr", categories=["A"])
    assert entries(tmp_path) == ["atlas.h5ad"]


def test_a_dict_may_change_its_order_but_not_its_keys(atlas, tmp_path):
    n_called = 0

    def both(batch: Any) -> dict[str, Any]:
        nonlocal n_called
        n_called += 1
        names = ("a", "b") if n_called % 2 else ("b", "a")
        return {name: two(batch) + (name == "b") for name in names}

    predict(both, atlas, tmp_path / "emb.zarr")
    written = read(tmp_path / "emb.zarr")
    assert np.array_equal(written.obsm["b"], written.obsm["a"] + 1)


# --- Output locations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["emb.zarr", "obsm/X_emb", "X/deep/emb.zarr"])
def test_a_path_inside_a_store_is_refused(atlas, tmp_path, inside):
    store = tmp_path / "store.zarr"
    dasksc.convert(atlas, store)
    before = sorted(store.rglob("*"))
    with pytest.raises(InputError, match=r"store\.zarr"):
        predict(two, store, store / inside)
    assert sorted(store.rglob("*")) == before


# --- Shards ---------------------------------------------------------------------------------------------


def test_a_shard_that_is_gone_is_predicted_again(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    predict(two, atlas, out, rank=0, world_size=2)
    (tmp_path / "emb.zarr.partial/store/obsm/X_emb/c/3/0").unlink()
    assert not predict(two, atlas, out, rank=1, world_size=2).is_complete
    report = predict(two, atlas, out)
    assert (report.n_predicted, report.is_complete) == (16, True)
    assert np.array_equal(read(out).obsm["X_emb"], read(atlas).X[:, :2].todense())


# --- Random transforms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_transforms_draw_what_the_plain_loop_draws(atlas, tmp_path, world_size):
    transform = [dasksc.transforms.Downsample(0.5, seed=1), dasksc.transforms.MaskGenes(0.3, seed=2)]
    plain = dasksc.scDataset(atlas, dasksc.Streaming(), BATCH, transform=transform, rank=0, world_size=1)
    expected = np.concatenate([batch.X[:, :2].numpy() for batch in plain])
    for rank in range(world_size):
        shuffled = dasksc.scDataset(
            *(atlas, dasksc.BlockShuffling(4), BATCH), transform=transform, seed=0, rank=rank, world_size=world_size
        )
        dasksc.predict(two, shuffled, tmp_path / "emb.zarr")
    assert np.array_equal(read(tmp_path / "emb.zarr").obsm["X_emb"], expected)
    assert not np.array_equal(expected, read(atlas).X[:, :2].todense())

"""Guards of `dasksc.predict`: errors for invalid input before any damage, and recovery from faults."""

from __future__ import annotations

import inspect
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

import dasksc
from dasksc import InputError, StorageError, WrongTypeError
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
    with pytest.raises(InputError, match="cannot be a key of obsm or obs"):
        predict(lambda batch: {name: two(batch)[:, 0] if as_column else two(batch)}, atlas, tmp_path / "emb.zarr")
    assert entries(tmp_path) == ["atlas.h5ad"]


@pytest.mark.parametrize("kind", ["file", "store"])
def test_the_names_of_the_cells_are_never_replaced(tmp_path, kind):
    adata = make_adata(203, 17)
    adata.obs.index.name = "barcode"
    path = tmp_path / ("named.h5ad" if kind == "file" else "named.zarr")
    with warnings.catch_warnings(action="ignore"), ad.settings.override(zarr_write_format=3):
        adata.write_h5ad(path) if kind == "file" else adata.write_zarr(path)
    with pytest.raises(InputError, match=r"'obs/barcode', which is the key of the cell names"):
        predict(lambda b: {"barcode": two(b)[:, 0]}, path, path, overwrite=True, in_place=kind == "file")
    assert list(read(path).obs_names) == list(adata.obs_names)
    assert entries(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ("AB", WrongTypeError, "in the order of the codes"),
        ({"A", "B"}, WrongTypeError, "in the order of the codes"),
        (None, WrongTypeError, "in the order of the codes"),
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


@pytest.mark.parametrize("labels", [["A"], np.array(["A", "B"]), [7, 8], [True, False], [0.5, 1.5]])
def test_labels_are_text_or_numbers(atlas, tmp_path, labels):
    predict(coded, atlas, tmp_path / "emb.zarr", categories={"predicted": labels})
    assert list(read(tmp_path / "emb.zarr").obs["predicted"].cat.categories) == list(labels)


def test_a_model_that_expects_a_batch_where_it_gets_a_tensor_learns_what_to_request(atlas, tmp_path):
    with pytest.raises(AttributeError, match="'X'") as found:
        predict(lambda batch: batch.X[:, :2], atlas, tmp_path / "emb.zarr")
    assert found.value.__notes__[0].endswith(
        f"a tensor of shape ({BATCH}, {ad.read_h5ad(atlas, backed='r').n_vars}), which has no 'X'. Use the tensor "
        "itself, or pass a data set that yields a Batch: scDataset(..., return_index=True), or obs= with the columns "
        "that the model reads."
    )
    with pytest.raises(AttributeError, match="'Y'") as found:
        predict(lambda batch: torch.nn.Linear(2, 2).Y, atlas, tmp_path / "emb.zarr")
    assert not getattr(found.value, "__notes__", [])


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


def test_numbers_of_more_than_64_bits_and_invalid_devices_are_refused(atlas, tmp_path):
    with pytest.raises(InputError, match="at most 64 bits"):
        predict(lambda batch: two(batch).numpy().astype(np.longdouble), atlas, tmp_path / "emb.zarr")
    with pytest.raises(InputError, match="device='cud' is not a device"):
        predict(two, atlas, tmp_path / "emb.zarr", device="cud")


# --- Output locations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["emb.zarr", "obsm/X_emb", "X/deep/emb.zarr"])
def test_a_path_inside_a_store_is_refused(atlas, tmp_path, inside):
    store = tmp_path / "store.zarr"
    dasksc.convert(atlas, store)
    before = sorted(store.rglob("*"))
    with pytest.raises(InputError, match=r"lies inside the Zarr store .*store\.zarr"):
        predict(two, store, store / inside)
    assert sorted(store.rglob("*")) == before


# --- Two runs at once -----------------------------------------------------------------------------------


def test_a_second_run_for_the_same_cells_is_refused_while_the_first_is_at_work(atlas, tmp_path):
    out, is_inside, may_end = tmp_path / "emb.zarr", threading.Event(), threading.Event()

    def slow(batch: Any) -> Any:
        is_inside.set()
        assert may_end.wait(60)
        return two(batch)

    adata = dasksc.open(atlas)
    first = threading.Thread(target=predict, args=(slow, adata, out), kwargs={"scheduler": "synchronous"})
    first.start()
    try:
        assert is_inside.wait(60)
        again = {"rank": 1, "world_size": 2}
        for options in ({}, again, {"overwrite": True}):
            with pytest.raises(
                StorageError, match=f"written by process {os.getpid()} on .*Wait for that process or stop it"
            ):
                predict(slow, adata, out, **options)
        for overwrite in (False, True):
            with pytest.raises(StorageError, match="Wait for that process or stop it"):
                predict(two, adata, out, overwrite=overwrite)
    finally:
        may_end.set()
        first.join()
    assert np.array_equal(read(out).obsm["X_emb"], read(atlas).X[:, :2].todense())
    assert entries(tmp_path) == ["atlas.h5ad", "emb.zarr"]


def test_a_second_key_for_a_file_is_refused_while_the_first_is_predicted(atlas, tmp_path):
    before, is_inside, may_end = atlas.read_bytes(), threading.Event(), threading.Event()
    n_called, refused = 0, []

    def slow(batch: Any) -> Any:
        nonlocal n_called
        n_called += 1
        if n_called > 8:  # two units of two batches are complete, and others have begun
            is_inside.set()
            assert may_end.wait(60)
        return two(batch)

    options = {"key": "X_first", "in_place": True, "scheduler": "synchronous"}
    first = threading.Thread(target=predict, args=(slow, atlas, atlas), kwargs=options)
    first.start()
    try:
        assert is_inside.wait(60)
        for overwrite in (False, True):
            with pytest.raises(
                StorageError, match=rf"atlas\.h5ad is being written by process {os.getpid()} on "
            ) as error:
                predict(two, atlas, atlas, key="X_second", in_place=True, overwrite=overwrite)
            refused.append(str(error.value))
        assert atlas.read_bytes() == before
    finally:
        may_end.set()
        first.join()
    assert len(refused) == 2
    assert all("Wait for that process or stop it" in one for one in refused)
    predict(two, atlas, atlas, key="X_second", in_place=True)
    assert {"X_first", "X_second"} <= set(read(atlas).obsm)
    assert entries(tmp_path) == ["atlas.h5ad"]


def test_a_second_key_for_a_file_is_refused_while_the_first_is_unfinished(atlas, tmp_path):
    model = torch.nn.Linear(17, 2)
    hook = model.register_forward_hook(stopped(8))
    with pytest.raises(Stopped):
        predict(model, atlas, atlas, key="X_first", in_place=True)
    hook.remove()
    with pytest.raises(InputError, match=r"atlas\.h5ad\.partial holds an unfinished prediction .*differs .* in .*key"):
        predict(two, atlas, atlas, key="X_second", in_place=True)
    predict(model, atlas, atlas, key="X_first", in_place=True)
    predict(two, atlas, atlas, key="X_second", in_place=True)
    assert {"X_first", "X_second"} <= set(read(atlas).obsm)
    assert entries(tmp_path) == ["atlas.h5ad"]


def test_a_run_without_a_complete_unit_does_not_block_others(atlas, tmp_path):
    model = torch.nn.Linear(17, 2)
    model.register_forward_hook(stopped(1))
    with pytest.raises(Stopped):
        predict(model, atlas, tmp_path / "emb.zarr")
    assert predict(two, atlas, tmp_path / "emb.zarr").n_predicted == 203


# --- Damaged notes --------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


def stopped(after: int) -> Any:
    n_called = 0

    def hook(*_: Any) -> None:
        nonlocal n_called
        n_called += 1
        if n_called > after:
            raise Stopped

    return hook


@pytest.mark.parametrize(("note", "n_left"), [("plan.json", 203), ("*/done/1.json", 203 - 3 * 16)])
def test_a_note_that_a_power_failure_emptied_counts_as_missing(atlas, tmp_path, note, n_left):
    out = tmp_path / "emb.zarr"
    torch.manual_seed(0)
    model = torch.nn.Linear(17, 2)
    hook = model.register_forward_hook(stopped(8))
    with pytest.raises(Stopped):
        predict(model, atlas, out)
    hook.remove()
    (emptied,) = (tmp_path / "emb.zarr.partial").glob(note)
    emptied.write_text("")
    assert predict(model, atlas, out).n_predicted == n_left
    predict(model, atlas, tmp_path / "whole.zarr")
    assert np.array_equal(read(out).obsm["X_emb"], read(tmp_path / "whole.zarr").obsm["X_emb"])


def test_a_shard_that_is_gone_is_named(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    predict(two, atlas, out, rank=0, world_size=2)
    shutil.rmtree(next((tmp_path / "emb.zarr.partial").glob("*/store/obsm/X_emb/c/3")))
    with pytest.raises(dasksc.CorruptDataError, match=r"c/3/0 was removed\. Remove .* and predict again"):
        predict(two, atlas, out, rank=1, world_size=2)
    assert not out.exists()


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

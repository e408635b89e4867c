"""Predictions: equal to those of a plain loop, published whole, and resumed by any number of ranks."""

from __future__ import annotations

import errno
import itertools
import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import zarr
from torch import nn
from torch.distributed import HashStore, PrefixStore

import dasksc
from dasksc import InputError, MissingKeyError, MissingPathError, StorageError, WrongTypeError
from dasksc.inference import publishing
from dasksc.inspection.report import Report
from dasksc.output import shards
from tests.support.conversions import read
from tests.support.data import make_adata, write_store
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.core

N_OBS, N_VARS, BATCH = 203, 17, 8
LABELS = ["B cell", "T cell", "NK cell"]


class Embedder(nn.Module):
    def __init__(self, width: int = 5, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(N_VARS, width)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.linear(self.dropout(batch if isinstance(batch, torch.Tensor) else batch["X"]))

    def both(self, batch: Any) -> dict[str, Any]:
        scores = self(batch)
        return {"X_emb": scores, "predicted": scores[:, :3].argmax(1), "score": scores.max(1).values}


def plain(model: nn.Module, data: Any, **options: Any) -> np.ndarray:
    model.eval()
    with torch.no_grad():
        dataset = dasksc.scDataset(data, dasksc.Streaming(), BATCH, rank=0, world_size=1, **options)
        return np.concatenate([model(batch).numpy() for batch in dataset])


def predict(model: Any, data: Any, out: Path, **options: Any) -> Report:
    if not isinstance(data, dasksc.scDataset):
        options = {"batch_size": BATCH, **options}
    return dasksc.predict(model, data, out, **options)


def test_predictions_are_those_of_the_plain_loop(atlas, tmp_path):
    model, out = Embedder(), tmp_path / "a::b.zarr"
    report = predict(model, atlas, out)
    expected = plain(model, atlas)
    written = read(out)
    assert np.array_equal(written.obsm["X_emb"], expected)
    assert list(written.obs_names) == [f"cell{i}" for i in range(N_OBS)]
    assert (report.n_predicted, report.is_complete) == (N_OBS, True)
    assert report.outputs == {"obsm/X_emb": f"({N_OBS}, 5) float32"}
    assert not (tmp_path / "emb.zarr.partial").exists()


def test_the_request_of_a_data_set_is_used_and_its_strategy_and_filter_are_not(atlas, tmp_path):
    class Model(nn.Module):
        def forward(self, batch: Any) -> torch.Tensor:
            return batch.X.to_dense()[:, :2] * 10 + batch.obs["cell_type"][:, None] + batch.index[:, None]

    request = {"obs": ["cell_type"], "layout": "csr", "genes": ["gene5", "gene3"]}
    shuffled = dasksc.scDataset(
        atlas, dasksc.BlockShuffling(4), BATCH, filter="int64 > 0", drop_last=True, seed=0, **request
    )
    before = shuffled.state_dict()
    predict(Model(), shuffled, tmp_path / "emb.zarr")
    assert np.array_equal(read(tmp_path / "emb.zarr").obsm["X_emb"], plain(Model(), atlas, **request))
    assert shuffled.state_dict() == before
    assert len(shuffled) < N_OBS // BATCH


@pytest.mark.parametrize("kind", ["array", "anndata", "nameless", "hooks"])
def test_any_collection_is_read(kind, atlas, tmp_path):
    adata = make_adata(N_OBS, N_VARS, layout="dense")
    data = {
        "array": adata.X,
        "anndata": adata,
        "nameless": dasksc.open(atlas, names=False),
        "hooks": dasksc.scDataset(
            adata, dasksc.Streaming(), BATCH, batch_transform=lambda part: torch.from_numpy(np.asarray(part.X))
        ),
    }[kind]

    def first(batch: Any) -> Any:
        return np.asarray(batch)[:, :2]

    predict(first, data, tmp_path / "emb.zarr")
    written = read(tmp_path / "emb.zarr")
    expected = dasksc.open(atlas).X[:, :2].compute().toarray() if kind == "nameless" else adata.X[:, :2]
    assert np.array_equal(written.obsm["X_emb"], expected)
    assert written.obs_names[7] == ("cell7" if kind in ("anndata", "hooks") else "7")


def test_the_mode_of_every_part_is_restored_and_no_gradients_are_kept(atlas, tmp_path):
    model = Embedder().train()
    model.linear.eval()
    seen = []

    def noting(part: nn.Module, *_: Any) -> None:
        seen.append((part.training, torch.is_inference_mode_enabled()))

    model.dropout.register_forward_hook(noting)
    predict(model, atlas, tmp_path / "emb.zarr")
    assert set(seen) == {(False, True)}
    assert (model.training, model.dropout.training, model.linear.training) == (True, True, False)

    def failing(batch: Any) -> None:
        raise ZeroDivisionError

    model.forward = failing
    with pytest.raises(ZeroDivisionError):
        predict(model, atlas, tmp_path / "other.zarr")
    assert (model.training, model.linear.training) == (True, False)


def test_a_rank_that_fails_keeps_what_others_have_written_meanwhile(atlas, tmp_path):
    out = tmp_path / "emb.zarr"

    def model(batch: Any) -> Any:
        assert not predict(first_columns, atlas, out, rank=0, world_size=2).is_complete
        raise Killed

    with pytest.raises(Killed) as failed:
        predict(model, atlas, out, rank=1, world_size=2)
    assert any("emb.zarr.partial" in note for note in failed.value.__notes__)
    report = predict(first_columns, atlas, out, rank=1, world_size=2)
    assert (report.n_predicted, report.is_complete) == (N_OBS - 96, True)


def first_columns(batch: Any) -> Any:
    return batch[:, :2] + 0.5


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("n_batches", "world_size"), [(0, 3), (2, 1), (7, 3), (25, 20)])
def test_missing_units_are_predicted_by_any_number_of_ranks(atlas, tmp_path, n_batches, world_size):
    model, out = Embedder(), tmp_path / "emb.zarr"
    n_called = 0

    def count(*_: Any) -> None:
        nonlocal n_called
        n_called += 1
        if n_called > n_batches:
            raise Killed

    hook = model.register_forward_hook(count)
    with pytest.raises(Killed):
        predict(model, atlas, out)
    hook.remove()
    assert not out.exists()
    reports = [predict(model, atlas, out, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(report.n_predicted for report in reports) == N_OBS - 16 * (n_batches // 2)
    assert np.array_equal(read(out).obsm["X_emb"], plain(model, atlas))


def unfinished(model: Any, atlas: Any, out: Path, n_batches: int = 4, **options: Any) -> None:
    n_called = itertools.count()

    def interrupted(batch: Any) -> Any:
        if next(n_called) == n_batches:
            raise Killed
        return model(batch)

    with pytest.raises(Killed):
        predict(interrupted, atlas, out, **options)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"genes": [f"gene{i}" for i in range(16, -1, -1)]}, "data"),
        ({"batch_size": 4}, "batch_size"),
        ({"key": "X_other"}, "key"),
        ({"transform": dasksc.transforms.MaskGenes(0.5, seed=0)}, "hooks"),
    ],
)
def test_unfinished_predictions_of_another_kind_are_refused_by_name_or_discarded(atlas, tmp_path, change, what):
    out = tmp_path / "emb.zarr"
    unfinished(Embedder().eval(), atlas, out)
    with pytest.raises(InputError, match=f"{what}.*overwrite=True"):
        predict(Embedder(), atlas, out, **change)
    report = predict(Embedder(), atlas, out, overwrite=True, **change)
    assert report.n_predicted == N_OBS


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_atlas_changed_in_place_is_not_mixed_with_what_was_predicted_before(tmp_path, is_complete):
    atlas, out = write_store(make_adata(N_OBS, N_VARS, layout="dense"), tmp_path, "zarr3"), tmp_path / "emb.zarr"
    values = zarr.open_group(atlas, mode="r+", use_consolidated=False)["X"]
    if is_complete:
        predict(Embedder(), atlas, out)
    else:
        unfinished(Embedder().eval(), atlas, out)
    values[:] = values[:] + 1
    with pytest.raises(InputError, match="overwrite=True"):
        predict(Embedder(), atlas, out)
    assert predict(Embedder(), atlas, out, overwrite=True).n_predicted == N_OBS
    np.testing.assert_array_equal(read(out).obsm["X_emb"], plain(Embedder(), atlas))


@pytest.fixture
def store(atlas, tmp_path) -> Path:
    path = tmp_path / "store.zarr"
    dasksc.convert(atlas, path)
    return path


def test_a_store_gets_further_keys_in_its_own_order(store, tmp_path, monkeypatch):
    for name in ("_LEAST_ROWS", "_MOST_ROWS"):
        monkeypatch.setattr(f"dasksc.inference.store.{name}", 64)
    model = Embedder()
    report = predict(model.both, store, store, categories={"predicted": LABELS})
    assert set(report.outputs) == {"obsm/X_emb", "obs/predicted", "obs/score"}
    for written in (read(store), dasksc.open(store)):
        expected = plain(model, store)
        assert np.array_equal(np.asarray(written.obsm["X_emb"]), expected)
        assert list(written.obs["predicted"]) == [LABELS[i] for i in expected[:, :3].argmax(1)]
        assert np.array_equal(written.obs["score"], expected.max(1))
        assert list(written.obs.columns)[-2:] == ["predicted", "score"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas.h5ad", "store.zarr"]
    with pytest.raises(InputError, match="'obsm/X_emb'"):
        predict(Embedder(seed=1), store, store)
    predict(Embedder(seed=1), store, store, overwrite=True)
    assert np.array_equal(read(store).obsm["X_emb"], plain(Embedder(seed=1), store))


def test_a_process_that_was_killed_while_it_published_predicts_nothing_again(store, tmp_path, monkeypatch):
    def killed(path: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(zarr, "consolidate_metadata", killed)
        with pytest.raises(Killed):
            predict(Embedder().both, store, store, categories={"predicted": LABELS})
    report = predict(Embedder().both, store, store, categories={"predicted": LABELS})
    assert (report.n_predicted, len(report.outputs), report.is_complete) == (0, 3, True)
    assert list(dasksc.open(store).obs.columns)[-2:] == ["predicted", "score"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas.h5ad", "store.zarr"]


def two(batch: Any) -> Any:
    return (batch if isinstance(batch, torch.Tensor) else batch["X"])[:, :2]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


OUTS = ("atlas.h5ad", "none.h5ad", "text", "text/emb.zarr", "folder", "s3://bucket/emb.zarr")
NAMES = ("_index", "zarr.json", ".hidden", "a/b", "a\\b", "a\0b", "..", "", "x" * 201, None)
LABELLED: list[tuple[Any, type[Exception], str]] = [
    ("AB", WrongTypeError, "codes"),
    ([], InputError, "one for each code"),
    (["A", "B", "A"], InputError, "distinct labels"),
    (["A", 1], InputError, "text or all numbers"),
    (["A", None], InputError, "missing"),
    ([0.5, float("nan")], InputError, "missing"),
]


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        *(({"out": out}, InputError, f"{out}.*attach=|folder|local path") for out in OUTS),
        ({"key": "a/b"}, InputError, "'/'"),
        ({"nan": "maybe"}, InputError, "'error'.*'report'"),
        ({"strategy": "shuffle"}, InputError, "strategy="),
        ({"filter": "int64 > 0"}, InputError, "filter="),
        ({"label_key": "cell_type", "seed": 3}, InputError, "label_key=.*seed=|seed=.*label_key="),
        ({"categories": {"absent": LABELS}}, InputError, "'absent'"),
        ({"categories": ["A"]}, WrongTypeError, "dict"),
        *(({"key": "predicted", "categories": {"predicted": one}}, *rest) for one, *rest in LABELLED),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_any_damage(atlas, tmp_path, options, error, facts):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no atlas")
    out = options.get("out", "emb.zarr")
    given = {name: value for name, value in options.items() if name != "out"}
    with pytest.raises(error, match=facts):
        predict(two, atlas, out if "://" in out else tmp_path / out, **given)
    assert entries(tmp_path) == ["atlas.h5ad", "folder", "text"]


@pytest.mark.parametrize(
    ("returned", "error", "facts"),
    [
        (lambda x: x[:-1], InputError, "17"),
        (lambda x: x.sum(), InputError, r"\(\)"),
        (lambda x: x[:, :, None], InputError, r"\(8, 17, 1\)"),
        (lambda x: x[:, :0], InputError, r"\(8, 0\)"),
        (lambda x: x.to_sparse_csr(), InputError, "sparse"),
        (lambda x: x.numpy().astype(str), InputError, "numbers"),
        (lambda x: None, WrongTypeError, "NoneType"),
        (lambda x: {}, InputError, "empty"),
        (lambda x: x[:, : 1 + int(len(x) == 3)], InputError, "widths"),
        (lambda x: {"predicted": x}, InputError, "code"),
        (lambda x: {"predicted": torch.full((len(x),), 3)}, InputError, r"\[0, 3\)"),
        *((lambda x, name=name: {name: x}, InputError, "obsm.*obs|'/'") for name in NAMES),
    ],
)
def test_invalid_outputs_of_a_model_are_named(atlas, tmp_path, returned, error, facts):
    given = {"categories": {"predicted": LABELS}} if "code" in facts or "0, 3" in facts else {}
    with pytest.raises(error, match=facts):
        predict(returned, atlas, tmp_path / "emb.zarr", **given)
    assert not (tmp_path / "emb.zarr").exists()


def test_nan_is_refused_by_the_name_of_the_cell_or_reported(atlas, tmp_path):
    def some_nan(batch: Any) -> torch.Tensor:
        result = batch.X[:, :2].clone()
        result[(batch.index == 21) | (batch.index == 22) | (batch.index == 190), 1] = torch.nan
        return result

    dataset = dasksc.scDataset(atlas, dasksc.Streaming(), BATCH, obs=["int8"])
    with pytest.raises(InputError, match="NaN.*'X_emb'.*21"):
        predict(some_nan, dataset, tmp_path / "emb.zarr")
    report = predict(some_nan, dataset, tmp_path / "emb.zarr", nan="report")
    first = [(21, "cell21"), (22, "cell22"), (190, "cell190")]
    assert report.nan_cells == [Report(output="obsm/X_emb", n_cells=3, first=first)]
    assert np.flatnonzero(np.isnan(read(tmp_path / "emb.zarr").obsm["X_emb"]).any(1)).tolist() == [21, 22, 190]


def test_a_full_disk_is_told_and_what_is_done_is_kept(atlas, tmp_path, monkeypatch):
    n_written = 0

    def full(file: Any) -> None:
        nonlocal n_written
        n_written += 1
        if n_written > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "sync", full)
    with pytest.raises(StorageError, match="no space is left for .*Free some space"):
        predict(Embedder(), atlas, tmp_path / "emb.zarr")
    monkeypatch.setattr(shards, "sync", lambda file: None)
    assert predict(Embedder(), atlas, tmp_path / "emb.zarr").n_predicted == N_OBS - 3 * 16


def test_predictions_are_attached_lazily_and_read_with_the_atlas(atlas, tmp_path):
    model = Embedder()
    predict(model.both, atlas, tmp_path / "emb.zarr", categories={"predicted": LABELS})
    attach = {"obsm/X_emb": tmp_path / "emb.zarr", "obs/predicted": str(tmp_path / "emb.zarr")}
    adata = dasksc.open(atlas, attach=attach)
    expected = plain(model, atlas)
    assert type(adata.obsm["X_emb"]).__module__.startswith("dask")
    assert np.array_equal(adata.obsm["X_emb"].compute(), expected)
    assert list(adata.obs["predicted"]) == [LABELS[i] for i in expected[:, :3].argmax(1)]
    dataset = dasksc.scDataset(
        adata, dasksc.BlockShuffling(4), BATCH, obsm=["X_emb"], filter="predicted == 'T cell'", seed=0
    )
    for batch in dataset:
        assert np.array_equal(batch.obsm["X_emb"].numpy(), expected[batch.index])
    nameless = dasksc.open(atlas, attach={"obsm/X_emb": tmp_path / "emb.zarr"}, names=False)
    assert nameless.obsm["X_emb"].shape == (N_OBS, 5)


def test_what_is_attached_or_written_to_must_be_of_the_same_cells(atlas, store, tmp_path):
    out = tmp_path / "emb.zarr"
    predict(Embedder(), atlas, out)
    attach = {"obsm/X_emb": out}
    with pytest.raises(InputError, match="names"):
        dasksc.open(store, attach=attach)
    make_adata(50, N_VARS).write_h5ad(tmp_path / "few.h5ad")
    with pytest.raises(InputError, match="203.*50"):
        dasksc.open(tmp_path / "few.h5ad", attach=attach)
    for data, target, fact in ((atlas, store, "names"), (tmp_path / "few.h5ad", store, "203.*50")):
        with pytest.raises(InputError, match=fact):
            predict(Embedder(), data, target)
    with pytest.raises(InputError, match=r"store\.zarr"):
        predict(two, store, store / "X" / "deep" / "emb.zarr")
    assert not (store / "X" / "deep").exists()
    with pytest.raises(InputError, match="already has"):
        dasksc.open(dasksc.open(atlas, attach=attach), attach=attach)
    with pytest.raises(MissingKeyError, match="X_eme"):
        dasksc.open(atlas, attach={"obsm/X_eme": out})
    with pytest.raises(InputError, match="'obsm/NAME' or 'obs/NAME'"):
        dasksc.open(atlas, attach={"X_emb": out})
    with pytest.raises(MissingPathError):
        dasksc.open(atlas, attach={"obsm/X_emb": tmp_path / "none.zarr"})
    # Any AnnData store or file can be attached; its cell names are compared with those of the atlas.
    adata = dasksc.open(store, attach={"obs/other": _with_column(store, tmp_path)})
    assert "other" in adata.obs


def _with_column(store: Path, folder: Path) -> Path:
    adata = read(store)
    ad.AnnData(obs=adata.obs[[]].assign(other=np.arange(N_OBS))).write_h5ad(folder / "other.h5ad")
    return folder / "other.h5ad"


FACTOR = 1.0


def scaled(batch: Any) -> Any:
    """Return the first columns times a global variable, which no comparison covers."""
    return batch[:, :2] * FACTOR


@pytest.mark.parametrize(("kind", "is_finished"), [("new", False), ("store", True)])
def test_overwriting_predicts_all_cells_again(tmp_path, monkeypatch, kind, is_finished):
    atlas = write_store(make_adata(N_OBS, N_VARS), tmp_path, "zarr3")
    out = tmp_path / "emb.zarr" if kind == "new" else atlas
    expected = 2 * read(atlas).X[:, :2].toarray()
    (predict if is_finished else unfinished)(scaled, atlas, out)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert predict(scaled, atlas, out, overwrite=True).n_predicted == N_OBS
    np.testing.assert_array_equal(read(out).obsm["X_emb"], expected)
    assert predict(scaled, atlas, out).n_predicted == 0


def test_a_call_that_is_overwritten_meanwhile_ends_with_an_error_and_mixes_nothing(atlas, tmp_path):
    out, n_called = tmp_path / "emb.zarr", itertools.count()

    def overwritten(batch: Any) -> Any:
        if next(n_called) == 5:
            unfinished(lambda batch: batch[:, :2] + 1, atlas, out, overwrite=True)
        return batch[:, :2]

    with pytest.raises(StorageError, match="overwritten"):
        predict(overwritten, atlas, out)
    assert predict(lambda batch: batch[:, :2] + 1, atlas, out).n_predicted == N_OBS - 32
    np.testing.assert_array_equal(read(out).obsm["X_emb"], read(atlas).X[:, :2].toarray() + 1)


@pytest.fixture
def group(monkeypatch) -> None:
    """Let the ranks of `on_ranks` agree through a store in memory."""
    held = HashStore()
    monkeypatch.setattr(publishing, "shared_store", lambda prefix: PrefixStore(prefix, held))
    monkeypatch.setattr(publishing, "_ordinals", defaultdict(itertools.count))


@pytest.mark.usefixtures("group")
def test_ranks_of_a_group_overwrite_together(atlas, tmp_path, monkeypatch):
    out = tmp_path / "emb.zarr"
    adata, expected = dasksc.open(atlas), read(atlas).X[:, :2].toarray()
    options = {"world_size": 2, "overwrite": True, "scheduler": "synchronous"}
    for factor in (1.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        reports = on_ranks(2, lambda rank, store: predict(scaled, adata, out, rank=rank, **options))
        assert [getattr(report, "is_complete", report) for report in reports] == [True, True]
        assert sum(report.n_predicted for report in reports) == N_OBS
        np.testing.assert_array_equal(read(out).obsm["X_emb"], factor * expected)


def failing(batch: Any) -> Any:
    raise ZeroDivisionError("this rank fails")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "model", "error", "what"),
    [
        ({"nan": "maybe"}, first_columns, InputError, "maybe"),
        ({"genes": ["none"]}, first_columns, InputError, "none"),
        ({}, failing, ZeroDivisionError, "this rank fails"),
        ({}, lambda batch: batch[:, :0], InputError, "shape"),
    ],
)
def test_a_start_that_one_rank_refuses_fails_on_all_ranks_and_leaves_nothing(
    atlas, tmp_path, options, model, error, what
):
    adata, failing_rank = dasksc.open(atlas), 1

    def act(rank: int, store: Any) -> Any:
        mine, given = (model, options) if rank == failing_rank else (first_columns, {})
        return predict(mine, adata, tmp_path / "emb.zarr", rank=rank, world_size=2, scheduler="synchronous", **given)

    failed = on_ranks(2, act)
    assert isinstance(failed[failing_rank], error)
    assert isinstance(failed[1 - failing_rank], StorageError)
    assert all(what in str(one) for one in failed)
    assert [path.name for path in tmp_path.iterdir()] == ["atlas.h5ad"]


def test_data_in_memory_of_equal_type_and_length_are_told_apart(tmp_path):
    out = tmp_path / "emb.zarr"
    matrix = sp.random(N_OBS, N_VARS, density=0.5, format="csr", random_state=0)

    def ends(batch: Any) -> np.ndarray:
        return batch[:, :2].toarray()

    assert predict(ends, matrix, out).n_predicted == N_OBS
    assert predict(ends, sp.random(N_OBS, N_VARS, density=0.5, format="csr", random_state=0), out).n_predicted == 0
    with pytest.raises(InputError, match=re.escape(out.name)):
        predict(ends, 2 * matrix, out)


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


def test_an_atlas_without_cells_is_refused(tmp_path):
    with pytest.raises(InputError, match="no cells"):
        predict(two, make_adata(8)[:0].copy(), tmp_path / "emb.zarr")
    assert not list(tmp_path.iterdir())

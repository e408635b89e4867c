"""Predictions: equal to those of a plain loop, published whole, and resumed by any number of ranks."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from torch import nn

import dasksc
from dasksc import InputError, MissingKeyError, MissingPathError, StorageError, WrongTypeError
from dasksc.atlas import view
from dasksc.atlas.cell_names import stored_names
from dasksc.inference import Predictions, targets
from dasksc.inference.digests import model_digest
from dasksc.inference.work import Work, runs_of, unit_rows_for
from dasksc.output import shards
from tests.support import cell_ranger
from tests.support.data import make_adata
from tests.support.programs import ended, run
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
    """Return the predictions of a plain loop over batches."""
    model.eval()
    with torch.no_grad():
        dataset = dasksc.scDataset(data, dasksc.Streaming(), BATCH, rank=0, world_size=1, **options)
        return np.concatenate([model(batch).numpy() for batch in dataset])


def read(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


def predict(model: Any, data: Any, out: Path, **options: Any) -> dasksc.PredictionReport:
    if not isinstance(data, dasksc.scDataset):
        options = {"batch_size": BATCH, **options}
    return dasksc.predict(model, data, out, **options)


# --- Written predictions --------------------------------------------------------------------------------


def test_predictions_are_those_of_the_plain_loop(atlas, tmp_path):
    model = Embedder()
    report = predict(model, atlas, tmp_path / "emb.zarr")
    expected = plain(model, atlas)
    written = read(tmp_path / "emb.zarr")
    assert np.array_equal(written.obsm["X_emb"], expected)
    assert list(written.obs_names) == [f"cell{i}" for i in range(N_OBS)]
    assert (report.n_predicted, report.is_complete) == (N_OBS, True)
    assert report.keys == {"obsm/X_emb": f"({N_OBS}, 5) float32"}
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


def test_a_dict_becomes_matrices_columns_and_categories(atlas, tmp_path):
    model = Embedder()
    predict(model.both, atlas, tmp_path / "emb.zarr", categories={"predicted": LABELS})
    written, expected = read(tmp_path / "emb.zarr"), plain(model, atlas)
    assert np.array_equal(written.obsm["X_emb"], expected)
    assert list(written.obs["predicted"]) == [LABELS[i] for i in expected[:, :3].argmax(1)]
    assert list(written.obs["predicted"].cat.categories) == LABELS
    assert np.array_equal(written.obs["score"], expected.max(1))


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


@pytest.mark.parametrize("kind", ["10x v3", "10x v2", "zip"])
def test_the_names_of_the_cells_are_those_of_the_file_at_a_path(kind, atlas, tmp_path):
    path = tmp_path / ("atlas.zarr.zip" if kind == "zip" else "atlas.h5")
    if kind == "zip":
        dasksc.convert(atlas, tmp_path / "atlas.zarr")
        shutil.make_archive(str(path.with_suffix("")), "zip", tmp_path / "atlas.zarr")
    elif kind == "10x v3":
        cell_ranger.write_v3(path, cell_ranger.make_counts(N_OBS, N_VARS))
    else:
        cell_ranger.write_v2(path, {"GRCh38": cell_ranger.make_counts(N_OBS, N_VARS)})
    predict(first_columns, path, tmp_path / "emb.zarr")
    written, expected = read(tmp_path / "emb.zarr"), dasksc.open(path)
    assert np.array_equal(written.obsm["X_emb"], expected.X[:, :2].compute().toarray() + 0.5)
    assert list(written.obs_names) == list(expected.obs_names)
    attached = dasksc.open(path, attach={"obsm/X_emb": tmp_path / "emb.zarr"})
    assert attached.obsm["X_emb"].shape == (N_OBS, 2)


def test_names_that_cannot_be_read_are_refused_before_anything_is_predicted(atlas, tmp_path, monkeypatch):
    def failing(path: str) -> Any:
        raise StorageError(f"{path} cannot be read")
        yield

    def model(batch: Any) -> Any:
        raise AssertionError("a batch was predicted")

    monkeypatch.setattr(view, "path_names", failing)
    with pytest.raises(StorageError, match="cannot be read"):
        predict(model, atlas, tmp_path / "emb.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["atlas.h5ad"]


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


def test_a_progress_bar_shows_the_cells_and_their_rate(atlas, tmp_path, capfd):
    pytest.importorskip("tqdm")
    predict(first_columns, atlas, tmp_path / "silent.zarr")
    assert "predicting" not in capfd.readouterr().err
    predict(first_columns, atlas, tmp_path / "emb.zarr", progress=True)
    last = capfd.readouterr().err.rpartition("\r")[2]
    assert re.search(r"^predicting: 100%\|.*\| 203/203 \[.*cell/s\]", last), last


# --- Ranks and resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_ranks_write_what_one_process_does(atlas, tmp_path, world_size):
    model, out = Embedder(), tmp_path / "emb.zarr"
    reports = [predict(model, atlas, out, rank=r, world_size=world_size) for r in range(world_size)]
    assert np.array_equal(read(out).obsm["X_emb"], plain(model, atlas))
    assert [report.is_complete for report in reports][-1]
    assert sum(report.n_predicted for report in reports) == N_OBS


def test_the_last_of_several_concurrent_ranks_publishes(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    # Open the atlas once, because AnnData's warnings cannot be suppressed in several threads at a time.
    adata = dasksc.open(atlas)
    reports = on_ranks(
        3, lambda rank, store: predict(first_columns, adata, out, rank=rank, world_size=3, scheduler="synchronous")
    )
    assert all(isinstance(report, dasksc.PredictionReport) for report in reports), reports
    assert sum(report.n_predicted for report in reports) == N_OBS
    assert read(out).obsm["X_emb"].shape == (N_OBS, 2)


def first_columns(batch: Any) -> Any:
    return batch[:, :2] + 0.5


class Killed(BaseException):
    pass


@pytest.mark.parametrize("n_batches", [0, 1, 2, 3, 7, 24, 25])
@pytest.mark.parametrize("world_size", [1, 3])
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


def test_repeating_a_completed_call_does_nothing(atlas, tmp_path):
    model = Embedder()
    first = predict(model, atlas, tmp_path / "emb.zarr")
    again = predict(Embedder(), atlas, tmp_path / "emb.zarr")
    assert (again.n_predicted, again.is_complete, again.keys) == (0, True, first.keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas.h5ad", "emb.zarr"]


def unfinished(model: Any, atlas: Path, out: Path, n_batches: int = 4, **options: Any) -> None:
    """Interrupt a prediction after `n_batches` batches."""
    run = Predictions(model, atlas, out, options={"batch_size": BATCH, **options})
    share = run.begin()
    assert share is not None
    for batch, _ in zip(share.batches(), range(n_batches), strict=False):
        run.write_batch(share, run.predictor.function(batch).detach())
    share.abandon()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda: (Embedder(seed=1), {}), "model"),
        (lambda: (Embedder(), {"genes": [f"gene{i}" for i in range(16, -1, -1)]}), "data"),
        (lambda: (Embedder(), {"batch_size": 4}), "batch_size"),
        (lambda: (Embedder(), {"key": "X_other"}), "key"),
    ],
)
def test_unfinished_predictions_of_another_kind_are_refused_by_name_or_discarded(atlas, tmp_path, change, what):
    out = tmp_path / "emb.zarr"
    unfinished(Embedder().eval(), atlas, out)
    model, options = change()
    with pytest.raises(InputError, match=f"differs from this one in .*{what}.*overwrite=True"):
        predict(model, atlas, out, **options)
    report = predict(model, atlas, out, overwrite=True, **options)
    assert report.n_predicted == N_OBS


def test_a_changed_atlas_is_not_mixed_with_what_was_predicted_before(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    unfinished(Embedder().eval(), atlas, out)
    adata = make_adata(N_OBS, N_VARS)
    adata.X.data[:] += 1
    adata.write_h5ad(atlas)
    with pytest.raises(InputError, match="differs from this one in data"):
        predict(Embedder(), atlas, out)


def test_units_are_whole_batches_whatever_the_sizes():
    for n_obs in (1, 7, 1000, 10**6, 10**9):
        for batch in (1, 7, 1000, 2**16, 10**6):
            rows = unit_rows_for(n_obs, batch)
            assert rows % batch == 0
            assert rows <= max(batch, 2**16)
    assert list(runs_of([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
    assert list(runs_of([])) == []


# --- Targets ----------------------------------------------------------------------------------------------


@pytest.fixture
def store(atlas, tmp_path) -> Path:
    path = tmp_path / "store.zarr"
    dasksc.convert(atlas, path)
    return path


def test_a_store_gets_further_keys_in_its_own_order(store, tmp_path):
    model = Embedder()
    report = predict(model.both, store, store, categories={"predicted": LABELS})
    assert set(report.keys) == {"obsm/X_emb", "obs/predicted", "obs/score"}
    for written in (read(store), dasksc.open(store)):
        expected = plain(model, store)
        assert np.array_equal(np.asarray(written.obsm["X_emb"]), expected)
        assert list(written.obs["predicted"]) == [LABELS[i] for i in expected[:, :3].argmax(1)]
        assert list(written.obs.columns)[-2:] == ["predicted", "score"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas.h5ad", "store.zarr"]
    with pytest.raises(InputError, match="already has 'obsm/X_emb'"):
        predict(Embedder(seed=1), store, store)
    predict(Embedder(seed=1), store, store, overwrite=True)
    assert np.array_equal(read(store).obsm["X_emb"], plain(Embedder(seed=1), store))


# The two runs are threads here, so one may undo the warning filters of the other; real runs are processes.
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_two_runs_that_publish_into_a_store_at_the_same_time_keep_both_columns(store, tmp_path, monkeypatch):
    model, replace_json, others = Embedder(), targets.replace_json, []

    def predicting(name: str) -> None:
        predict(lambda batch: {name: model(batch)[:, 0]}, store, store, key=name)

    def after_another_run(path: Path, value: Any) -> None:
        if not others:
            others.append(threading.Thread(target=predicting, args=["second"]))
            others[0].start()
            others[0].join(timeout=2)
        replace_json(path, value)

    monkeypatch.setattr(targets, "replace_json", after_another_run)
    predicting("first")
    others[0].join()
    assert list(read(store).obs.columns)[-2:] == ["first", "second"]
    assert not list(tmp_path.glob("*.publishing"))


def test_a_store_of_other_cells_is_refused(atlas, store, tmp_path):
    with pytest.raises(InputError, match="but their names or their order differ"):
        predict(Embedder(), atlas, store)
    make_adata(50, N_VARS).write_h5ad(tmp_path / "few.h5ad")
    with pytest.raises(InputError, match="has 203 cells, but the atlas has 50"):
        predict(Embedder(), tmp_path / "few.h5ad", store)


@pytest.mark.parametrize("ending", ["h5ad", "zarr"])
def test_names_may_be_stored_as_nullable_strings(ending, tmp_path):
    # AnnData 0.13 writes the index of pandas 3 as nullable strings.
    adata = ad.AnnData(make_adata(50, N_VARS).X)
    adata.obs.index = adata.obs.index.astype("string")
    path = tmp_path / f"nullable.{ending}"
    with (
        warnings.catch_warnings(action="ignore"),
        ad.settings.override(allow_write_nullable_strings=True, zarr_write_format=3),
    ):
        adata.write_h5ad(path) if ending == "h5ad" else adata.write_zarr(path)
    with h5py.File(path) if ending == "h5ad" else contextlib.nullcontext(zarr.open(path, mode="r")) as root:
        assert root["obs/_index"].attrs["encoding-type"] == "nullable-string-array"
        assert [*itertools.chain(*stored_names(root["obs"], path))] == list(adata.obs_names)
    predict(Embedder(), path, path, in_place=ending == "h5ad")
    written = read(path)
    assert np.array_equal(written.obsm["X_emb"], plain(Embedder(), path))
    assert list(written.obs_names) == list(adata.obs_names)


def test_a_store_of_predictions_gets_those_of_another_model(atlas, tmp_path):
    predict(Embedder(), atlas, tmp_path / "emb.zarr")
    predict(Embedder(seed=1), atlas, tmp_path / "emb.zarr", key="X_second")
    assert set(read(tmp_path / "emb.zarr").obsm) == {"X_emb", "X_second"}


def test_an_h5ad_is_replaced_by_a_copy_with_the_predictions(atlas):
    model = Embedder()
    expected, before = plain(model, atlas), read(atlas)
    link = atlas.with_name("link.h5ad")
    link.symlink_to(atlas)
    predict(model.both, link, link, categories={"predicted": LABELS}, in_place=True)
    written = read(link)
    assert link.is_symlink()
    assert np.array_equal(written.obsm["X_emb"], expected)
    assert list(written.obs["predicted"]) == [LABELS[i] for i in expected[:, :3].argmax(1)]
    pd.testing.assert_frame_equal(written.obs[list(before.obs)], before.obs)
    assert (written.X != before.X).nnz == 0
    with pytest.raises(InputError, match="already has 'obsm/X_emb'"):
        predict(model, atlas, atlas, in_place=True)
    predict(Embedder(seed=1), atlas, atlas, in_place=True, overwrite=True)
    assert np.array_equal(read(atlas).obsm["X_emb"], plain(Embedder(seed=1), atlas))
    assert sorted(path.name for path in atlas.parent.iterdir()) == ["atlas.h5ad", "link.h5ad"]


@pytest.mark.parametrize("shares_blocks", [True, False])
def test_a_file_is_copied_by_sharing_its_blocks_where_the_file_system_can(tmp_path, monkeypatch, shares_blocks):
    fcntl = pytest.importorskip("fcntl")
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(bytes(range(256)) * 10)
    source.chmod(0o640)
    requests, copied, copyfile = [], [], shutil.copyfile

    def ioctl(target: int, request: int, descriptor: int) -> None:
        requests.append(request)
        if not shares_blocks:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        os.write(target, os.pread(descriptor, 10_000, 0))

    def copying(*paths: Path) -> None:
        copied.append(paths)
        copyfile(*paths)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(shutil, "copyfile", copying)
    targets.copy_file(source, copy)
    assert requests == [0x40049409]
    assert len(copied) == (0 if shares_blocks else 1)
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_mode == source.stat().st_mode


def test_an_h5ad_that_changes_meanwhile_is_not_replaced(atlas):
    run = Predictions(Embedder(), atlas, atlas, in_place=True, options={"batch_size": BATCH})
    share = run.begin()
    for batch in share.batches():
        run.write_batch(share, run.predictor.function(batch).detach())
    share.flush()
    share.abandon()
    with h5py.File(atlas, "r+") as file:
        file.attrs["edited"] = "by somebody else"
    with pytest.raises(StorageError, match="replaced or changed"):
        run.publish()
    assert "X_emb" not in read(atlas).obsm


def test_repeating_an_in_place_prediction_does_nothing(atlas):
    model = Embedder()
    first = predict(model, atlas, atlas, in_place=True)
    predict(model.both, atlas, atlas, in_place=True, overwrite=True)
    assert predict(model, atlas, atlas, in_place=True, overwrite=True).n_predicted == N_OBS
    predict(Embedder(seed=1), atlas, atlas, in_place=True, key="X_second")
    before = atlas.stat()
    again = predict(Embedder(), atlas, atlas, in_place=True)
    assert (again.n_predicted, again.is_complete, again.keys) == (0, True, first.keys)
    reports = [predict(model, atlas, atlas, in_place=True, rank=rank, world_size=3) for rank in range(3)]
    assert [(report.n_predicted, report.is_complete) for report in reports] == [(0, True)] * 3
    assert (atlas.stat().st_ino, atlas.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in atlas.parent.iterdir()] == ["atlas.h5ad"]


def test_an_in_place_prediction_of_another_kind_is_refused_when_the_key_is_there(atlas):
    genes = [f"gene{i}" for i in range(16, -1, -1)]
    predict(Embedder(), atlas, atlas, in_place=True)
    for model, options in [(Embedder(seed=1), {}), (Embedder(), {"genes": genes}), (Embedder(), {"batch_size": 4})]:
        with pytest.raises(InputError, match="already has 'obsm/X_emb'"):
            predict(model, atlas, atlas, in_place=True, **options)
    with h5py.File(atlas, "r+") as file:
        file["X/data"][:] += 1
    with pytest.raises(InputError, match="already has 'obsm/X_emb'"):
        predict(Embedder(), atlas, atlas, in_place=True)
    predict(Embedder(), atlas, atlas, in_place=True, overwrite=True)
    assert np.array_equal(read(atlas).obsm["X_emb"], plain(Embedder(), atlas))


def test_predictions_from_a_key_that_was_replaced_in_place_are_not_taken_for_current_ones(atlas):
    def scaled(batch: Any) -> Any:
        return batch.obsm["X_emb"][:, :2] * 2

    predict(Embedder(), atlas, atlas, in_place=True)
    options = {"key": "X_scaled", "obsm": ["X_emb"], "in_place": True}
    predict(scaled, atlas, atlas, **options)
    assert predict(scaled, atlas, atlas, **options).n_predicted == 0
    predict(Embedder(seed=1), atlas, atlas, in_place=True, overwrite=True)
    assert predict(scaled, atlas, atlas, overwrite=True, **options).n_predicted == N_OBS
    written = read(atlas).obsm
    assert np.array_equal(written["X_scaled"], written["X_emb"][:, :2] * 2)


KILLED = """
import os, sys, dasksc
from dasksc.inference.work import Work

def first(batch):
    return batch[:, :2]

source, out, how = sys.argv[1:]
predict = lambda: dasksc.predict(first, source, out, in_place=how != "new", batch_size=8, scheduler="synchronous")
if how == "again":
    report = predict()
    print(report.n_predicted, report.is_complete, report.keys)
else:
    Work.remove = lambda self: os._exit(9)
    predict()
"""


@pytest.mark.parametrize("how", ["new", "store", "file"])
def test_a_run_killed_after_an_h5ad_was_replaced_is_complete(atlas, tmp_path, how):
    """Test a new store, an extended store, and an h5ad file that was replaced."""
    source = out = atlas
    if how == "store":
        source = out = tmp_path / "store.zarr"
        dasksc.convert(atlas, out)
    if how == "new":
        out = tmp_path / "emb.zarr"
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    before = {path.name for path in tmp_path.iterdir()} | {out.name}
    done = ended([sys.executable, program, source, out, how])
    assert done.returncode == 9, done.stderr
    assert {path.name for path in tmp_path.iterdir()} - before
    printed = run([sys.executable, program, source, out, "again"])
    assert printed == f"0 True {{'obsm/X_emb': '({N_OBS}, 2) float32'}}\n"
    assert {path.name for path in tmp_path.iterdir()} == before
    assert np.array_equal(read(out).obsm["X_emb"], read(source).X[:, :2].toarray())


@pytest.mark.parametrize("kind", ["store", "file"])
def test_a_run_killed_while_its_work_was_removed_is_complete(atlas, store, tmp_path, monkeypatch, kind):
    path, model, original = store if kind == "store" else atlas, Embedder(), Work.remove

    def remove(work: Work) -> None:
        for k in range(3):
            work._marker(k).unlink()
        raise Killed

    monkeypatch.setattr(Work, "remove", remove)
    with pytest.raises(Killed):
        predict(model, path, path, in_place=True)
    monkeypatch.setattr(Work, "remove", original)
    assert predict(model, path, path, in_place=True).is_complete
    assert np.array_equal(read(path).obsm["X_emb"], plain(model, path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas.h5ad", "store.zarr"]


@pytest.mark.parametrize(
    ("out", "options", "error", "message"),
    [
        ("atlas.h5ad", {}, InputError, "in_place=True"),
        ("text.h5ad", {"in_place": True}, InputError, "text.h5ad is not an h5ad file"),
        ("none.h5ad", {"in_place": True}, MissingPathError, "there is none at"),
        ("none.zarr", {"in_place": True}, MissingPathError, "there is none at"),
        ("folder", {}, InputError, "folder exists and is not a Zarr store"),
        ("s3://bucket/emb.zarr", {}, InputError, "is not a local path"),
        ("emb.zarr", {"key": "a/b"}, InputError, "no '/'"),
        ("emb.zarr", {"nan": "maybe"}, InputError, "neither 'error' nor 'report'"),
        ("emb.zarr", {"categories": {"absent": LABELS}}, InputError, "has the key 'absent'"),
    ],
)
def test_wrong_targets_and_arguments_are_refused(atlas, tmp_path, out, options, error, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.h5ad").write_text("no atlas")
    with pytest.raises(error, match=message):
        predict(Embedder(), atlas, out if "://" in out else tmp_path / out, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas.h5ad", "folder", "text.h5ad"]


# --- Invalid outputs of models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda x: x[:-1], InputError, r"shape \(7, 17\) for a batch of 8 cells"),
        (lambda x: x.sum(), InputError, r"shape \(\)"),
        (lambda x: x[:, :, None], InputError, r"shape \(8, 17, 1\)"),
        (lambda x: x.to_sparse_csr(), InputError, "sparse"),
        (lambda x: x.numpy().astype(str), InputError, "expected numbers"),
        (lambda x: None, WrongTypeError, "NoneType"),
        (lambda x: {}, InputError, "empty dict"),
        (lambda x: {"a/b": x}, InputError, "no '/'"),
        (lambda x: x[:, : 1 + int(len(x) == 3)], InputError, "same names, widths and types"),
    ],
)
def test_invalid_outputs_of_a_model_are_named(atlas, tmp_path, returned, error, message):
    with pytest.raises(error, match=message):
        predict(returned, atlas, tmp_path / "emb.zarr")
    assert not (tmp_path / "emb.zarr").exists()


@pytest.mark.parametrize(
    ("codes", "message"),
    [(lambda x: x, "one integer code per cell"), (lambda x: torch.full((len(x),), 3), r"expected codes in \[0, 3\)")],
)
def test_codes_without_a_label_are_refused(atlas, tmp_path, codes, message):
    with pytest.raises(InputError, match=message):
        predict(codes, atlas, tmp_path / "emb.zarr", key="predicted", categories={"predicted": LABELS})


def test_nan_is_refused_by_the_name_of_the_cell_or_reported(atlas, tmp_path):
    def some_nan(batch: Any) -> torch.Tensor:
        result = batch.X[:, :2].clone()
        result[(batch.index == 21) | (batch.index == 22) | (batch.index == 190), 1] = torch.nan
        return result

    dataset = dasksc.scDataset(atlas, dasksc.Streaming(), BATCH, obs=["int8"])
    with pytest.raises(InputError, match=r"NaN in 'X_emb' for 2 cells of a batch: rows 21 \(cell21\), 22 \(cell22\)"):
        predict(some_nan, dataset, tmp_path / "emb.zarr")
    report = predict(some_nan, dataset, tmp_path / "emb.zarr", nan="report")
    assert report.nan_cells == {"obsm/X_emb": (3, [(21, "cell21"), (22, "cell22"), (190, "cell190")])}
    assert np.flatnonzero(np.isnan(read(tmp_path / "emb.zarr").obsm["X_emb"]).any(1)).tolist() == [21, 22, 190]


def test_ranks_with_different_outputs_are_refused_at_the_end(atlas, tmp_path):
    out = tmp_path / "emb.zarr"

    def columns(batch: Any) -> Any:
        return batch[:, : WIDTH["of"]]

    WIDTH["of"] = 2
    predict(columns, atlas, out, rank=0, world_size=2)
    WIDTH["of"] = 3
    with pytest.raises(InputError, match="same names, widths and types"):
        predict(columns, atlas, out, rank=1, world_size=2)
    assert not out.exists()


WIDTH: dict[str, int] = {}


def test_a_full_disk_is_told_and_what_is_done_is_kept(atlas, tmp_path, monkeypatch):
    n_written = 0
    original = shards.ShardWriter._finish

    def finish(self: Any, file: Any) -> None:
        nonlocal n_written
        n_written += 1
        if n_written > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, file)

    monkeypatch.setattr(shards.ShardWriter, "_finish", finish)
    with pytest.raises(StorageError, match="no space is left for .*more will be needed"):
        predict(Embedder(), atlas, tmp_path / "emb.zarr")
    monkeypatch.setattr(shards.ShardWriter, "_finish", original)
    assert predict(Embedder(), atlas, tmp_path / "emb.zarr").n_predicted == N_OBS - 3 * 16


@pytest.mark.parametrize("after", ["X_emb", "predicted"])
def test_publishing_goes_on_between_two_keys_of_a_store(atlas, tmp_path, monkeypatch, after):
    store, model, original = tmp_path / "store.zarr", Embedder(), targets.write_metadata
    dasksc.convert(atlas, store)
    seen = []

    def write_metadata(work: Any, one: Any, nan: Any) -> None:
        if seen and seen[-1] == after:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(work, one, nan)
        seen.append(one.name)

    monkeypatch.setattr(targets, "write_metadata", write_metadata)
    options = {"categories": {"predicted": LABELS}, "in_place": True}
    with pytest.raises(StorageError, match="run the same prediction again to resume it"):
        predict(model.both, store, store, **options)
    monkeypatch.setattr(targets, "write_metadata", original)
    assert predict(model.both, store, store, **options).n_predicted == 0
    written, expected = read(store), plain(model, store)
    assert np.array_equal(written.obsm["X_emb"], expected)
    assert list(written.obs["predicted"]) == [LABELS[i] for i in expected[:, :3].argmax(1)]
    assert np.array_equal(written.obs["score"], expected.max(1))
    assert not list(tmp_path.glob("*.partial"))


# --- Attaching --------------------------------------------------------------------------------------------


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


def test_what_is_attached_must_be_of_the_same_cells(atlas, store, tmp_path):
    out = tmp_path / "emb.zarr"
    predict(Embedder(), atlas, out)
    attach = {"obsm/X_emb": out}
    with pytest.raises(InputError, match="but their names or their order differ"):
        dasksc.open(store, attach=attach)
    make_adata(50, N_VARS).write_h5ad(tmp_path / "few.h5ad")
    with pytest.raises(InputError, match="203 rows, but the atlas has 50 cells"):
        dasksc.open(tmp_path / "few.h5ad", attach=attach)
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


# --- Digests ----------------------------------------------------------------------------------------------


def test_digests_tell_models_functions_and_what_they_hold_apart():
    scale = 2.0

    def scaled(batch: Any) -> Any:
        return batch * scale

    def others(batch: Any) -> Any:
        return batch + scale

    class Configured(Embedder):
        def __init__(self, beta: float) -> None:
            super().__init__()
            self.beta = beta

    model = Embedder()
    same = [model_digest(Embedder()), model_digest(model), model_digest(model.train()), model_digest(model.eval())]
    assert len(set(same)) == 1
    different = [
        model, model.both, Embedder(6), Embedder(seed=1), Configured(1.0), Configured(2.0), scaled, others,
        lambda x: x + 1, lambda x: x + 2,
        functools.partial(scaled, 1), functools.partial(scaled, 2), np.log1p, np.exp, torch.sum, torch.mean,
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.GELU()), {"a": 1}, {"a": 2}, None,
    ]  # fmt: skip
    digests = [model_digest(value) for value in different]
    assert len(set(digests)) == len(different)
    before = model_digest(scaled)
    scale = 3.0
    assert model_digest(scaled) != before


def test_a_marker_holds_plain_json(atlas, tmp_path):
    out = tmp_path / "emb.zarr"
    unfinished(Embedder().eval(), atlas, out)
    markers = sorted((tmp_path / "emb.zarr.partial").glob("*/done/*.json"))
    assert [marker.name for marker in markers] == ["0.json", "1.json"]
    assert json.loads(markers[0].read_text()) == {"outputs": [["X_emb", 5, "float32"]], "nan": {}}
    shutil.rmtree(tmp_path / "emb.zarr.partial")

"""Predictions on a disk that fills up at any step: the store stays unchanged, and a resumed run completes it."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import torch

import dasksc

pytestmark = pytest.mark.faults

LABELS = ["low", "high"]


def both(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"X_emb": batch[:, :6] * 3, "predicted": (batch[:, 0] > 0).long()}


def predict(source: Path, out: Path) -> dasksc.PredictionReport:
    return dasksc.predict(
        *(both, source, out), in_place=True, batch_size=8, categories={"predicted": LABELS}, scheduler="synchronous"
    )


def error_of(out: Path) -> dasksc.StorageError | None:
    try:
        predict(out, out)
    except dasksc.StorageError as error:
        return error
    return None


def read(path: Path) -> ad.AnnData:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(path) if path.is_dir() else ad.read_h5ad(path)


def files(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes() for one in [path, *path.rglob("*")] if one.is_file()
    }  # `path` may itself be a file, which rglob does not yield


@pytest.fixture(params=["store", "file"])
def written(request: Any, atlas: Path, tmp_path: Path) -> Path:
    """Atlas as a store written by `dasksc.convert`, or as an h5ad file."""
    if request.param == "file":
        return atlas
    dasksc.convert(atlas, tmp_path / "atlas.zarr")
    return tmp_path / "atlas.zarr"


def test_a_full_disk_leaves_the_atlas_as_it_was_and_the_run_can_be_resumed(small_disk, written):
    disk, resize = small_disk
    out, before = disk / written.name, files(written)
    expected = read(written)
    first, n_ended = np.asarray(expected.X[:, :6].todense()) * 3, {True: 0, False: 0}
    n_resumed: list[int] = []
    error: dasksc.StorageError | None = None

    def assert_whole() -> None:
        found = read(out)
        assert np.array_equal(found.obsm["X_emb"], first)
        assert list(found.obs["predicted"]) == [LABELS[int(value > 0)] for value in first[:, 0]]
        assert np.array_equal(found.X.todense(), expected.X.todense())
        assert os.listdir(disk) == [out.name]

    copy = shutil.copytree if written.is_dir() else shutil.copyfile
    # For a file, disk space for a copy is needed as well.
    for kilobytes in range(4, 1000, 60) if written.is_file() else range(4, 400, 24):
        assert resize("64m").returncode == 0
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        # Deleted files take up space as long as an error or a Dask graph references their memory maps. A graph with a
        # finalizer is released by the second collection.
        error = None
        for _ in range(2):
            gc.collect()
        assert shutil.disk_usage(disk).used == 0
        copy(written, out)
        assert resize(str(shutil.disk_usage(disk).used + kilobytes * 2**10)).returncode == 0
        error = error_of(out)
        n_ended[error is None] += 1
        if error is None:
            assert_whole()
            continue
        assert error.errno == errno.ENOSPC
        message = re.search(r"no space is left for (\S+): about [\d.]+ \w+ more will be needed", str(error))
        assert message is not None, str(error)
        assert message[1] == str(out)
        assert "run the same prediction again to resume it" in str(error)
        # Readers see the previous content. New keys are either absent or complete.
        now = files(out)
        assert {name: now.get(name) for name in before if not name.endswith("zarr.json")} == {
            name: content for name, content in before.items() if not name.endswith("zarr.json")
        }
        found = read(out)
        if "X_emb" in found.obsm:
            assert np.array_equal(found.obsm["X_emb"], first)
        assert resize("64m").returncode == 0
        n_resumed.append(predict(out, out).n_predicted)
        assert_whole()
    assert n_ended[True] > 0
    assert n_ended[False] > 5
    # The disk fills up at every step: while units are written, and when only publishing remains.
    assert min(n_resumed) == 0
    assert len(set(n_resumed)) > 3

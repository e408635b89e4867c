"""Malicious files at URLs; `test_refusals` has one test for each guard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from anndata import AnnData

import dasksc
from dasksc.errors import StorageError
from tests.support.hostile import (
    VALUES,
    bounded,
    h5ad_whose_values_are_elsewhere,
    store_of_shape,
    store_with_a_column_called,
    store_with_pickles,
)
from tests.support.servers import serving

pytest.importorskip("obstore")

# Warnings about future formats.
pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore:Writing zarr v2"),
    pytest.mark.filterwarnings("ignore:Consolidated"),
]

REFUSED: dict[str, Callable[[Path], Path]] = {
    "pickles": lambda folder: store_with_pickles(folder, "obs/int8", folder / "unpickled"),
    "shape of zarr": lambda folder: store_of_shape(folder, "zarr3", "X", 2**62),
    "shape of hdf5": lambda folder: store_of_shape(folder, "h5ad", "obs/int8", 2**62),
    "X is virtual": lambda folder: h5ad_whose_values_are_elsewhere(folder, "X", "virtual"),
    "X through a link": lambda folder: h5ad_whose_values_are_elsewhere(folder, "X", "absolute"),
    "table is external": lambda folder: h5ad_whose_values_are_elsewhere(folder, "obsm/n/n", "external"),
    "column elsewhere": lambda folder: store_with_a_column_called(folder, "zarr3", "../../secret"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malicious_stores_at_a_url_are_refused(tmp_path: Path, name: str) -> None:
    path = REFUSED[name](tmp_path)
    with serving(tmp_path) as server, bounded(), pytest.raises(dasksc.DaskscError):
        dasksc.open(f"{server.url}/{path.name}").X.compute()
    assert not (tmp_path / "unpickled").exists()


def test_chunks_that_are_far_too_long_are_not_fetched(tmp_path: Path) -> None:
    AnnData(X=VALUES).write_zarr(tmp_path / "atlas.zarr")
    file = tmp_path / "atlas.zarr" / "X/c/0/0"
    if not file.exists():
        file = tmp_path / "atlas.zarr" / "X/0.0"
    with file.open("r+b") as grown:
        grown.truncate(2**33)
    with serving(tmp_path) as server, bounded(), pytest.raises(StorageError, match="chunks|expected"):
        dasksc.open(f"{server.url}/atlas.zarr").X.compute()
    assert sum(stop is None for _, path, stop in server.faults.requests if path.endswith(file.name)) >= 1

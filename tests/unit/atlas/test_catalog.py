"""Atlases of many files, and their catalogues."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from dasksc.atlas import catalog, stored
from dasksc.pushdown import leaf_matrix
from tests.support.cell_ranger import write_v3
from tests.support.data import dense, make_adata, same, write_store

pytestmark = pytest.mark.core


def write(path: Path, *, genes: list[str], seed: int, compression: str | None = None) -> None:
    adata = make_adata(6, len(genes))
    adata.X.data += seed
    del adata.layers["scaled"]
    adata.obs_names, adata.var_names = [f"{seed}-{i}" for i in range(6)], genes
    adata.obs["kind"] = pd.Categorical([f"own {seed % 2}", "T", "B"] * 2)
    adata.raw = adata.copy()
    adata.write_h5ad(path, compression=compression)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    genes = [f"g{i}" for i in range(8)]
    for seed in range(4):
        held = genes[::-1] if seed == 2 else genes[: 6 if seed == 3 else 8]
        write(tmp_path / f"{seed}.h5ad", genes=held, seed=seed, compression="gzip" if seed == 1 else None)
    return [str(tmp_path / f"{seed}.h5ad") for seed in range(4)]


@pytest.mark.parametrize("options", [{}, {"join": "outer", "names": False}, {"obs": ["cell_type"]}], ids=str)
def test_surveyed_files_equal_files_opened_one_element_at_a_time(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(stored, "opened", None)
        surveyed = dasksc.open(paths, **options)
    monkeypatch.setattr(stored, "_surveyed", lambda *_: None)
    same(surveyed, dasksc.open(paths, **options))


def test_text_of_fixed_length_is_text(paths: list[str]) -> None:
    expected = dasksc.open(paths).obs
    with h5py.File(paths[2], "r+") as file:
        obs, kinds = file["obs"], file["obs/kind"]
        obs.attrs["column-order"] = obs.attrs["column-order"].astype("S")
        held, attributes = kinds["categories"][:].astype("S"), dict(kinds["categories"].attrs)
        del kinds["categories"]
        kinds.create_dataset("categories", data=held).attrs.update(attributes)
        for item in (file["X"], file["obs"], file["obs/_index"], kinds):
            item.attrs.update({k: np.bytes_(v) for k, v in item.attrs.items() if isinstance(v, str)})
    assert leaf_matrix(dasksc.open(paths[2]).X).label == f"{paths[2]}:/X"
    pd.testing.assert_frame_equal(dasksc.open(paths).obs, expected)
    assert dasksc.open(paths[2]).obs["kind"].tolist() == expected["kind"][12:18].tolist()


@pytest.mark.parametrize("join", ["inner", "outer"])
def test_a_catalogue_opens_as_its_files(paths: list[str], tmp_path: Path, join: str) -> None:
    assert dasksc.index(paths, tmp_path / "all.catalog", join=join, label="file") == 4
    same(dasksc.open(tmp_path / "all.catalog", cache=tmp_path), dasksc.open(paths, join=join, label="file"))


def test_a_catalogue_is_described(paths: list[str], tmp_path: Path) -> None:
    dasksc.index(paths, tmp_path / "all.catalog")
    described = dasksc.describe(tmp_path / "all.catalog", seconds=0)
    assert (described.n_files, {one.key for one in described.matrices} >= {"X", "raw/X"}) == (4, True)


def test_a_catalogue_moves_with_its_files(paths: list[str], tmp_path: Path) -> None:
    dasksc.index(paths, tmp_path / "all.catalog")
    X, folder = dense(dasksc.open(paths).X.compute()), tmp_path / "elsewhere"
    folder.mkdir()
    for path in (*paths, tmp_path / "all.catalog"):
        shutil.move(path, folder)
    np.testing.assert_array_equal(dense(dasksc.open(folder / "all.catalog").X.compute()), X)


def test_a_catalogue_keeps_values_of_any_type_and_what_files_lack(tmp_path: Path) -> None:
    columns = [
        {"mixed": [1, 2], "text": ["a", "b"], "number": pd.array([1, None], "Int64"), "k": pd.Categorical([1, 2])},
        {"mixed": pd.Categorical(["x", None]), "text": pd.Categorical(["a", None]), "number": [0.5, 1.5]},
        {"mixed": [True, False], "k": pd.Categorical(["1", "x"])},
    ]
    for i, held in enumerate(columns):
        obs = pd.DataFrame(held, index=[f"{i}-{j}" for j in range(2)])
        adata = anndata.AnnData(np.eye(2, dtype=np.float32), obs=obs, layers={"own": np.eye(2)} if i == 1 else {})
        adata.obsm["proteins"] = pd.DataFrame({"CD3": [i, 2.5], "mixed": held["mixed"]}, index=adata.obs_names)
        adata.write_h5ad(tmp_path / f"{i}.h5ad")
    options = {"join": "outer", "fill_value": 0}
    dasksc.index(tmp_path / "*.h5ad", tmp_path / "all.catalog", **options)
    found, expected = dasksc.open(tmp_path / "all.catalog"), dasksc.open(tmp_path / "*.h5ad", **options)
    for of, table in ((found.obs, expected.obs), (found.obsm["proteins"], expected.obsm["proteins"])):
        for name, column in table.items():
            assert list(map(type, of[name])) == list(map(type, column)), name
    same(found, expected)


def test_a_file_that_changed_or_is_gone_is_named(paths: list[str], tmp_path: Path) -> None:
    dasksc.index(paths, tmp_path / "all.catalog")
    os.utime(paths[1], ns=(0, 0))
    with pytest.raises(dasksc.CorruptDataError, match=r"1\.h5ad"):
        dasksc.open(tmp_path / "all.catalog")
    os.remove(paths[2])
    with pytest.raises(dasksc.MissingPathError, match=r"2\.h5ad"):
        dasksc.open(tmp_path / "all.catalog")


def test_a_file_that_changes_while_it_is_indexed_is_named(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*args: Any, **options: Any) -> Any:
        adata = dasksc.open(*args, **options)
        os.utime(paths[1])
        return adata

    monkeypatch.setattr(catalog, "open_atlas", opened)
    with pytest.raises(dasksc.CorruptDataError, match=r"1\.h5ad"):
        dasksc.index(paths, tmp_path / "all.catalog")


def test_a_file_with_other_genes_than_indexed_is_named(paths: list[str], tmp_path: Path) -> None:
    dasksc.index(paths, tmp_path / "all.catalog")
    status = os.stat(paths[1])
    write(Path(paths[1]), genes=["a", "b"], seed=1, compression="gzip")
    size = os.path.getsize(paths[1])
    with open(paths[1], "ab") as file:
        file.write(b"\0" * (status.st_size - size))
    os.utime(paths[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(dasksc.CorruptDataError, match=r"1\.h5ad"):
        dasksc.open(tmp_path / "all.catalog").X.compute()


@pytest.mark.parametrize("array", ["obs/cell_type/codes", "X/data"])
def test_a_zarr_store_that_changed_in_place_is_noticed(tmp_path: Path, array: str) -> None:
    store = write_store(make_adata(6, 3), tmp_path, "zarr2")
    dasksc.index(store, tmp_path / "all.catalog")
    same(dasksc.open(tmp_path / "all.catalog"), dasksc.open(store))
    (chunk,) = (store / array).glob("[0-9]*")
    os.utime(chunk)
    with pytest.raises(dasksc.CorruptDataError, match="zarr2"):
        dasksc.open(tmp_path / "all.catalog")


def test_what_a_catalogue_could_not_open_is_not_indexed(paths: list[str], tmp_path: Path) -> None:
    anndata.read_h5ad(paths[0])[::-1].copy().write_h5ad(tmp_path / "b.h5ad")
    reordered = dasksc.Modalities({"a": paths[0], "b": tmp_path / "b.h5ad"})["b"]
    of_10x = write_v3(tmp_path / "10x.h5", sp.csr_matrix(np.eye(3, dtype=np.int32)))
    for data in (anndata.AnnData(np.ones((2, 2), np.float32)), reordered, of_10x):
        with pytest.raises(dasksc.InputError):
            dasksc.index(data, tmp_path / "all.catalog")


def test_a_file_that_is_corrupt_or_may_not_be_read_is_named_or_skipped(
    paths: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_hdf5(path: str, known: Callable[[str], bool] = h5py.is_hdf5) -> bool:
        if path == denied:
            raise PermissionError(errno.EACCES, "Permission denied", path)  # root may read every file
        return known(path)

    monkeypatch.setattr(h5py, "is_hdf5", is_hdf5)
    denied = shutil.copyfile(paths[0], paths[0] + "-denied.h5ad")
    Path(paths[1]).write_bytes(Path(paths[1]).read_bytes()[:3000])
    table = pd.DataFrame({"path": [*paths, "gone[1].h5ad", denied], "donor": range(6)})
    for wrong, named in ((paths, r"1\.h5ad"), ([denied, *paths], r"-denied")):
        with pytest.raises(dasksc.StorageError, match=named):
            dasksc.open(wrong)
    with caplog.at_level(logging.INFO, "dasksc.collection"):
        adata = dasksc.open(table, files="path", on_error="skip")
    assert adata.obs["donor"].unique().tolist() == [0, 2, 3]
    assert any(record.args[:2] == (3, 6) for record in caplog.records)
    assert sum(record.levelno == logging.INFO for record in caplog.records) == 3
    with pytest.raises(dasksc.MissingPathError, match="b"):
        dasksc.open(["a.h5ad", "b.h5ad"], on_error="skip")


@pytest.mark.parametrize("table", ["obs", "var"])
def test_names_that_lead_through_links_to_other_folders_are_refused(
    paths: list[str], tmp_path_factory: pytest.TempPathFactory, table: str
) -> None:
    other = shutil.copy(paths[0], tmp_path_factory.mktemp("private"))
    with h5py.File(paths[0], "r+") as file:
        file["uns/other"] = h5py.ExternalLink(other, table)
        file[table].attrs["_index"] = f"/uns/other/{file[table].attrs['_index']}"
    with pytest.raises(dasksc.StorageError, match="private"):
        dasksc.open(paths)


def test_files_with_the_same_cells_are_reported(paths: list[str], caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(paths[0], Path(paths[0]).with_name("copy.h5ad"))
    dasksc.open([*paths, str(Path(paths[0]).with_name("copy.h5ad"))])
    assert any("same" in record.message and "copy" in record.message for record in caplog.records)


def test_ends_of_files_are_read_ahead(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    given = {os.stat(path).st_ino: path for path in paths}

    def advise(number: int, at: int, *_: int) -> None:
        ends.append((given[os.fstat(number).st_ino], at))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    dasksc.open(paths)
    assert ends == [(path, 0) for path in paths for _ in range(2)]

"""Malicious stores: pickles, a decompression bomb, shapes larger than any memory, and links to other files."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pandas as pd
import pytest
import zarr
from anndata import AnnData

import dasksc
from dasksc import memory as process_memory
from dasksc.readers import tables
from tests.support.data import write_store

VALUES = np.arange(300.0, dtype=np.float32).reshape(50, 6)
BOMB_BYTES = 2**26


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail if the body needs half of `BOMB_BYTES` or more."""
    _warm_up()
    # tracemalloc cannot measure this: before Python 3.12.9, stopping it crashes if other threads allocate.
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the present size
    before = _peak_bytes()
    yield
    grown = _peak_bytes() - before
    assert grown < BOMB_BYTES // 2, f"{grown} bytes"


@cache
def _warm_up() -> None:
    """Import modules and compile kernels, which take memory, too."""
    with tempfile.TemporaryDirectory() as folder:
        for files in ("h5ad", "zarr3"):
            dasksc.open(write_store(small(), Path(folder), files)).X.compute()


def _peak_bytes() -> int:
    """Return the largest resident set of this process since ``/proc/self/clear_refs`` was written."""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert peak is not None
    return 1024 * int(peak[1])


def small() -> AnnData:
    """Return a dense atlas of 20 cells and 6 genes."""
    obs = pd.DataFrame({"int8": np.arange(20, dtype=np.int8)}, index=[f"cell{i}" for i in range(20)])
    return AnnData(X=VALUES[:20], obs=obs)


def full() -> AnnData:
    """Return a dense atlas of 20 cells and 6 genes, with arrays in obs, var, varm, varp, obsm and uns."""
    # dasksc reads these arrays whole.
    adata = small()
    adata.obs["n"] = np.arange(20.0)
    adata.var["n"] = np.arange(6.0)
    adata.varm["n"] = np.arange(12.0).reshape(6, 2)
    adata.varp["n"] = np.arange(36.0).reshape(6, 6)
    adata.obsm["n"] = pd.DataFrame({"n": np.arange(20.0)}, index=adata.obs_names)
    adata.uns |= {"n": np.arange(20.0), "deep": {"n": np.arange(20.0)}}
    return adata


def array_at(path: Path, where: str) -> str:
    """Return the name of an array; newer versions of AnnData store strings as a group with values."""
    is_array = (path / where / ".zarray").exists() or (
        (path / where / "zarr.json").exists() and not (path / where / "values").exists()
    )
    return where if is_array else f"{where}/values"


def edited(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def recompressed(path: Path, where: str, **changes: Any) -> None:
    """Change the metadata of a Zarr 2 array."""
    everything = json.loads((path / ".zmetadata").read_text())
    everything["metadata"][f"{where}/.zarray"] |= changes
    (path / ".zmetadata").write_text(json.dumps(everything))
    edited(path / where / ".zarray", **changes)


def overwritten(path: Path, where: str, content: bytes) -> None:
    """Replace the bytes of every chunk of a Zarr 2 array."""
    for chunk in (path / where).glob("[0-9]*"):
        chunk.write_bytes(content)


class Unpickled:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def store_with_pickles(folder: Path, where: str, mark: Path) -> Path:
    path = write_store(small(), folder, "zarr2")
    where = array_at(path, where)
    recompressed(path, where, filters=[{"id": "pickle", "protocol": 5}], compressor=None)
    overwritten(path, where, pickle.dumps([Unpickled(mark)]))
    return path


def store_with_bombs(folder: Path, where: str) -> Path:
    """Write a Zarr 2 store in which the chunks of one array decode to `BOMB_BYTES`."""
    path = write_store(full(), folder, "zarr2")
    recompressed(path, where, compressor=numcodecs.Zstd().get_config())
    overwritten(path, where, numcodecs.Zstd().encode(bytes(BOMB_BYTES)))
    return path


def h5ad_whose_values_are_elsewhere(folder: Path, where: str, how: str) -> Path:
    """Write a file in which one array is a link to another folder, virtual, external, or linked to an external one."""
    path = write_store(full(), folder, "h5ad")
    outside = folder.parent / f"{folder.name}-outside.h5"
    with (
        h5py.File(path, "r+") as file,
        h5py.File(outside, "w") as other,
        h5py.File(folder / "beside.h5", "w") as beside,
    ):
        old = file[where]
        shape, dtype, attributes = old.shape, old.dtype, dict(old.attrs)
        other["n"] = old[...]
        del file[where]
        external = [(str(outside), 0, int(np.prod(shape)) * dtype.itemsize)]
        match how:
            case "absolute":
                file[where] = h5py.ExternalLink(str(outside), "/n")
            case "upwards":
                file[where] = h5py.ExternalLink(f"../{outside.name}", "/n")
            case "virtual":
                layout = h5py.VirtualLayout(shape, dtype)
                layout[:] = h5py.VirtualSource(str(outside), "n", shape=shape)
                file.create_virtual_dataset(where, layout).attrs.update(attributes)
            case "external":
                file.create_dataset(where, shape, dtype, external=external).attrs.update(attributes)
            case "beside":
                beside.create_dataset("n", shape, dtype, external=external).attrs.update(attributes)
                file[where] = h5py.ExternalLink("beside.h5", "/n")
    return path


def store_of_shape(folder: Path, format: str, where: str, n: int) -> Path:
    """Write a store that declares an array of `n` rows."""
    path = write_store(small(), folder, format)
    if format == "h5ad":
        with h5py.File(path, "r+") as file:
            where = where if isinstance(file[where], h5py.Dataset) else f"{where}/values"
            old = file[where]
            attributes, dtype, shape = dict(old.attrs), old.dtype, (n, *old.shape[1:])
            del file[where]
            new = file.create_dataset(where, shape, dtype, chunks=(1024, *shape[1:]))
            for name, value in attributes.items():
                new.attrs[name] = value
        return path
    where = array_at(path, where)
    metadata = path / where / (".zarray" if format == "zarr2" else "zarr.json")
    shape = [n, *json.loads(metadata.read_text())["shape"][1:]]
    if format == "zarr2":
        recompressed(path, where, shape=shape)
    else:
        edited(metadata, shape=shape)
        document = json.loads((path / "zarr.json").read_text())
        document["consolidated_metadata"]["metadata"][where]["shape"] = shape
        (path / "zarr.json").write_text(json.dumps(document))
    return path


def store_with_a_column_called(folder: Path, format: str, name: str) -> Path:
    path = write_store(small(), folder, format)
    if format == "h5ad":
        with h5py.File(path, "r+") as file:
            file["obs"].attrs["column-order"] = [name]
    else:
        file = path / "obs" / (".zattrs" if format == "zarr2" else "zarr.json")
        document = json.loads(file.read_text())
        (document if format == "zarr2" else document["attributes"])["column-order"] = [name]
        file.write_text(json.dumps(document))
        zarr.consolidate_metadata(path)
    return path


def h5ad_of_many_arrays(folder: Path) -> Path:
    """Write a file whose uns declares ten arrays of 128 MiB each, without storing any of their chunks."""
    path = write_store(full(), folder, "h5ad")
    with h5py.File(path, "r+") as file:
        for i in range(10):
            array = file["uns"].create_dataset(f"many{i}", (6, 2**27 // 48), "f8", chunks=(1, 1024))
            array.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    return path


def memory_of(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the memory of this process to `n_bytes`."""
    limit = process_memory.Limit(n_bytes=n_bytes, held=0, source="a test")
    monkeypatch.setattr(tables, "memory_limit", lambda: limit)

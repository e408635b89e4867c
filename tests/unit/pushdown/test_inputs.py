"""Tokens of matrices: another one whenever a stored file has changed, even in place and with the same size."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zarr

from dasksc.pushdown import token_of
from dasksc.storage import RemoteLocation, open_matrix
from dasksc.storage.zarr.reader import ZarrArray
from tests.support.data import make_adata, write_store, zip_of
from tests.support.servers import touch_later

pytestmark = pytest.mark.core

N_OBS, N_VARS = 40, 6


def h5ad(folder: Path, layout: str, **_: Any) -> Path:
    return write_store(make_adata(N_OBS, N_VARS, layout=layout), folder, "h5ad")


def stored(folder: Path, layout: str, *, format: int = 3, zipped: bool = False, **options: Any) -> Path:
    """Write a store whose X, or its three arrays, have several objects."""
    path = write_store(make_adata(N_OBS, N_VARS, layout=layout), folder, f"zarr{format}")
    group = zarr.open_group(path, mode="a", zarr_format=format, use_consolidated=False)
    for name in ["X"] if layout == "dense" else ["X/indptr", "X/indices", "X/data"]:
        values, attributes = group[name][:], dict(group[name].attrs)
        chunks = (8, *values.shape[1:])
        given = {"compressors": None, **options}
        if given.pop("sharded", False):
            given["shards"], chunks = chunks, (4, *values.shape[1:])
        group.create_array(name, data=values, chunks=chunks, overwrite=True, attributes=attributes, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path, zarr_format=format)
    return zip_of(path) if zipped else path


def in_memory(folder: Path, layout: str, **options: Any) -> str:
    path, url = stored(folder, layout, **options), f"memory://tokens/{folder.name}.zarr"
    fsspec.filesystem("memory").put(f"{path}/", f"{url}/", recursive=True)
    return url


STORES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "h5ad": (h5ad, {}),
    "v2": (stored, {"format": 2}),
    "v3": (stored, {}),
    "v3 sharded": (stored, {"sharded": True}),
    "v3 zipped, by zarr-python": (stored, {"zipped": True}),
    "v3 by zarr-python": (stored, {"filters": [zarr.codecs.TransposeCodec(order=(0,))]}),
    "v3 sharded behind a URL": (in_memory, {"sharded": True}),
    "v3 behind a URL by zarr-python": (in_memory, {"filters": [zarr.codecs.TransposeCodec(order=(0,))]}),
}


def change(path: Any) -> None:
    """Rewrite one byte of one file of X in place, with the same size; at a URL, write the metadata again."""
    if isinstance(path, str):
        system = fsspec.filesystem("memory")
        name = sorted(name for name in system.find(f"{path}/X") if name.endswith("zarr.json"))[0]
        system.pipe_file(name, system.cat_file(name))
        return
    parts = [path] if path.is_file() else [one for one in (path / "X").rglob("*") if one.is_file()]
    file = sorted(one for one in parts if not one.name.startswith((".", "zarr")))[-1]
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))
    touch_later(file)


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("name", STORES)
def test_a_chunk_changed_in_place_changes_the_token(tmp_path, layout, name):
    write, options = STORES[name]
    if layout == "dense" and "filters" in options:
        options = {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]}
    path = write(tmp_path, layout, **options)

    def opened() -> Any:
        return open_matrix(RemoteLocation.of(path) if isinstance(path, str) else path, "X")

    assert all(isinstance(array, ZarrArray) == ("by zarr-python" in name) for array in opened().arrays)
    before = token_of(opened())
    assert token_of(opened()) == before
    change(path)
    assert token_of(opened()) != before

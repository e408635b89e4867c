"""Storage of the matrices of an atlas."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import zarr

from dasksc.atlas.stored_cell_ranger import cell_ranger_matrices
from dasksc.errors import StorageError
from dasksc.inspection.description import StoredMatrix
from dasksc.storage import Cache, RemoteLocation, is_url, open_location
from dasksc.storage.safety.zarr_codecs import codecs_within
from dasksc.storage.zarr.reader import ZarrFile
from dasksc.storage.zarr.zipped import is_zip

__all__ = ["Stored", "merge_alike", "stored_part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Matrices of one file or store. `is_shuffled` is True if `dasksc.convert` has shuffled its cells."""

    matrices: tuple[StoredMatrix, ...] = ()
    is_shuffled: bool = False


def stored_part(source: Any) -> Stored:
    """Describe the storage of a file or store; the result is empty for data in memory."""
    with _root_of(source) as root:
        if root is None:
            return Stored()
        conversion = root.attrs.get("dasksc")
        # Cells grouped by obs columns are not in random order, even if they are shuffled within groups.
        is_shuffled = (
            isinstance(conversion, Mapping)
            and conversion.get("order") == "shuffle"
            and conversion.get("group_by") is None
        )
        return Stored(matrices=tuple(_matrices_of(root)), is_shuffled=is_shuffled)


@contextmanager
def _root_of(source: Any) -> Iterator[Any]:
    """Open a file or store by its path or URL; yield None for anything else."""
    if not isinstance(source, str | os.PathLike):
        yield None
        return
    location = RemoteLocation.of(os.fspath(source)) if is_url(os.fspath(source)) else None
    path = os.fspath(source) if location is None else location.local
    if path is None:
        assert location is not None
        with open_location(location, cache=Cache.of(None)) as root:
            yield root
    elif os.path.isdir(path):
        yield zarr.open_group(path, mode="r")
    elif is_zip(path):
        yield ZarrFile(path).root()
    else:
        with h5py.File(path, "r") as file:
            yield file


def _matrices_of(root: Any, prefix: str = "") -> Iterator[StoredMatrix]:
    if "mod" in root:
        for name in root["mod"]:
            yield from _matrices_of(root["mod"][name], f"{name}/")
        return
    for name in cell_ranger_matrices(root):
        arrays = [root[name][part] for part in ("data", "indices", "indptr")]
        yield _matrix("X", "csr", arrays[0], arrays)
    keys = ["X", *(f"{group}/{name}" for group in ("layers", "obsm") if group in root for name in root[group]), "raw/X"]
    for key in keys:
        if key not in root:
            continue
        stored = root[key]
        if isinstance(stored, h5py.Dataset | zarr.Array):
            if len(stored.shape) == 2:
                yield _matrix(prefix + key, "dense", stored, [stored])
        elif "data" in stored and "indices" in stored:
            kind = str(stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "csr")))
            arrays = [stored[name] for name in ("data", "indices", "indptr")]
            yield _matrix(prefix + key, kind.removesuffix("_matrix"), arrays[0], arrays)


def _matrix(key: str, encoding: str, values: Any, arrays: Sequence[Any]) -> StoredMatrix:
    return StoredMatrix(
        key=key,
        n_files=1,
        encoding=encoding,
        dtype=str(values.dtype),
        indices_dtype=str(arrays[1].dtype) if len(arrays) > 1 else None,
        chunks=values.chunks,
        shards=getattr(values, "shards", None),
        codec=_codec(values),
        nbytes=sum(int(np.prod(array.shape)) * array.dtype.itemsize for array in arrays),
        stored_bytes=_total(_stored_bytes(array) for array in arrays),
    )


def _stored_bytes(array: h5py.Dataset | zarr.Array[Any]) -> int | None:
    if isinstance(array, h5py.Dataset):
        return int(array.id.get_storage_size())
    try:
        return int(array.nbytes_stored())
    except StorageError:  # A web server cannot list the contents of a store.
        return None


def _total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of sizes; None if any of them is unknown."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _codec(array: Any) -> str | None:
    """Return the names of the filters and compressors of an array's chunks; None if there are none."""
    if isinstance(array, h5py.Dataset):
        pipeline = array.id.get_create_plist()
        filters = [pipeline.get_filter(i) for i in range(pipeline.get_nfilters())]
        names = [_filter_name(number, text.decode()) for number, _, _, text in filters]
    else:
        names = [
            _compressor_name(one) for codec in (*array.filters, *array.compressors) for one in codecs_within(codec)
        ]
    return ", ".join(names) or None


def _filter_name(number: int, text: str) -> str:
    names = {1: "gzip", 2: "shuffle", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32015: "zstd", 32026: "blosc2"}
    return names.get(number, text or f"filter {number}")


def _compressor_name(compressor: Any) -> str:
    cname = getattr(compressor, "cname", None)
    name = getattr(compressor, "codec_id", None) or type(compressor).__name__.removesuffix("Codec").lower()
    return str(name) if cname is None else f"{name} {getattr(cname, 'value', cname)}"


def merge_alike(matrices: Sequence[StoredMatrix]) -> list[StoredMatrix]:
    """Merge matrices that several files store in the same way."""

    def kind(one: StoredMatrix) -> tuple[Any, ...]:
        # Chunk shapes are not compared, since the chunks of a short array are only as long as the array.
        return one.key, one.encoding, one.dtype, one.indices_dtype, one.codec, one.shards is None, one.chunks is None

    groups: dict[tuple[Any, ...], list[StoredMatrix]] = {}
    for one in matrices:
        groups.setdefault(kind(one), []).append(one)
    return [
        StoredMatrix(
            key=same[0].key,
            n_files=len(same),
            encoding=same[0].encoding,
            dtype=same[0].dtype,
            indices_dtype=same[0].indices_dtype,
            chunks=Counter(one.chunks for one in same).most_common(1)[0][0],
            shards=Counter(one.shards for one in same).most_common(1)[0][0],
            codec=same[0].codec,
            nbytes=sum(one.nbytes for one in same),
            stored_bytes=_total(one.stored_bytes for one in same),
        )
        for same in groups.values()
    ]

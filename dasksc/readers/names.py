"""Names of cells: fast reading, placeholders, digests, and a check for repeated names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem
from numpy.typing import NDArray

from dasksc.storage import RemoteLocation, UseMmap
from dasksc.storage.hdf5.direct import read_strings, strings_in_pieces
from dasksc.storage.opening import attribute

_FEW_NAMES = 100_000
_PIECE = 2**16


def read_names(stored: Any, path: str | RemoteLocation, *, mmap: UseMmap) -> Any:
    """Read the names of rows; those of a local HDF5 file are read without the HDF5 library if possible."""
    names = None
    if isinstance(stored, h5py.Dataset) and not isinstance(path, RemoteLocation) and mmap is not False:
        names = read_strings(stored, path)
    # The data type is derived from one name: pandas would need 40 bytes per name to find the same type.
    return read_elem(stored) if names is None else pd.Index(names, dtype=pd.Index(names[:1]).dtype)


def nameless_index(n: int) -> pd.Index[Any]:
    """Return an index of `n` rows that AnnData accepts as an index of strings, and that stores no string per row."""
    return pd.CategoricalIndex(pd.Categorical.from_codes(np.zeros(n, dtype=np.int8), categories=[""]))  # type: ignore[arg-type, unused-ignore]


def any_repeat(names: pd.Index[Any]) -> bool:
    """Return True if names repeat; large indexes are checked by sorting hashes, which is faster than a hash table."""
    if len(names) < _FEW_NAMES:
        return not names.is_unique
    hashes = np.fromiter(map(hash, names.to_numpy()), dtype=np.int64, count=len(names))
    return any_equal(hashes) and not names.is_unique


def any_equal(numbers: NDArray[np.int64]) -> bool:
    """Return True if two of the numbers are equal; the numbers are sorted in place."""
    numbers.sort()
    return bool((numbers[1:] == numbers[:-1]).any())


def names_in_pieces(names: pd.Index[Any]) -> Iterator[list[str]]:
    """Yield the names of cells in memory, some at a time."""
    for start in range(0, len(names), _PIECE):
        yield names[start : start + _PIECE].astype(str).tolist()


def stored_names(stored: Any, path: Any) -> Iterator[list[str]] | None:
    """Yield the names of a stored obs table, some at a time; return None if they can only be read as a whole."""
    index = stored[attribute(stored.attrs, "_index")] if "_index" in stored.attrs else None
    if (
        isinstance(index, h5py.Group | zarr.Group)
        and attribute(index.attrs, "encoding-type") == "nullable-string-array"
    ):
        index = index["values"]  # No name is missing, so the mask is False everywhere.
    if isinstance(index, h5py.Dataset) and h5py.check_string_dtype(index.dtype) is not None:
        return _pieces_of_hdf5(index, path)
    if isinstance(index, zarr.Array) and index.attrs.get("encoding-type") == "string-array":
        return _pieces_of(index, index.shape[0])
    return None


def stored_names_type(stored: Any, path: Any) -> tuple[str | None, Any] | None:
    """Return the `name` and `dtype` of the index of a stored obs table; None if it can only be read as a whole."""
    if attribute(stored.attrs, "encoding-version") != "0.2.0" or stored_names(stored, path) is None:
        return None
    key = str(attribute(stored.attrs, "_index"))
    encoding = attribute(stored[key].attrs, "encoding-type")
    if encoding == "nullable-string-array" and not stored[key]["mask"][:].any():
        determining = ("encoding-type", "encoding-version", "na-value")
        dtype = dtype_of_nullable(*(attribute(stored[key].attrs, name) for name in determining))
    elif encoding == "string-array":
        dtype = pd.Index(["a"]).dtype
    else:
        return None
    return (None if key == "_index" else key), dtype


def dtype_of_nullable(encoding: str, version: str, na_value: str | None) -> Any:
    """Return the data type of nullable strings, which depends on these attributes and on the version of AnnData."""
    sample: Any = zarr.open_group(zarr.storage.MemoryStore(), mode="w", zarr_format=2)
    write_elem(sample, "values", np.array(["a"], dtype=object))
    write_elem(sample, "mask", np.array([False]))
    attributes = {"encoding-type": encoding, "encoding-version": version, "na-value": na_value}
    sample.attrs.update({name: str(value) for name, value in attributes.items() if value is not None})
    return read_elem(sample).dtype


def _pieces_of_hdf5(index: h5py.Dataset, path: Any) -> Iterator[list[str]]:
    start = 0
    if not isinstance(path, RemoteLocation):
        for piece in strings_in_pieces(index, path, _PIECE):
            if piece is not None:
                yield piece
                start += len(piece)
    yield from _pieces_of(index.asstr(), len(index), start)


def _pieces_of(array: Any, n: int, first: int = 0) -> Iterator[list[str]]:
    # A chunk of Zarr is decoded as a whole.
    n_together = max([_PIECE, *(getattr(array, "chunks", None) or ())])
    for begin in range(first, n, n_together):
        read = np.asarray(array[begin : begin + n_together])
        for start in range(0, len(read), _PIECE):
            yield read[start : start + _PIECE].astype(object).tolist()


def digest_names(pieces: Iterable[Sequence[str]]) -> str:
    """Return a digest of names in order, 32 hexadecimal digits; it does not depend on how the names are divided."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        # Surrogates stand for bytes that are not UTF-8.
        digest.update("\0".join([*piece, ""]).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()

"""Catalogues: the tables of many joined files, and where their matrices lie, in one Zarr zip of AnnData's encoding.

`dasksc.index` writes them. For each matrix, ``parts`` lists the files in order, and ``extents`` the byte ranges of
uncompressed arrays, which are then read without opening a file through HDF5. Other matrices are opened when their rows
are fetched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import pandas as pd
import zarr
from anndata.io import read_elem, write_elem
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError, MissingPathError
from dasksc.readers.anndata import AnnDataStore
from dasksc.readers.interface import Reader, Store
from dasksc.readers.options import OpenOptions
from dasksc.storage import (
    AbsentMatrix,
    ColumnMaps,
    ConcatenatedMatrix,
    FetchCost,
    Layout,
    Matrix,
    RemoteLocation,
    RowBuffer,
    is_url,
    open_matrix,
)
from dasksc.storage.files import FileIdentity, LocalFile, can_map
from dasksc.storage.hdf5.reader import H5File
from dasksc.storage.matrices import CSCMatrix, CSRMatrix, DenseMatrix
from dasksc.storage.opening import matrix_in
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.remote.remote_file import RemoteFile, identities
from dasksc.storage.uncompressed import PlainArray
from dasksc.storage.zarr.reader import ZarrFile

_AGAIN = "Index the files again: dasksc index PATHS --out"
_COST = FetchCost.__dataclass_fields__
# Number of the file of a part that lacks the matrix.
_NONE = -1

Identity: TypeAlias = FileIdentity | ObjectIdentity
_File: TypeAlias = LocalFile | RemoteFile | RemoteLocation


class CatalogReader(Reader):
    """Reader of the catalogues that `dasksc.index` writes."""

    suffixes = (".catalog",)
    listed_suffixes = ()  # a folder is opened without the catalogue of its files

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True for a local file with the ending of a catalogue."""
        return isinstance(path, str) and super().matches(path) and os.path.isfile(path)

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        assert isinstance(path, str)
        root = zarr.open_group(zarr.storage.ZipStore(path, mode="r"), mode="r")
        if "files" not in root.attrs:
            raise CorruptDataError(f"{path} is no catalogue of this version of dasksc. {_AGAIN} {path}")
        return _CatalogStore(path, ZarrFile(path), root, options)


class _CatalogStore(AnnDataStore):
    def keys(self) -> list[str]:
        return [*super().keys(), *self._root.attrs["dasksc-catalog"]]

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self._with_values(name, super().table(name, columns))

    def _with_values(self, name: str, table: pd.DataFrame) -> pd.DataFrame:
        """Replace the text that `as_text` made by the values."""
        for column, dtype in self._root.attrs["dasksc-texts"].get(name, {}).items():
            if column in table:
                labels = [json.loads(text) for text in table[column].cat.categories]
                if dtype == "category":
                    table[column] = table[column].cat.rename_categories(labels)
                else:
                    values = np.array([*labels, np.nan], dtype=object)[table[column].cat.codes]
                    table[column] = pd.Series(values, table.index).astype(dtype)
        return table

    def matrix(self, key: str) -> Any:
        if key not in self._root.attrs["dasksc-catalog"]:  # a table of obsm
            return self._with_values(key, super().matrix(key))
        return _read_matrix(self._root[f"matrices/{key.replace('/', '|')}"], key, self._files, self._options)

    @cached_property
    def _files(self) -> list[_File]:
        """Files of the atlas, which have not changed since they were indexed."""
        options = self._options
        folder = os.path.dirname(os.path.realpath(str(self._path)))
        found: list[_File] = []
        recorded: list[tuple[RemoteLocation | None, Identity]] = []
        for path, member, size, etag, modified in self._root.attrs["files"]:
            if not is_url(path):
                path = os.path.normpath(os.path.join(folder, path))
                use_mmap = options.mmap if can_map(os.path.dirname(path)) else False
                file = LocalFile(FileIdentity(path=path, size=size, mtime_ns=int(modified)), use_mmap)
                found.append(file)
                recorded.append((None, file.identity))
                continue
            where = RemoteLocation.of(path, options.storage_options)
            identity = ObjectIdentity(path=str(where), size=size, etag=etag or None, modified=modified)
            found.append(where if member else RemoteFile(where, identity, cache=options.cache_of(where)))
            recorded.append((where.below(member) if member else where, identity))
        objects = iter(identities([one for one, _ in recorded if one is not None]))
        gone, changed = [], []
        for location, then in recorded:
            try:
                now: Any = identity_of(then.path) if location is None else next(objects)
                if now is None:
                    gone.append(then.path)
                else:
                    then.compare(now)
            except CorruptDataError:
                changed.append(then.path)
            except OSError:
                gone.append(then.path)
        for paths, what in ((gone, "are gone"), (changed, "have changed")):
            if paths:
                kind = MissingPathError if paths is gone else CorruptDataError
                raise kind(
                    f"{len(paths)} of {len(found)} files in {self._path} {what} since they were indexed, such as "
                    f"{', '.join(paths[:3])}. {_AGAIN} {self._path}"
                )
        return found


def files_of(path: str | RemoteLocation, options: OpenOptions) -> list[str | RemoteLocation]:
    """Return the files of a catalogue; none if the path is of another format."""
    reader = CatalogReader()
    if not reader.matches(path):
        return []
    files = cast(_CatalogStore, reader.open(path, options))._files
    return [one if isinstance(one, RemoteLocation) else getattr(one, "location", one.path) for one in files]


class _UnopenedMatrix:
    """Matrix of a file that is opened when its rows are fetched."""

    def __init__(
        self,
        file: _File,
        key: str,
        *,
        shape: tuple[int, int],
        layout: Layout,
        dtypes: Sequence[np.dtype[Any]],
        cost: FetchCost,
        options: OpenOptions,
    ) -> None:
        self.label = f"{file if isinstance(file, RemoteLocation) else file.path}:/{key}"
        self.shape, self.layout, self.cost = shape, layout, cost
        self.dtype, self.stored_dtype = dtypes
        self._file, self._key, self._options = file, key, options

    def fetch(self, rows: NDArray[np.int64]) -> RowBuffer:
        matrix = _opened(self)
        if (*matrix.shape, matrix.stored_dtype) != (*self.shape, self.stored_dtype):
            raise CorruptDataError(
                f"{matrix.label} is {matrix.shape} of {matrix.stored_dtype}, but the catalogue says {self.shape} of "
                f"{self.stored_dtype}. {_AGAIN} ..."
            )
        return matrix.fetch(rows)

    def open(self) -> Matrix:
        """Open the matrix, whose file must not have changed since it was indexed."""
        file, options = self._file, self._options
        if isinstance(file, RemoteFile):
            return matrix_in(H5File(file), self._key)
        if isinstance(file, RemoteLocation):
            return open_matrix(file, self._key, cache=options.cache_of(file))
        if not os.path.isdir(file.path):
            file.require_unchanged()
        return open_matrix(file.path, self._key, use_mmap=options.mmap)


_opened = lru_cache(maxsize=128)(_UnopenedMatrix.open)


def as_text(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return a table with text, in JSON, for columns that AnnData cannot write as they are, and their data types."""
    # Files with other types of a column make it one of Python objects, or of floats that may be missing.
    types: dict[str, str] = {}
    texts: dict[str, Any] = {}
    for name, column in table.items():
        is_category = isinstance(column.dtype, pd.CategoricalDtype)
        labels = column.cat.categories if is_category else column
        is_other = labels.dtype == object and pd.api.types.infer_dtype(labels, skipna=False) not in ("string", "empty")
        if is_other or labels.dtype.kind in "mM" or isinstance(labels.array, pd.arrays.FloatingArray):
            types[str(name)] = str(column.dtype)
            text = [None if pd.isna(one) else _json(one) for one in labels]
            texts[str(name)] = column.cat.rename_categories(text) if is_category else pd.Categorical(text)
    return table.assign(**texts), types


def _json(value: Any) -> str:
    return json.dumps(value.item() if isinstance(value, np.generic) else value, default=str)


def identity_of(path: str) -> FileIdentity:
    """Return the version of a local file; of a Zarr store in a folder, the newest change of any of its files counts."""
    found = FileIdentity.of(path)
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return replace(found, mtime_ns=max((os.stat(one).st_mtime_ns for one in files), default=found.mtime_ns))


def write_matrix(root: zarr.Group, key: str, matrix: Matrix, files: dict[str, Identity | None]) -> None:
    """Write where the rows of a joined matrix lie; `files` receives the files, by their paths."""
    numbers = {path: number for number, path in enumerate(files)}
    parts = matrix.parts if isinstance(matrix, ConcatenatedMatrix) else (matrix,)
    rows: list[dict[str, Any]] = []
    extents: list[NDArray[np.int64]] = []
    for number, part in enumerate(parts):
        path, colon, inside = part.label.rpartition(":/")
        arrays = _plain_arrays(part)
        # Other matrices are opened again by their key, which needs the attributes that AnnData writes, unlike 10x.
        is_own = isinstance(part, CSRMatrix | CSCMatrix | DenseMatrix | _UnopenedMatrix)
        is_found = is_own and bool(arrays or "/" in inside or inside in ("X", "raw.X"))
        if isinstance(part, AbsentMatrix):
            path = ""
        elif not (is_found and colon and (is_url(path) or os.path.exists(path))):
            raise InputError(
                f"{part.label} is not a matrix of an HDF5 file or Zarr store, so a catalogue cannot refer to it. "
                "Convert it first (dasksc convert)"
            )
        if path:
            files[path] = files.get(path) or (arrays[0].file.identity if arrays else None)
        rows.append(
            {
                "file": numbers.setdefault(path, len(numbers)) if path else _NONE,
                "key": inside,
                "n_obs": part.shape[0],
                "n_vars": part.shape[1],
                "layout": part.layout,
                "computed": str(part.dtype),
                "stored": str(part.stored_dtype),
                "n_values": arrays[-1].shape[0] if arrays else -1,
                "index_dtypes": " ".join(str(array.dtype) for array in arrays[:-1]),
            }
            | dict(zip(_COST, astuple(part.cost), strict=True))
        )
        for which, array in enumerate(arrays):
            firsts, offsets = array.extents
            extents.append(np.stack([np.full_like(firsts, number), np.full_like(firsts, which), firsts, offsets]))
    group = root.require_group(f"matrices/{key.replace('/', '|')}")
    group.attrs["parts"] = pd.DataFrame(rows).to_dict("list")
    write_elem(group, "extents", np.concatenate(extents, axis=1) if extents else np.empty((4, 0), dtype=np.int64))
    maps = matrix.maps if isinstance(matrix, ConcatenatedMatrix) else None
    if maps is not None:
        write_elem(group, "lookups", maps.lookups(None).to)
        write_elem(group, "which", maps.which)
        group.attrs["n_vars"], group.attrs["fill_value"] = maps.n_vars, maps.fill_value


def _plain_arrays(matrix: Matrix) -> tuple[PlainArray, ...]:
    """Return the arrays of a matrix if all are uncompressed and in one file."""
    arrays = matrix.arrays if isinstance(matrix, CSRMatrix | DenseMatrix) else ()
    plain = tuple(array for array in arrays if isinstance(array, PlainArray))
    return plain if len(plain) == len(arrays) else ()


def _read_matrix(group: Any, key: str, files: Sequence[_File], options: OpenOptions) -> Matrix:
    table = pd.DataFrame(group.attrs["parts"])
    extents = read_elem(group["extents"])
    begins = np.searchsorted(extents[0], np.arange(len(table) + 1))

    def matrix_of(row: Any) -> Matrix:
        dtype, stored = np.dtype(row.computed), np.dtype(row.stored)
        if row.file == _NONE:
            return AbsentMatrix(row.n_obs, dtype)
        file, shape = files[row.file], (row.n_obs, row.n_vars)
        if row.n_values < 0 or isinstance(file, RemoteLocation):
            cost = FetchCost(**{name: getattr(row, name) for name in _COST})
            return _UnopenedMatrix(
                file, row.key, shape=shape, layout=row.layout, dtypes=(dtype, stored), cost=cost, options=options
            )
        label = f"{file.path}:/{row.key}"
        _, which, firsts, offsets = extents[:, begins[row.Index] : begins[row.Index + 1]]

        def array(at: int, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> PlainArray:
            return PlainArray(
                label=label + name,
                shape=shape,
                dtype=dtype,
                file=file,
                firsts=firsts[which == at],
                offsets=offsets[which == at],
                fill=dtype.type(0),
            )

        if row.layout == "dense":
            return DenseMatrix(label=label, values=array(0, "", shape, stored), dtype=dtype)
        of_rows, of_columns = (np.dtype(one) for one in row.index_dtypes.split())
        n = (row.n_values,)
        return CSRMatrix(
            label=label,
            shape=shape,
            indptr=array(0, "/indptr", (row.n_obs + 1,), of_rows),
            indices=array(1, "/indices", n, of_columns),
            data=array(2, "/data", n, stored),
            dtype=dtype,
        )

    maps = None
    if "lookups" in group:
        positions = [one[one != -2] for one in read_elem(group["lookups"])]
        n_vars, fill_value = group.attrs["n_vars"], group.attrs["fill_value"]
        maps = ColumnMaps([positions[i] for i in read_elem(group["which"])], n_vars, fill_value=fill_value)
    parts = list(map(matrix_of, table.itertuples()))
    return ConcatenatedMatrix(label=f"{key} of {len(parts)} atlases", parts=parts, maps=maps)

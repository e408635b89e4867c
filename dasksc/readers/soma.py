"""SOMA experiments in TileDB, read through tiledbsoma: obs and var by column, matrices by ranges of rows.

Rows and columns are the ``soma_joinid`` of obs and var, which may have gaps. An array is opened again in each process,
at the time at which the experiment was opened, so that all processes read the same version of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError, InputError, MissingKeyError, StorageError
from dasksc.kernels import csr as kernels
from dasksc.readers.arrays import Block, RowsMatrix
from dasksc.readers.interface import Reader, Store
from dasksc.readers.names import nameless_index
from dasksc.readers.options import OpenOptions
from dasksc.storage import HDF5_ENDINGS, FetchCost, Layout, RemoteLocation, buffers, caused_by_data, is_url
from dasksc.storage.arrays import logical_dtype, merge
from dasksc.storage.fetched_rows import indptr_of

# Files and folders that TileDB keeps in each group and in each array.
_MARKERS = ("__tiledb_group.tdb", "__schema")
_ID = "soma_joinid"
# Name that tiledbsoma gives to the X of an AnnData.
_X = "data"
# Memory of a read: a buffer for each column of the result, and the tiles that TileDB decodes at a time.
_BUFFER_BYTES = 2**25
_TILE_BYTES = 2**28
_FIXED_BYTES = 3 * _BUFFER_BYTES + _TILE_BYTES
# Names of options for S3, in obstore and in TileDB.
_S3 = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "region",
    "endpoint": "endpoint_override",
    "skip_signature": "no_sign_request",
    "virtual_hosted_style_request": "use_virtual_addressing",
}
# Options for the requests of obstore, which reads no array.
_OF_OBSTORE = ("allow_http", "client_options", "retry_config")


class SomaReader(Reader):
    """Reader of SOMA experiments, local or in object stores."""

    listed_suffixes = (".soma",)
    options = ("measurement", "layer", "value_filter", "obs_names", "var_names")

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True for a group or array of TileDB; at a URL, this takes a request."""
        if isinstance(path, RemoteLocation):
            if path.is_on_web or path.key.endswith(HDF5_ENDINGS):
                return False
            return path.below(_MARKERS[0]).exists()
        return os.path.isdir(path) and any(os.path.exists(os.path.join(path, marker)) for marker in _MARKERS)

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        return SomaStore(path, options)


class SomaStore(Store):
    """A measurement of an experiment, with the cells that ``value_filter`` selects."""

    def __init__(self, path: str | RemoteLocation, options: OpenOptions) -> None:
        self._path, self._options = path, options
        self._chosen = options.reader_options
        uri = path.url if isinstance(path, RemoteLocation) else path
        self._experiment = _opened(uri, _config(options.storage_options))
        if self._experiment.soma_type != "SOMAExperiment":
            inside = ", ".join(getattr(self._experiment, "keys", list)())
            raise StorageError(
                f"{path} is a {self._experiment.soma_type}, not a SOMAExperiment"
                + (f"; open one of its members: {inside}" if inside else "")
            )
        measurements = list(self._experiment.ms)
        # tiledbsoma writes the raw of an AnnData as a measurement.
        own = [name for name in measurements if name != "raw"] or measurements
        self._name = self._choice("measurement", measurements, own)
        self._measurement = self._experiment.ms[self._name]
        self._layers = list(self._measurement.X) if "X" in self._measurement else []
        preferred = [_X] if _X in self._layers else self._layers
        self._x = self._choice("layer", self._layers, preferred) if self._layers else None

    def keys(self) -> list[str]:
        """Return obs, var, the layers of the measurement, and its obsm."""
        found = ["obs", "var"] + (["X"] if self._x is not None else [])
        found += [f"layers/{name}" for name in self._layers if name != self._x]
        return found + [f"obsm/{name}" for name in self._measurement.get("obsm", ())]

    def columns(self, name: str) -> list[str]:
        left_out = (_ID, self._names_column(name))
        return [column for column in self._table(name).schema.names if column not in left_out]

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        wanted = self.columns(name) if columns is None else list(columns)
        has_names = name == "var" or self._options.has_names
        index = self._names_column(name) if has_names else None
        ids, table = self._read(name, [*wanted, *([] if index is None else [index])])
        if not has_names:
            return table.set_axis(nameless_index(len(table)))
        names = ids.astype(str) if index is None else table.pop(index).to_numpy()
        return table.set_axis(pd.Index(names, dtype=object))

    def matrix(self, key: str) -> RowsMatrix:
        group, _, name = key.rpartition("/")
        in_obsm = group == "obsm"
        array = self._measurement.obsm[name] if in_obsm else self._measurement.X[self._x if key == "X" else name]
        label = f"{self._path}:/ms/{self._name}/{'obsm' if in_obsm else 'X'}/{array.uri.rpartition('/')[2]}"
        ids = self._ids("obs")
        columns = np.arange(array.shape[1]) if in_obsm else self._ids("var")
        for axis, held in enumerate((ids, columns)):
            if len(held) and held[-1] >= array.shape[axis]:
                raise CorruptDataError(
                    f"{label} has shape {array.shape}, but {('obs', 'var')[axis]} has soma_joinid {held[-1]}. "
                    "Resize the array, or write the experiment again from its source."
                )
        versions = _versions(RemoteLocation.of(array.uri, self._options.storage_options))
        opening = array.uri, _config(self._options.storage_options), array.tiledb_timestamp_ms
        kind = SparseSoma if array.is_sparse else DenseSoma
        return kind(label, opening, array, ids, columns, versions)

    def close(self) -> None:
        """Close the experiment; matrices open their arrays themselves."""
        self._experiment.close()

    def _table(self, name: str) -> Any:
        return self._experiment.obs if name == "obs" else self._measurement.var

    def _names_column(self, name: str) -> str | None:
        """Return the column with the names of the rows; None if they have only numbers."""
        option, held = f"{name}_names", self._table(name).schema.names
        default = f"{name}_id"
        return self._choice(option, held, [default]) if option in self._chosen or default in held else None

    def _ids(self, name: str) -> NDArray[np.int64]:
        return self._read(name, [])[0]

    def _read(self, name: str, columns: Sequence[str]) -> tuple[NDArray[np.int64], pd.DataFrame]:
        """Return the numbers of the rows, ascending, and the columns."""
        expression = self._chosen.get("value_filter") if name == "obs" else None
        names = list(dict.fromkeys([_ID, *columns]))
        try:
            found = self._table(name).read(column_names=names, value_filter=expression).concat()
        except Exception as error:
            if expression is None:
                raise
            reason = str(error).partition("\n")[0]  # the rest is a traceback
            raise InputError(f"{self._path}: value_filter={expression!r} cannot be evaluated: {reason}") from error
        ids = found[_ID].to_numpy()
        if len(ids) == 0 and expression is not None:
            raise InputError(f"{self._path}: value_filter={expression!r} matches no cell")
        if (ids[1:] <= ids[:-1]).any():
            order = np.argsort(ids, kind="stable")
            ids, found = ids[order], found.take(order)
        return ids, found.to_pandas()[list(columns)]

    def _choice(self, option: str, names: Sequence[str], preferred: Sequence[str]) -> str:
        """Return the name given for an option, by default the only preferred one."""
        name = self._chosen.get(option)
        if name is None and len(preferred) == 1:
            return preferred[0]
        if name not in names:
            what = f"has no {option} {name!r}" if name else f"has several choices of {option}"
            raise MissingKeyError(
                f"{self._path} {what}; expected one of {', '.join(map(repr, names)) or 'none'} in reader_options"
            )
        return str(name)


class SomaMatrix(RowsMatrix):
    """Array of an experiment, of the rows and columns with the given numbers."""

    def __init__(
        self,
        label: str,
        opening: tuple[str, tuple[tuple[str, str], ...], int],
        array: Any,
        ids: NDArray[np.int64],
        columns: NDArray[np.int64],
        versions: tuple[str, ...],
    ) -> None:
        self.label, self._opening, self._versions = label, opening, versions
        self.shape = len(ids), len(columns)
        self.stored_dtype = np.dtype(array.schema.field("soma_data").type.to_pandas_dtype())
        self.dtype = logical_dtype(self.stored_dtype)
        # Numbers without gaps are not kept: row i has number i.
        self._ids = None if len(ids) == 0 or ids[-1] == len(ids) - 1 else ids
        self._columns = columns
        self._arrays: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}}

    def __dask_tokenize__(self) -> object:
        ids = None if self._ids is None else self._ids.tobytes()
        return type(self).__name__, self.label, self._versions, self.shape, ids, self._columns.tobytes()

    @property
    def _array(self) -> Any:
        """Array as opened in this process; TileDB's threads do not survive a fork."""
        if os.getpid() not in self._arrays:
            self._arrays[os.getpid()] = _opened(*self._opening)
        return self._arrays[os.getpid()]

    def _numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows if self._ids is None else self._ids[rows]


class SparseSoma(SomaMatrix):
    """Sparse array, read as triples of row, column and value."""

    layout: Layout = "csr"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        array, schema = given[2], given[2].schema_config_options()
        self._mean = array.nnz / max(1, array.shape[0])
        extents = [int(dim["tile"]) for dim in json.loads(schema.dims).values()]
        per_tile = self._mean * min(1.0, extents[1] / max(1, array.shape[1]))
        self._tile_rows = min(extents[0], schema.capacity / max(1.0, per_tile))
        self._to = np.full(array.shape[1], -1, dtype=np.int32)
        self._to[self._columns] = np.arange(len(self._columns))

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes: the rows, and the result of TileDB, with wide rows and columns."""
        itemsize = self.stored_dtype.itemsize
        row = 32 + self._mean * (4 + itemsize)
        working = self._mean * (24 + itemsize)
        return FetchCost(row=row, held=row, working=working, fixed=_FIXED_BYTES, chunk_rows=self._tile_rows)

    def _read(self, rows: NDArray[np.int64]) -> Block:
        ids = self._numbers(rows)
        counts = np.zeros(len(ids), dtype=np.int64)
        parts = []
        for table in self._tables(ids) if len(ids) else ():
            of_rows, columns, values = (table[name].to_numpy() for name in ("soma_dim_0", "soma_dim_1", "soma_data"))
            at = np.empty(len(of_rows), dtype=np.int32)
            stray = kernels.count_triples(ids, of_rows, at, counts)
            if stray >= 0:
                raise CorruptDataError(f"{self.label}: TileDB returned row {stray}, which was not requested")
            parts.append((at, columns, values))
        indptr = indptr_of(counts)
        places = indptr[:-1].copy()
        indices = buffers.empty(int(indptr[-1]), np.int32)
        data = buffers.empty(int(indptr[-1]), self.stored_dtype)
        for part in parts:
            stray = kernels.fill_triples(*part, self._to, places, indices, data)
            if stray >= 0:
                raise CorruptDataError(
                    f"{self.label} has values of soma_joinid {stray} of var, which var lacks. Write the experiment "
                    "again from its source."
                )
        return indptr, indices, data

    def _tables(self, ids: NDArray[np.int64]) -> Iterator[Any]:
        # A range is read faster than as many points.
        is_range = ids[-1] - ids[0] == len(ids) - 1
        with _naming_rows(self.label, ids):
            yield from self._array.read((slice(int(ids[0]), int(ids[-1])) if is_range else ids,)).tables()


class DenseSoma(SomaMatrix):
    """Dense array, read by ranges of rows."""

    layout: Layout = "dense"

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes: the rows, and the ranges that are read."""
        row = self.shape[1] * self.stored_dtype.itemsize
        return FetchCost(row=max(1, row), held=32 + row, working=row, fixed=_FIXED_BYTES, chunk_rows=1)

    def _read(self, rows: NDArray[np.int64]) -> Block:
        ids = self._numbers(rows)
        block = np.empty((len(ids), self.shape[1]), dtype=self.stored_dtype)
        starts, stops = merge(ids, ids + 1)
        at = 0
        with _naming_rows(self.label, ids):
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                read = self._array.read((slice(start, stop - 1),)).to_numpy()
                block[at : at + stop - start] = read[:, self._columns]
                at += stop - start
        return block


def _versions(location: RemoteLocation) -> tuple[str, ...]:
    """Return the names of an array's writes and deletions, which identify its contents."""
    commits = location.below("__commits")
    if commits.local is None:
        return tuple(one.name for one in commits.children())
    return tuple(sorted(os.listdir(commits.local))) if os.path.isdir(commits.local) else ()


@contextmanager
def _naming_rows(label: str, ids: NDArray[np.int64]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not caused_by_data(error):
            raise
        kind = StorageError if is_url(label) else CorruptDataError
        raise kind(
            f"{label}: rows with soma_joinid from {ids[0]} to {ids[-1]} cannot be read: {error}. Copy or download the "
            "experiment again."
        ) from error


def _opened(uri: str, config: tuple[tuple[str, str], ...], timestamp: int | None = None) -> Any:
    """Open an object of SOMA, in the context of this process for a configuration."""
    try:
        import tiledbsoma
    except ImportError as error:
        raise InputError(f"{uri} is read through tiledbsoma: pip install 'dasksc[soma]'") from error
    return tiledbsoma.open(uri, context=_context(os.getpid(), config), tiledb_timestamp=timestamp)


@cache
def _context(process: int, config: tuple[tuple[str, str], ...]) -> Any:
    from tiledbsoma import SOMATileDBContext

    return SOMATileDBContext(dict(config))


def _config(options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the configuration of TileDB for options with the names of obstore, or of TileDB."""
    config = {"soma.init_buffer_bytes": str(_BUFFER_BYTES), "sm.mem.total_budget": str(_TILE_BYTES)}
    for name, value in options.items():
        if name in _OF_OBSTORE:
            continue
        known = _S3.get(name.lower().removeprefix("aws_").removesuffix("_url"))
        if known is None and "." not in name:
            raise InputError(f"storage_options of SOMA have no {name!r}; expected {', '.join(_S3)}, or names of TileDB")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        config[name if known is None else f"vfs.s3.{known}"] = text
    if config.get("vfs.s3.endpoint_override", "").startswith("http://"):
        config["vfs.s3.scheme"] = "http"
    return tuple(sorted(config.items()))

"""Parquet files with a row for each cell: lists of genes and of expressions, and columns of obs.

This is the layout of Tahoe-100M on Hugging Face. Genes are numbers (tokens) that a separate table of genes explains.
There, the first entry of each list is a marker: a negative expression, and a token that the table of genes lacks. Such
entries are left out, as in the tutorial of that data set; any other negative value or unknown token is an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dasksc.checks import known
from dasksc.errors import CorruptDataError, InputError, MissingPathError
from dasksc.readers.arrays import Block, RowsMatrix
from dasksc.readers.interface import Reader, Store
from dasksc.readers.names import nameless_index
from dasksc.readers.options import OpenOptions
from dasksc.storage import FetchCost, Layout, RemoteLocation
from dasksc.storage.arrays import logical_dtype, memory_dtype
from dasksc.storage.fetched_rows import indptr_of
from dasksc.storage.files import FileIdentity, LocalFile
from dasksc.storage.hdf5.reader import BlockReader
from dasksc.storage.remote.remote_file import RemoteFile

_DEFAULTS = {"genes": "genes", "expressions": "expressions", "token": "token_id", "gene_names": "ensembl_id"}
# Limit of the tokens, since a table is indexed by them.
_MOST_TOKENS = 2**26


class ParquetReader(Reader):
    """Reader of ``.parquet`` files with lists of genes and of expressions."""

    suffixes = (".parquet",)
    options = ("gene_table", *_DEFAULTS, "cell_names", "obs_table", "obs_key")

    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        return ParquetStore(path, options)


class ParquetStore(Store):
    """Cells in one file."""

    def __init__(self, path: str | RemoteLocation, options: OpenOptions) -> None:
        self._path, self._has_names = path, options.has_names
        self._chosen = _DEFAULTS | dict(options.reader_options)
        if isinstance(path, RemoteLocation):
            self._file: LocalFile | RemoteFile = RemoteFile.of(path, cache=options.cache_of(path))
        else:
            self._file = LocalFile.of(path)
        self._parquet = _opened(self._file)
        self._schema = self._parquet.schema_arrow
        for option in ("genes", "expressions"):
            self._own(option)
        if "gene_table" not in self._chosen:
            raise InputError(
                f"{path} needs the table of its genes, with the columns {self._chosen['token']!r} and "
                f"{self._chosen['gene_names']!r}: dasksc.open(path, reader_options={{'gene_table': 'genes.parquet'}})"
            )
        if ("obs_table" in self._chosen) != ("obs_key" in self._chosen):
            raise InputError("obs_table and obs_key, the column that cells and obs_table share, must be given together")
        self._var, self._to = _genes(
            _identity("gene_table", self._chosen), self._chosen["token"], self._chosen["gene_names"]
        )

    def keys(self) -> list[str]:
        return ["obs", "var", "X"]

    def columns(self, name: str) -> list[str]:
        """Return the columns of a table; those of the table of cells follow those of the file."""
        if name == "var":
            return list(self._var)
        left_out = {self._chosen["genes"], self._chosen["expressions"], self._chosen.get("cell_names")}
        own = [column for column in self._schema.names if column not in left_out]
        return own + [column for column in self._others() if column not in own]

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        if name == "var":
            return self._var.copy(deep=False)
        wanted = self.columns("obs") if columns is None else list(columns)
        names, key = self._chosen.get("cell_names"), self._chosen.get("obs_key")
        others = [column for column in wanted if column not in self._schema.names]
        own = [column for column in wanted if column not in others]
        extra = [self._own(option) for option in ("cell_names", "obs_key") if self._chosen.get(option)]
        read = _frame(self._parquet.read(columns=list(dict.fromkeys([*own, *extra]))))
        table = read[own]
        if others:
            table = pd.concat([table, self._joined(read[key], others)], axis=1)
        if not self._has_names:
            return table.set_axis(nameless_index(len(table)))
        return table.set_axis(pd.RangeIndex(len(table)) if names is None else pd.Index(read[names].astype(str)))

    def close(self) -> None:
        """Close the file, which the matrix opens again."""
        self._parquet.close()

    def matrix(self, key: str) -> ParquetMatrix:
        return ParquetMatrix(
            self._file, self._parquet, self._chosen["genes"], self._chosen["expressions"], self._to, len(self._var)
        )

    def _own(self, option: str) -> str:
        """Return the column of the file that an option names."""
        return known(f"{self._path} ({option}=)", self._chosen[option], self._schema.names)

    def _others(self) -> list[str]:
        """Return the columns of the table of cells, except the one that it shares with the file."""
        if "obs_table" not in self._chosen:
            return []
        names = _columns_of(_identity("obs_table", self._chosen).path)
        known(f"{self._chosen['obs_table']} (obs_key=)", self._chosen["obs_key"], names)
        return [name for name in names if name != self._chosen["obs_key"]]

    def _joined(self, keys: pd.Series[Any], columns: Sequence[str]) -> pd.DataFrame:
        """Return columns of the table of cells, for the cells of the file."""
        path, key = self._chosen["obs_table"], self._chosen["obs_key"]
        table = _table(path, [key, *columns]).set_index(key)
        if not table.index.is_unique:
            raise InputError(f"{path} has {key} {table.index[table.index.duplicated()][0]!r} more than once")
        at = table.index.get_indexer(keys)
        if (at < 0).any():
            raise InputError(f"{path} has no {key} {keys[at < 0].iloc[0]!r}, which {self._path} has")
        return table.iloc[at].set_axis(keys.index)


class ParquetMatrix(RowsMatrix):
    """Expressions of the cells of a file; a fetch decodes each row group once."""

    layout: Layout = "csr"

    def __init__(
        self,
        file: LocalFile | RemoteFile,
        parquet: Any,
        genes: str,
        expressions: str,
        to: NDArray[np.int32],
        n_vars: int,
    ) -> None:
        self._file, self._names, self._to = file, (genes, expressions), to
        self._footer = parquet.metadata
        self.label = f"{file.path}:/{expressions}"
        groups = [self._footer.row_group(i) for i in range(self._footer.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self.shape = int(self._starts[-1]), n_vars
        types = [parquet.schema_arrow.field(name).type for name in self._names]
        dtypes = [np.dtype(getattr(one, "value_type", one).to_pandas_dtype()) for one in types]
        if (
            not all(type(one).__name__ in ("ListType", "LargeListType") for one in types)
            or dtypes[0].kind not in "iu"
            or dtypes[1].kind not in "iuf"
        ):
            raise InputError(
                f"{file.path}: {genes} and {expressions} must be lists of integers and of numbers, not {types[0]} and "
                f"{types[1]}"
            )
        self.stored_dtype = memory_dtype(dtypes[1])
        self.dtype = logical_dtype(dtypes[1])
        sizes = [_values_in(group, genes) for group in groups]
        self._mean = sum(sizes) / max(1, self.shape[0])
        self._largest = max(sizes, default=0)
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def __dask_tokenize__(self) -> object:
        return "parquet", self._file.identity, self._names, self.shape, self._to.tobytes()

    @property
    def cost(self) -> FetchCost:
        """Memory that a fetch takes: the rows twice while they are joined, and a row group, compressed and decoded."""
        size = 4 + self.stored_dtype.itemsize
        row = 32 + self._mean * size
        fixed = 2 * self._largest * (8 + self.stored_dtype.itemsize)
        n_groups = max(1, len(self._starts) - 1)
        return FetchCost(row=row, held=row, working=row, fixed=fixed, chunk_rows=self.shape[0] / n_groups)

    def _read(self, rows: NDArray[np.int64]) -> Block:
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        counts = np.empty(len(rows), dtype=np.int64)
        parts: list[tuple[NDArray[np.int32], NDArray[Any]]] = [(np.empty(0, np.int32), np.empty(0, self.stored_dtype))]
        for number in np.unique(numbers):
            here = slice(*np.searchsorted(numbers, [number, number + 1]))
            offsets, genes, values = self._group(int(number), rows[here] - self._starts[number])
            # The last entry of the table stands for all unknown tokens.
            columns = self._to[np.where((genes >= 0) & (genes < len(self._to)), genes, -1)]
            known = columns >= 0
            is_marker = np.zeros(len(genes), dtype=bool)
            is_marker[offsets[:-1][np.diff(offsets) > 0]] = True
            is_marker &= ~known & (values < 0)
            wrong = (~known | (values < 0)) & ~is_marker
            if wrong.any():
                place = int(np.argmax(wrong))
                row = rows[here][np.searchsorted(offsets, place, side="right") - 1]
                negative = f"the negative value {values[place]} of {self._names[0]}"
                raise CorruptDataError(
                    f"{self._file.path}: row {row} has {negative if known[place] else 'the unknown token'} "
                    f"{genes[place]}. Give the gene_table of this file, or write it again."
                )
            counts[here] = np.diff(np.append(0, np.cumsum(~is_marker))[offsets])
            parts.append((columns[~is_marker], values[~is_marker]))
        columns, kept = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return indptr_of(counts), columns, kept

    def _group(self, number: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        """Decode the lists of some rows of a row group: offsets, genes and expressions."""
        self._file.require_unchanged()
        where = f"{self._file.path}, row group {number} (rows from {self._starts[number]})"
        opened = getattr(self._local, "opened", None)
        if opened is None or opened[0] != os.getpid():
            self._local.opened = opened = os.getpid(), _opened(self._file, self._footer)
        try:
            table = opened[1].read_row_group(number, columns=list(self._names), use_threads=False)
        except OSError as error:
            raise CorruptDataError(f"{where} cannot be read: {error}. Copy or download it again.") from error
        columns = [table[name] for name in self._names]
        lists = [one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for one in columns]
        for name, one in zip(self._names, lists, strict=True):
            if one.null_count or one.values.null_count:
                raise CorruptDataError(
                    f"{where} has missing values in {name}. Write it again with empty lists instead."
                )
        lists = [one.take(rows) for one in lists]
        offsets, others = (one.offsets.to_numpy().astype(np.int64) for one in lists)
        if not np.array_equal(offsets, others):
            row = int(np.argmax(np.diff(offsets) != np.diff(others)))
            raise CorruptDataError(
                f"{where}: row {self._starts[number] + rows[row]} has lists of {offsets[row + 1] - offsets[row]} and "
                f"{others[row + 1] - others[row]} elements. Write it again with lists of equal lengths."
            )
        genes, values = (one.values.to_numpy() for one in lists)
        return offsets, genes.astype(np.int64, copy=False), values.astype(self.stored_dtype, copy=False)


def _opened(file: LocalFile | RemoteFile, footer: Any = None) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(f"{file.path} is read through pyarrow: pip install 'dasksc[parquet]'") from error
    return ParquetFile(BlockReader(file) if isinstance(file, RemoteFile) else file.path, metadata=footer)


def _values_in(group: Any, name: str) -> int:
    """Return the number of list elements in a column of a row group."""
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] == name)


def _identity(option: str, chosen: dict[str, Any]) -> FileIdentity:
    path = os.path.abspath(chosen[option])
    if not os.path.exists(path):
        raise MissingPathError(f"there is no {option} at {path}")
    return FileIdentity.of(path)


def _columns_of(path: str) -> list[str]:
    if path.endswith(".csv"):
        return list(pd.read_csv(path, nrows=0))
    from pyarrow.parquet import read_schema

    return list(read_schema(path).names)


def _table(path: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
    if path.endswith(".csv"):
        return pd.read_csv(path, usecols=columns)
    from pyarrow.parquet import read_table

    return _frame(read_table(path, columns=columns))


def _frame(table: Any) -> pd.DataFrame:
    """Return a table of Arrow as one of pandas, in which an index that pandas wrote is a column like any other."""
    written = (table.schema.pandas_metadata or {}).get("index_columns", ())
    names = [name for name in table.column_names if name in written]
    frame: pd.DataFrame = table.to_pandas()
    return frame.reset_index(names=names) if names else frame


@lru_cache(maxsize=4)  # the files of a folder share the table
def _genes(file: FileIdentity, token: str, name: str) -> tuple[pd.DataFrame, NDArray[np.int32]]:
    """Return var, and the column of each token (-1 for others, and at the end)."""
    table = _table(file.path)
    for option, column in (("token", token), ("gene_names", name)):
        known(f"{file.path} ({option}=)", column, list(table))
    tokens = table[token].to_numpy()
    if tokens.dtype.kind not in "iu" or len(np.unique(tokens)) < len(tokens):
        raise InputError(f"{file.path}: {token} must be integers without repeats or missing values")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < _MOST_TOKENS:
        raise InputError(f"{file.path}: {token} must lie in [0, {_MOST_TOKENS}); got {tokens.min()} to {tokens.max()}")
    tokens = tokens.astype(np.int64)
    to = np.full(int(tokens.max(initial=-1)) + 2, -1, dtype=np.int32)
    to[tokens] = np.arange(len(tokens))
    return table.set_index(table.pop(name).astype(str)), to

"""Sources of rows: matrices of an atlas, and collections that are indexed."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc import pushdown as lazy
from dasksc.atlas.elements import matrix_behind, require_key
from dasksc.atlas.expressions import columns_of, holds
from dasksc.atlas.inputs import quoted, reopenable, stem_of
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.atlas.opening import elements_of, is_several
from dasksc.atlas.opening import open as open_atlas
from dasksc.atlas.stored import AnnDataView
from dasksc.batches.batch import BatchMaker, Categories, is_obsm, tensor_dtype
from dasksc.checks import names_or_none
from dasksc.errors import InputError, WrongTypeError
from dasksc.loader.genes import GeneMatch
from dasksc.loader.spec import LoaderSpec
from dasksc.multiindexable import count_rows, take_rows
from dasksc.plan.binding import n_rows_from_indices
from dasksc.plan.labels import encode_column
from dasksc.readers.arrays import Lazy
from dasksc.readers.options import OpenOptions, naming_errors
from dasksc.storage import (
    Columns,
    FetchCost,
    Matrix,
    buffers,
    mapping,
    part_costs,
)
from dasksc.storage.dtypes import text_of

logger = logging.getLogger("dasksc.loader")

# Safety factor for fetches whose rows have more stored values than average, as weights may favor them.
LONGER_ROWS = 1.1
# Bytes per row in a plan: the row number and the position.
PLAN_ROW_BYTES = 16


class Source:
    """Collection of rows, which hooks receive and users inspect; `name` stands in logs and tasks."""

    def __init__(self, name: str, collection: Any, n_obs: int) -> None:
        self.name = name
        self.collection = collection
        self.n_obs = n_obs
        self.categories: dict[str, list[Any]] = Categories()
        self.gene_match: GeneMatch | dict[str, GeneMatch] | None = None

    @property
    def labels(self) -> list[str]:
        """Names in error messages: of the collection, or of each matrix."""
        return [self.name]

    @property
    def identity(self) -> dict[str, Any]:
        """Shape and stored data type of each matrix; empty for an indexed collection, which may change between runs."""
        return {}

    @property
    def yielded(self) -> Any:
        """Layout, data type and columns of batches, for comparison between ranks; None for an indexed collection."""
        return None

    def labels_of(self, key: str) -> Any:
        """Return a column of obs."""
        table = self._obs_for(f"the column {key!r}")
        if isinstance(self.collection, AnnDataView):
            return self.collection.column(key)
        return table[require_key("obs", key, table, of=self.collection)]

    def rows_where(self, expression: str) -> NDArray[np.bool_]:
        """Return a boolean mask of the rows for which an expression over obs holds."""
        table = self._obs_for(f"the filter {expression!r}")
        for name in columns_of(expression):
            self.labels_of(name)  # raises an error that names the atlas if the column is missing
        return holds(expression, table)

    def _obs_for(self, what: str) -> Any:
        is_view = isinstance(self.collection, AnnDataView)
        table = getattr(self.collection, "table" if is_view else "obs", None)
        if table is None:
            raise InputError(
                f"{what} needs obs, which this collection does not have. Give an AnnData, or the strategy labels= or "
                "indices="
            )
        return table


class MatrixSource(Source):
    """Matrices of an atlas, by names such as ``"layers/counts"``, whose rows a `BatchMaker` makes into tensors."""

    def __init__(
        self,
        spec: LoaderSpec,
        name: str,
        collection: Any,
        n_obs: int,
        arrays: Mapping[str, Any],
        columns: dict[str, Columns],
        gene_match: GeneMatch | dict[str, GeneMatch] | None,
        obs: Mapping[str, pd.Series[Any]] = MappingProxyType({}),
        modalities: tuple[str, ...] = (),
    ) -> None:
        super().__init__(name, collection, n_obs)
        self.gene_match = gene_match
        encoded: dict[str, NDArray[Any]] = {}
        for key, column in obs.items():
            given = (spec.categories or {}).get(key)
            known = column if given is None else _of_labels(column, given)
            encoded[key], labels = encode_column(known)
            if labels is not None:
                self.categories[key] = labels
        for key, array in arrays.items():
            if not isinstance(array, da.Array | Lazy):
                raise InputError(
                    f"{key} is a {type(array).__name__}, not a numeric matrix, so batches cannot contain it"
                )
        self.matrices: dict[str, Matrix] = {key: matrix_behind(array) for key, array in arrays.items()}
        self.maker = BatchMaker(
            obs=encoded,
            n_classes={key: len(labels) for key, labels in self.categories.items()},
            layout=spec.layout,
            dtype=spec.value_dtype,
            columns=columns,
            only_x=spec.only_x and not modalities,
            modalities=modalities,
        )

    @functools.cached_property
    def costs(self) -> tuple[dict[str, FetchCost], dict[str, FetchCost], frozenset[str]]:
        """Costs of a fetched row in each matrix, by label, if every file that can be mapped is mapped, or none."""
        # Files of the matrices in the third element are always mapped.

        def costs(is_mapped: bool, *, is_strict: bool = False) -> dict[str, FetchCost]:
            found: dict[str, FetchCost] = {}
            with mapping(is_mapped, is_strict=is_strict):
                for label, cost in (one for matrix in self.matrices.values() for one in part_costs(matrix)):
                    other = found.get(label)  # a file may be part of a collection several times
                    if other is not None:
                        cost = replace(cost, row=cost.row + other.row, held=cost.held + other.held)
                    found[label] = cost
            return found

        mapped = costs(True)
        forced = frozenset(name for name, cost in costs(False).items() if cost == mapped[name])
        return mapped, costs(False, is_strict=True), forced

    @functools.cached_property
    def recycling(self) -> buffers.Recycling:
        """Memory of an epoch, kept for reuse by the next one."""
        return buffers.Recycling()

    def expanded(self, spec: LoaderSpec) -> frozenset[str]:
        """Return the names of the matrices whose batches leave this process as CSR, and become dense on the device."""
        steps = () if spec.transforms is None else spec.transforms.steps
        # MPS has no CSR tensors.
        is_able = spec.device is not None and spec.device.type not in ("cpu", "mps")
        is_possible = is_able and spec.layout == "dense" and all(getattr(one, "_takes_csr", False) for one in steps)
        if spec.expand == "host" or (spec.expand == "auto" and not is_possible):
            return frozenset()
        sparse = {name: one for name, one in self.matrices.items() if one.layout == "csr" and not is_obsm(name)}
        if spec.expand == "auto":
            itemsizes = {name: self._dtype_of(one).itemsize for name, one in sparse.items()}
            return frozenset(name for name, one in sparse.items() if 2 * one.cost.row <= one.shape[1] * itemsizes[name])
        if not sparse:
            raise InputError(
                f"expand='device' needs a matrix that is stored as CSR, but {', '.join(self.labels)} is dense, and "
                "dense rows are copied as they are. Omit expand="
            )
        return frozenset(sparse)

    def _dtype_of(self, matrix: Matrix) -> np.dtype[Any]:
        return tensor_dtype(matrix.dtype) if self.maker.dtype is None else self.maker.dtype

    def batch_row_bytes(self, expanded: frozenset[str]) -> tuple[float, int]:
        """Return the memory that each row of a batch takes in this process, and in matrices expanded on the device."""
        row_bytes = PLAN_ROW_BYTES + 8.0 * len(self.maker.obs)
        expanded_bytes = 0
        for name, matrix in self.matrices.items():
            dtype = self._dtype_of(matrix)
            itemsize = dtype.itemsize
            columns = self.maker.columns.get(name)
            n_columns = matrix.shape[1] if columns is None else len(columns)
            if name in expanded:
                expanded_bytes += itemsize * n_columns
            if dtype.kind in "iu" and not np.can_cast(matrix.stored_dtype, dtype, "safe"):
                # Values are gathered in the stored type first, to be checked before conversion.
                itemsize += matrix.stored_dtype.itemsize
            # Values may be converted to a wider type, and column numbers from two bytes to four.
            is_dense = is_obsm(name) or (self.maker.layout == "dense" and name not in expanded)
            row_bytes += itemsize * n_columns if is_dense else 2 * LONGER_ROWS * matrix.cost.row
            if columns is not None and matrix.layout == "dense":
                if columns.sums is not None:  # the values to add, and their sums twice: in 64 bits, and converted
                    row_bytes += 8 * len(columns.sums.columns) + 16 * len(columns.sums.targets)
                if not is_dense and (columns.sums is not None or len(columns) > matrix.shape[1]):
                    row_bytes += 8 * len(columns)
        return row_bytes, expanded_bytes

    @property
    def labels(self) -> list[str]:
        return [matrix.label for matrix in self.matrices.values()]

    @property
    def identity(self) -> dict[str, Any]:
        return {name: [*matrix.shape, str(matrix.stored_dtype)] for name, matrix in self.matrices.items()}

    @property
    def yielded(self) -> Any:
        columns = {
            name: one.positions.tobytes() + (b"" if one.to is None else one.to.tobytes() + str(len(one)).encode())
            for name, one in self.maker.columns.items()
        }
        labels = {name: list(labels) for name, labels in self.categories.items()}
        return self.maker.layout, text_of(self.maker.dtype), columns, list(self.maker.obs), labels

    def __getstate__(self) -> dict[str, Any]:
        # Workers read matrices only, so tables of the atlas are not sent.
        state = self.__dict__ | {"collection": None}
        state.pop("recycling", None)
        return state


class IndexedSource(Source):
    """Collection that is indexed, or read through hooks; hooks are called one at a time."""

    def __init__(self, name: str, collection: Any, n_obs: int) -> None:
        super().__init__(name, collection, n_obs)
        # Held during calls of hooks and while the collection is indexed. Ctrl-C may leave a lock that is written in
        # Python, such as Dask's `SerializableLock`, locked.
        self.lock = threading.Lock()

    def read(self, spec: LoaderSpec, rows: NDArray[np.int64]) -> Any:
        """Read ascending rows and apply `fetch_transform`."""
        # Fetches of an AnnData or a Dask array run concurrently. Hooks are called, and other collections are indexed,
        # one at a time.
        ours = isinstance(self.collection, AnnDataView | lazy.MatrixRows)
        data = self.collection[rows] if ours and spec.fetch_callback is None else None
        with self.lock:
            if spec.fetch_callback is not None:
                data = spec.fetch_callback(self.collection, rows)
            elif not ours:
                data = take_rows(self.collection, rows)
            return data if spec.fetch_transform is None else spec.fetch_transform(data)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


def _of_labels(column: pd.Series[Any], labels: Sequence[Any]) -> pd.Series[Any]:
    """Return a column with some labels as its categories; other labels are missing there, and are logged."""
    try:
        dtype = pd.CategoricalDtype(list(labels))
        known = pd.Categorical.from_codes(dtype.categories.get_indexer(column), dtype=dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"categories[{column.name!r}]={labels!r:.100} are not distinct labels: {error}") from error
    others = column[known.codes < 0].dropna()
    if len(others):
        shown = ", ".join(map(repr, others.unique()[:10]))
        logger.warning(
            "%d cells have a %s that categories= lacks, and get the code -1: %s", len(others), column.name, shown
        )
    return pd.Series(known, index=column.index, name=column.name)


def source_of(data: Any, spec: LoaderSpec) -> MatrixSource | IndexedSource:
    """Return the source for the first argument of `scDataset`; open it if it is a path."""
    if isinstance(data, MatrixSource | IndexedSource):
        return data
    if isinstance(data, list | tuple | Mapping) and not data and not spec.has_hooks:
        raise InputError(f"{data!r} contains no atlas; give at least one path or AnnData")
    if is_modalities(data):
        return _of_modalities(data, spec)
    if isinstance(data, str | os.PathLike | AnnData) or is_several(data):
        return _of_atlas(data, spec)
    is_array = isinstance(data, da.Array) and data.ndim == 2
    if is_array and np.isnan(data.shape).any():
        raise InputError("the number of rows of the Dask array is unknown; call its method compute_chunk_sizes() first")
    if is_array and spec.has_hooks:
        return IndexedSource("data", lazy.MatrixRows(matrix=lazy.matrix_of(data)), int(data.shape[0]))
    if not is_array:
        spec.refuse_matrix_options(
            f"the data must be an AnnData or a two-dimensional Dask array; got {type(data).__name__}"
        )
        return IndexedSource("data", data, _count(data, spec))
    if spec.obs or spec.layers or spec.obsm:
        raise InputError("obs=, layers= and obsm= need an AnnData; a Dask array has no such elements")
    columns, match = spec.gene_request.columns_of(None, data.shape[1])
    kept = {} if columns is None else {"X": columns}
    return MatrixSource(spec, "data", data, int(data.shape[0]), {"X": data}, kept, match)


def _count(data: Any, spec: LoaderSpec) -> int:
    try:
        return count_rows(data)
    except TypeError as error:
        # Only the callback reads the collection, so the indices of the strategy determine the number of rows.
        n_obs = None if spec.fetch_callback is None else n_rows_from_indices(spec.strategy)
        if n_obs is None:
            raise WrongTypeError(
                f"an object of type {type(data).__name__} has no len(), so its rows cannot be sampled. Give a path, an "
                "AnnData or a collection that can be indexed, or fetch_callback= with indices= of the strategy"
            ) from error
        return n_obs


def _of_atlas(data: Any, spec: LoaderSpec) -> MatrixSource | IndexedSource:
    """Return the source of one atlas, or of several that are joined."""
    names: pd.Index[Any] | None = None
    wanted: list[str] | None = None
    if isinstance(data, AnnData):
        name = "data" if data.filename is None else Path(data.filename).stem
        names = data.obs_names
    else:
        data = reopenable(data)
        name = stem_of(data) if isinstance(data, str | os.PathLike) else f"{len(data)} atlases"
        wanted = [*spec.obs, *names_or_none("obs_columns", getattr(spec.strategy, "obs_columns", None))]
        wanted += [column for one in (spec.filter, spec.control) if one is not None for column in columns_of(one)]
    # Hooks receive everything. Without hooks, only what batches need is read; cell names are read when obs is accessed.
    if spec.has_hooks:
        found = elements_of(data, None, OpenOptions(mmap=spec.mmap))
        with naming_errors(quoted(data)):
            return IndexedSource(name, AnnDataView(found.to_anndata(), None, found.path, names), found.n_obs)
    found = elements_of(data, wanted, OpenOptions(mmap=spec.mmap, has_names=False), extent="batches")
    if found.X is None:
        raise InputError(
            f"{name} has no X, which every batch needs. Set it from a layer: adata.X = adata.layers['counts']"
        )
    opening = functools.partial(open_atlas, data, mmap=spec.mmap)
    return _of_parts(spec, name, AnnDataView(found, opening, found.path, names), {"": found}, found)


def _of_modalities(data: Any, spec: LoaderSpec) -> MatrixSource:
    """Return the source of several modalities, whose matrices share row numbers."""
    name, genes = "data", spec.genes
    if spec.has_hooks:
        raise InputError("hooks cannot be used with several modalities; give scDataset one of them: data['rna']")
    if not isinstance(data, Modalities):
        if isinstance(data, str | os.PathLike):
            name = stem_of(data)
        data = Modalities(data, mmap=spec.mmap)
    for modality, part in data.mod.items():
        # It may have been replaced, or changed in place. The names of modalities may have different data types.
        if not part.obs_names.astype(object).equals(data.obs_names.astype(object)):
            raise InputError(
                f"the rows of modality {modality!r} are no longer the cells of the others, in their order. Align them "
                "again: dasksc.Modalities(dict(modalities.mod))"
            )
    if genes is not None and not isinstance(genes, Mapping):
        raise InputError(f"genes= of several modalities must be a dict, such as {{{next(iter(data))!r}: [...]}}")
    for modality in genes or {}:
        require_key("modalities", modality, data.mod)
    for group in ("layers", "obsm"):
        for key in getattr(spec, group):
            modality, colon, _ = key.partition(":")
            if not colon or modality not in data.mod:
                raise InputError(f"{group}={key!r} must name the modality, as in '{next(iter(data.mod))}:{key}'")
    return _of_parts(spec, name, data, data.mod, data)


def _of_parts(spec: LoaderSpec, name: str, collection: Any, parts: Mapping[str, Any], atlas: Any) -> MatrixSource:
    """Return the source of modalities by name, or of a single atlas without a name; `atlas` has their common obs."""
    arrays: dict[str, Any] = {}
    columns: dict[str, Columns] = {}
    matches: dict[str, GeneMatch] = {}
    modalities = tuple(filter(None, parts))
    for modality, part in parts.items():
        prefix, of = (f"{modality}:", f" of {modality}") if modality else ("", "")
        own = {f"{prefix}X": part.X}
        for group in ("layers", "obsm"):
            held = getattr(part, group)
            for key in (key.removeprefix(prefix) for key in getattr(spec, group) if key.startswith(prefix)):
                own[f"{prefix}{group}/{key}"] = held[require_key(f"{group}{of}", key, held, of=part)]
        arrays |= own
        request = spec.gene_request.of(modality) if modality else spec.gene_request
        kept, match = request.columns_of(part.var, part.n_vars, of=part)
        if kept is not None:
            columns |= {key: kept for key in own if not is_obsm(key)}
        if match is not None:
            matches[modality] = match
        if spec.transforms is not None and not modality:
            genes = part.var.index if kept is None else part.var.index[kept.positions] if match is None else match.names
            spec.transforms.check_columns(list(map(str, genes)))
    obs = {key: atlas.obs[require_key("obs", key, atlas.obs, of=atlas)] for key in spec.obs}
    found = matches if modalities else matches.get("")
    return MatrixSource(
        spec, name, collection, int(atlas.n_obs), arrays, columns, found or None, obs, modalities=modalities
    )

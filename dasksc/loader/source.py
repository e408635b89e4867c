"""Sources of rows: matrices of an atlas, and collections that are indexed."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc import pushdown as lazy
from dasksc.atlas import filtering
from dasksc.atlas.encoding import encode_column
from dasksc.atlas.inputs import stem_of
from dasksc.atlas.lookup import require_key
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.atlas.opening import is_several, several_of
from dasksc.atlas.opening import open as open_atlas
from dasksc.atlas.view import AnnDataView
from dasksc.batches.batch import BatchMaker, Categories, torch_dtype
from dasksc.errors import InputError, WrongTypeError
from dasksc.loader.genes import GeneMatch
from dasksc.loader.request import BatchRequest
from dasksc.memory.model import LONGER_ROWS, PLAN_ROW_BYTES
from dasksc.multiindexable import count_rows, take_rows
from dasksc.plan.binding import n_rows_from_indices
from dasksc.plan.strategies import SamplingStrategy
from dasksc.storage import (
    Columns,
    ConcatenatedMatrix,
    FetchCost,
    Matrix,
    ReorderedMatrix,
    UseMmap,
    buffers,
    mapping,
    part_costs,
)

__all__ = ["Hooks", "IndexedSource", "MatrixSource", "Source", "source_of"]

logger = logging.getLogger("dasksc.dataset")


class Source:
    """Collection of rows.

    Parameters
    ----------
    name
        Name in logs and tasks.
    collection
        Collection that hooks receive and users inspect.
    n_obs
        Number of rows.
    """

    def __init__(self, name: str, collection: Any, n_obs: int) -> None:
        self.name = name
        self.collection = collection
        self.n_obs = n_obs

    def labels_of(self, key: str) -> Any:
        """Return a column of obs.

        Raises
        ------
        InputError
            If there is no obs, or it has no such column.
        """
        table = self._table()
        if table is None:
            raise InputError(
                f"{key!r} names an obs column, but this collection has no obs. Give an AnnData, or labels= if the "
                "strategy accepts it"
            )
        if isinstance(self.collection, AnnDataView):
            return self.collection.column(key)
        return table[require_key("obs", key, table, of=self.collection)]

    def rows_where(self, expression: str) -> NDArray[np.bool_]:
        """Return a boolean mask of the rows for which an expression over obs holds."""
        table = self._table()
        if table is None:
            raise InputError(
                f"filter={expression!r} needs obs, which this collection does not have; give indices= to the strategy "
                "instead"
            )
        for name in filtering.columns_of(expression):
            self.labels_of(name)  # raises an error that names the atlas if the column is missing
        return filtering.holds(expression, table)

    def _table(self) -> Any:
        is_view = isinstance(self.collection, AnnDataView)
        return getattr(self.collection, "table" if is_view else "obs", None)


class MatrixSource(Source):
    """Matrices of an atlas whose rows become tensors.

    Parameters
    ----------
    name, collection, n_obs
        See `Source`.
    matrices
        Matrices by name: ``"X"``, ``"layers/counts"``.
    maker
        Object that gathers batches from fetched rows.
    categories
        Labels of encoded obs columns.
    gene_match
        Match of gene names; for several modalities, a dict by modality. None if no names were given.
    """

    def __init__(
        self,
        name: str,
        collection: Any,
        n_obs: int,
        *,
        matrices: dict[str, Matrix],
        maker: BatchMaker,
        categories: dict[str, list[Any]],
        gene_match: GeneMatch | dict[str, GeneMatch] | None = None,
    ) -> None:
        super().__init__(name, collection, n_obs)
        self.gene_match = gene_match
        self.matrices = matrices
        self.maker = maker
        self.categories = categories
        for key, matrix in matrices.items():
            columns = maker.columns.get(key)
            n_missing = matrix.n_missing(columns) if isinstance(matrix, ConcatenatedMatrix | ReorderedMatrix) else 0
            if n_missing:
                logger.warning(
                    "batches have NaN in %d of %d columns of %s, for cells of atlases without these columns. For "
                    "zeros instead, open the atlases with dasksc.open(..., join='outer', fill_value=0)",
                    *(n_missing, matrix.shape[1] if columns is None else len(columns), matrix.label),
                )

    @functools.cached_property
    def costs(self) -> dict[str, Any]:
        """Arguments `mapped`, `read` and `forced` of a `MemoryModel`."""

        def costs() -> dict[str, FetchCost]:
            found: dict[str, FetchCost] = {}
            for matrix in self.matrices.values():
                for label, cost in part_costs(matrix):
                    other = found.get(label)  # a file may be part of a collection several times
                    if other is not None:
                        cost = replace(cost, row=cost.row + other.row, held=cost.held + other.held)
                    found[label] = cost
            return found

        with mapping(True):
            mapped = costs()
        with mapping(False):
            forced = frozenset(name for name, cost in costs().items() if cost == mapped[name])
        with mapping(False, is_strict=True):
            return {"mapped": mapped, "read": costs(), "forced": forced}

    @functools.cached_property
    def recycling(self) -> buffers.Recycling:
        """Memory of an epoch, kept for reuse by the next one."""
        return buffers.Recycling()

    @property
    def batch_row_bytes(self) -> float:
        """Memory that each row of a batch takes, in bytes."""
        row_bytes = PLAN_ROW_BYTES + 8.0 * len(self.maker.obs)
        for name, matrix in self.matrices.items():
            dtype = matrix.dtype if self.maker.dtype is None else self.maker.dtype
            itemsize = int(torch_dtype(dtype).itemsize)
            if dtype.kind in "iu" and not np.can_cast(matrix.stored_dtype, dtype, "safe"):
                # Values are gathered in the stored type first, to be checked before conversion.
                itemsize += matrix.stored_dtype.itemsize
            columns = self.maker.columns.get(name)
            dense = itemsize * (matrix.shape[1] if columns is None else len(columns))
            # Values may be converted to a wider type, and column numbers from two bytes to four.
            is_dense = _is_obsm(name) or self.maker.layout == "dense"
            row_bytes += dense if is_dense else 2 * LONGER_ROWS * matrix.cost.row
            if columns is not None and matrix.layout == "dense":
                if columns.sums is not None:  # the values to add, and their sums twice: in 64 bits, and converted
                    row_bytes += 8 * len(columns.sums.columns) + 16 * len(columns.sums.targets)
                if not is_dense and (columns.sums is not None or len(columns) > matrix.shape[1]):
                    row_bytes += 8 * len(columns)
        return row_bytes

    @property
    def labels(self) -> list[str]:
        """Names of the matrices in error messages."""
        return [matrix.label for matrix in self.matrices.values()]

    @property
    def identity(self) -> dict[str, Any]:
        """Shape and stored data type of each matrix."""
        return {name: [*matrix.shape, str(matrix.stored_dtype)] for name, matrix in self.matrices.items()}

    @property
    def yielded(self) -> Any:
        """Layout, data type and columns of batches, for comparison between ranks."""
        columns = {
            name: one.positions.tobytes() + (b"" if one.to is None else one.to.tobytes() + str(len(one)).encode())
            for name, one in self.maker.columns.items()
        }
        return self.maker.layout, str(self.maker.dtype), columns

    def __getstate__(self) -> dict[str, Any]:
        # Workers read matrices only, so tables of the atlas are not sent.
        state = self.__dict__ | {"collection": None}
        state.pop("recycling", None)
        return state


@dataclass(frozen=True)
class Hooks:
    """Functions given to `scDataset` that replace indexing or follow it."""

    fetch_callback: Callable[[Any, Any], Any] | None = None
    fetch_transform: Callable[[Any], Any] | None = None
    batch_callback: Callable[[Any, Any], Any] | None = None
    batch_transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, hook in vars(self).items():
            if hook is not None and not callable(hook):
                raise WrongTypeError(f"{name} must be callable; got {hook!r}")
            if hasattr(hook, "at_epoch"):
                raise WrongTypeError(f"{name}={hook!r} is a transform of batches; give it as transform=")

    def __bool__(self) -> bool:
        return any(vars(self).values())


class IndexedSource(Source):
    """Collection that is indexed, or read through hooks; hooks are called one at a time.

    Parameters
    ----------
    name, collection, n_obs
        See `Source`.
    """

    def __init__(self, name: str, collection: Any, n_obs: int) -> None:
        super().__init__(name, collection, n_obs)
        self.categories: dict[str, list[Any]] = Categories()
        # Held during calls of hooks and while the collection is indexed.
        self.lock = threading.Lock()

    @property
    def labels(self) -> list[str]:
        """Names of the collection in error messages."""
        return [self.name]

    @property
    def identity(self) -> dict[str, Any]:
        """Empty dict: users may freely change an indexed collection between runs, so no properties are compared."""
        return {}

    @property
    def yielded(self) -> None:
        """None, since ranks have nothing to compare."""
        return

    def read(self, hooks: Hooks, rows: NDArray[np.int64]) -> Any:
        """Read ascending rows and apply `fetch_transform`."""
        # Fetches of an AnnData or a Dask array run concurrently. Hooks are called, and other collections are indexed,
        # one at a time.
        ours = isinstance(self.collection, AnnDataView | lazy.MatrixRows)
        data = None
        if hooks.fetch_callback is None and ours:
            data = self.collection[rows]
        with self.lock:
            if hooks.fetch_callback is not None:
                data = hooks.fetch_callback(self.collection, rows)
            elif not ours:
                data = take_rows(self.collection, rows)
            return data if hooks.fetch_transform is None else hooks.fetch_transform(data)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.Lock()


def source_of(
    data: Any,
    request: BatchRequest,
    hooks: Hooks,
    *,
    strategy: SamplingStrategy,
    filtered_by: Sequence[str],
    mmap: UseMmap,
) -> MatrixSource | IndexedSource:
    """Return the source for `data`; open it if it is a path.

    Parameters
    ----------
    data
        Data collection of `scDataset`.
    request
        Content of batches.
    hooks
        Functions that replace indexing or follow it.
    strategy
        Strategy. Its labels may be an obs column. If the collection has no length, only a `fetch_callback` can read it,
        and the indices of the strategy determine the number of rows.
    filtered_by
        Columns of obs that a filter uses.
    mmap
        Setting for memory-mapping files.

    Raises
    ------
    InputError
        If the arguments do not fit the collection or each other.
    """
    if isinstance(data, list | tuple | Mapping) and not data and not hooks:
        raise InputError(f"{data!r} contains no atlas; give at least one path or AnnData")
    if is_modalities(data):
        return _of_modalities(data, request, hooks, mmap)
    name = "data"
    with_names: Callable[[], AnnData] | None = None
    opening: Callable[..., AnnData] | None = None
    path: str | None = None
    names: pd.Index[Any] | None = None
    if isinstance(data, str | os.PathLike) or is_several(data):
        name = stem_of(data) if isinstance(data, str | os.PathLike) else f"{len(data)} atlases"
        if isinstance(data, str | os.PathLike) and several_of(data) is None:
            path = os.fspath(data)
        wanted = [*request.obs, *filtered_by, *getattr(strategy, "obs_columns", ())]
        # Hooks receive every column. Without hooks, only requested columns are read; cell names are read when obs is
        # accessed.
        if hooks:
            data = open_atlas(data, mmap=mmap)
        else:
            opening = functools.partial(open_atlas, data, mmap=mmap)
            with_names = functools.partial(opening, obs=wanted)
            data = with_names(names=False)
    elif isinstance(data, AnnData):
        if data.filename is not None:
            name = Path(data.filename).stem
        with_names = None if hooks else functools.partial(open_atlas, data, mmap=mmap)
        names = data.obs_names
        data = open_atlas(data, mmap=mmap, names=bool(hooks))
    is_ours = isinstance(data, AnnData) or (isinstance(data, da.Array) and data.ndim == 2)
    if hooks or not is_ours:
        why = (
            "hooks determine what the data set yields; add the equivalent code to the hooks"
            if hooks
            else "the data must be an AnnData or a two-dimensional Dask array (obs=, layers= and obsm= need an "
            f"AnnData); got {type(data).__name__}"
        )
        request.refuse_matrix_options(why)
    if isinstance(data, AnnData):
        collection: Any = AnnDataView(data, with_names, opening, path, names)
        if hooks:
            return IndexedSource(name, collection, int(data.n_obs))
        if data.X is None:
            raise InputError(
                f"{name} has no X, which every batch needs. Set it from a layer: adata.X = adata.layers['counts']"
            )
        return _of_atlas(name, collection, data, request)
    if not is_ours:
        return IndexedSource(name, data, _count(data, hooks, strategy))
    if hooks:
        rows = lazy.MatrixRows(matrix=lazy.matrix_of(data))
        return IndexedSource(name, rows, int(data.shape[0]))
    if request.obs or request.layers or request.obsm:
        raise InputError("obs=, layers= and obsm= need an AnnData; a Dask array has no such elements")
    columns, match = request.genes.columns_of(None, data.shape[1])
    maker = _maker(request, {}, Categories(), _for_each(columns, ["X"]))
    matrices = _matrices({"X": data})
    return MatrixSource(
        *(name, data, int(data.shape[0])), matrices=matrices, maker=maker, categories=Categories(), gene_match=match
    )


def _count(data: Any, hooks: Hooks, strategy: SamplingStrategy) -> int:
    try:
        return count_rows(data)
    except TypeError as error:
        # Only the callback reads the collection, so the indices of the strategy determine the number of rows.
        n_obs = None if hooks.fetch_callback is None else n_rows_from_indices(strategy)
        if n_obs is None:
            given = f"an object of type {type(data).__name__}"
            raise WrongTypeError(
                f"{'None' if data is None else given} has no len(), so its rows cannot be sampled. Give a path, an "
                "AnnData, an array or another collection that can be indexed by row numbers; or give fetch_callback= "
                "together with indices= of the strategy"
            ) from error
        return n_obs


def _of_atlas(name: str, collection: Any, adata: AnnData, request: BatchRequest) -> MatrixSource:
    arrays = {"X": adata.X}
    for group in ("layers", "obsm"):
        held = getattr(adata, group)
        arrays |= {f"{group}/{key}": held[require_key(group, key, held, of=adata)] for key in getattr(request, group)}
    columns, match = request.genes.columns_of(adata.var, adata.n_vars, of=adata)
    encoded, categories = _encoded(adata.obs, request.obs, of=adata)
    matrices = _matrices(arrays)
    maker = _maker(request, encoded, categories, _for_each(columns, arrays))
    return MatrixSource(
        *(name, collection, int(adata.n_obs)),
        matrices=matrices,
        maker=maker,
        categories=categories,
        gene_match=match,
    )


def _of_modalities(data: Any, request: BatchRequest, hooks: Hooks, mmap: UseMmap) -> MatrixSource:
    """Return the source of several modalities, whose matrices share row numbers."""
    name, genes = "data", request.genes.genes
    if hooks:
        raise InputError("hooks cannot be used with several modalities; give scDataset one of them: data['rna']")
    if not isinstance(data, Modalities):
        if isinstance(data, str | os.PathLike):
            name = stem_of(data)
        data = Modalities(data, mmap=mmap)
    if genes is not None and not isinstance(genes, Mapping):
        raise InputError(f"genes= of several modalities must be a dict, such as {{{next(iter(data))!r}: [...]}}")
    for modality in genes or {}:
        require_key("modalities", modality, data.mod)
    arrays: dict[str, Any] = {}
    columns: dict[str, Columns] = {}
    matches: dict[str, GeneMatch] = {}
    for modality, adata in data.mod.items():
        own = {f"{modality}:X": adata.X}
        for group in ("layers", "obsm"):
            for key in getattr(request, group):
                of, colon, rest = key.partition(":")
                if not colon or of not in data.mod:
                    raise InputError(f"{group}={key!r} must name the modality, as in '{modality}:{key}'")
                if of == modality:
                    held = getattr(adata, group)
                    own[f"{modality}:{group}/{rest}"] = held[require_key(f"{group} of {of}", rest, held)]
        arrays |= own
        kept, match = request.genes.of(modality).columns_of(adata.var, adata.n_vars)
        columns |= _for_each(kept, own)
        if match is not None:
            matches[modality] = match
    encoded, categories = _encoded(data.obs, request.obs)
    matrices = _matrices(arrays)
    maker = _maker(request, encoded, categories, columns, modalities=tuple(data.mod))
    return MatrixSource(
        *(name, data, data.n_obs), matrices=matrices, maker=maker, categories=categories, gene_match=matches or None
    )


def _maker(
    request: BatchRequest,
    encoded: dict[str, NDArray[Any]],
    categories: Mapping[str, Any],
    columns: dict[str, Columns],
    modalities: tuple[str, ...] = (),
) -> BatchMaker:
    return BatchMaker(
        obs=encoded,
        n_classes={name: len(labels) for name, labels in categories.items()},
        layout=request.layout,
        dtype=request.value_dtype,
        columns=columns,
        only_x=request.only_x and not modalities,
        pinned=request.pin_memory,
        modalities=modalities,
    )


def _encoded(
    obs: Any, names: Sequence[str], *, of: AnnData | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, list[Any]]]:
    """Return obs columns as numbers, with codes in the smallest data type, and the labels of the codes."""
    encoded: dict[str, NDArray[Any]] = {}
    categories: dict[str, list[Any]] = Categories()
    for name in names:
        column = obs[require_key("obs", name, obs, of=of)]
        encoded[name], labels = encode_column(column, narrow=True)
        if labels is not None:
            categories[name] = labels
    return encoded, categories


def _matrices(arrays: Mapping[str, Any]) -> dict[str, Matrix]:
    for name, array in arrays.items():
        if not isinstance(array, da.Array):
            raise InputError(f"{name} is a {type(array).__name__}, not a numeric matrix, so batches cannot contain it")
    return {name: lazy.matrix_of(array) for name, array in arrays.items()}


def _for_each(columns: Columns | None, keys: Iterable[str]) -> dict[str, Columns]:
    """Return a dict that maps each key, except keys of obsm matrices, to `columns`; empty if `columns` is None."""
    return {} if columns is None else {key: columns for key in keys if not _is_obsm(key)}


def _is_obsm(key: str) -> bool:
    """Return True for a matrix of obsm: ``"obsm/X_pca"``, or ``"rna:obsm/X_pca"`` for several modalities."""
    group, slash, _ = key.partition("/")
    return bool(slash) and group.endswith("obsm")

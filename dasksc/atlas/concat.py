"""Concatenation of opened atlases: tables by AnnData, matrices without reading them."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any, Literal

import anndata
import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc._compat.anndata import unified_dtypes
from dasksc.atlas.lookup import some
from dasksc.errors import InputError
from dasksc.pushdown import chunk_rows_for, matrix_of, to_dask
from dasksc.readers.names import is_nameless, nameless_index
from dasksc.storage import AbsentMatrix, ColumnMaps, ConcatenatedMatrix, Layout, Matrix

__all__ = ["MERGES", "Join", "check_fill_value", "concatenated", "collecting_dropped"]

logger = logging.getLogger("dasksc.concat")

Join = Literal["inner", "outer"]
MERGES = ("same", "unique", "first", "only")
"""Values of ``merge`` in `anndata.concat`, for annotations of genes."""

_dropped: ContextVar[list[str] | None] = ContextVar("dropped", default=None)


def check_fill_value(fill_value: Any, join: str) -> None:
    """Raise an error for a fill value that is not a number, or has no effect."""
    if fill_value is None:
        return
    if not isinstance(fill_value, Real | np.number | np.bool_):
        raise InputError(f"fill_value={fill_value!r} must be a number, such as 0")
    if join != "outer":
        raise InputError(
            f"fill_value={fill_value!r} fills in variables that an atlas lacks, but join='inner' keeps only common "
            "variables. Give join='outer', or leave fill_value out"
        )


@contextmanager
def collecting_dropped() -> Iterator[list[str]]:
    """Collect the paths of the elements that concatenation leaves out, such as ``raw`` or ``layers/counts``."""
    dropped: list[str] = []
    token = _dropped.set(dropped)
    try:
        yield dropped
    finally:
        _dropped.reset(token)


def concatenated(
    adatas: Sequence[AnnData], names: Sequence[str], *, join: Join, fill_value: float | None = None, **options: Any
) -> AnnData:
    """Concatenate AnnData objects of Dask arrays along obs, without reading their matrices."""
    without = [name for name, adata in zip(names, adatas, strict=True) if adata.X is None]
    if without and len(without) < len(adatas):
        raise InputError(
            f"there is no X in {', '.join(without[:5])}, but other atlases have one. Leave out the atlases "
            "without X, or set it from a layer: adata.X = adata.layers['counts']"
        )
    for name, adata in zip(names, adatas, strict=True):
        if not adata.var_names.is_unique:
            repeated = adata.var_names[adata.var_names.duplicated()].unique()[:3].tolist()
            raise InputError(
                f"variables of {name} repeat ({repeated}), so they cannot be matched with other atlases. Make them "
                "unique: adata.var_names_make_unique()"
            )
    for column in dict.fromkeys(column for adata in adatas for column in adata.obs):
        parts = {name: adata.obs[column] for name, adata in zip(names, adatas, strict=True) if column in adata.obs}
        _warn_of_labels(column, parts)
    result = _tables(adatas, join=join, fill_value=fill_value, **options)
    if not result.n_vars:
        _refuse_no_common_variable(adatas, names)
    sizes = [adata.n_obs for adata in adatas]
    maps = _maps([adata.var_names for adata in adatas], result.var_names, fill_value)

    def stacked(arrays: Sequence[da.Array | None], label: str, maps: ColumnMaps | None) -> Matrix:
        layout: Layout = (
            "csr" if any(array is not None and matrix_of(array).layout == "csr" for array in arrays) else "dense"
        )
        # Data type for atlases that lack the matrix: with a fill value, the common type of the other atlases; otherwise
        # float64, which supports NaN.
        types = [array.dtype for array in arrays if array is not None] if fill_value is not None else [np.float64]
        absent = np.result_type(*types)
        parts = [
            AbsentMatrix(n, layout, absent) if array is None else matrix_of(array)
            for array, n in zip(arrays, sizes, strict=True)
        ]
        joined = ConcatenatedMatrix(label=f"{label} of {len(names)} atlases", parts=parts, maps=maps)
        if layout == "csr" and fill_value and maps is not None and maps.n_filled():
            raise InputError(
                f"{label} is sparse, so missing variables are 0; fill_value={fill_value} would make it dense. Give "
                "fill_value=0, or leave it out"
            )
        _warn_of_types(parts, joined, names, label)
        if joined.n_missing():
            logger.warning(
                "%s, joined from %d atlases, has NaN in %d of %d columns, for cells of atlases without these columns. "
                "Give fill_value=0 for zeros, or join='inner' for the columns common to all",
                *(label, len(names), joined.n_missing(), joined.shape[1]),
            )
        return joined

    aligned = {} if without else {"X": stacked([adata.X for adata in adatas], "X", maps)}
    for name, arrays in _joined([_layers(adata) for adata in adatas], names, "layers", join).items():
        of_layer = maps
        if any(array is None for array in arrays):
            held = [adata.var_names if array is not None else None for adata, array in zip(adatas, arrays, strict=True)]
            of_layer = _maps(held, result.var_names, fill_value)
        aligned[name] = stacked(arrays, f"layers/{name}", of_layer)
    rows = chunk_rows_for(*aligned.values()) if aligned else None
    for name, matrix in aligned.items():
        array = to_dask(matrix, chunk_rows=rows)
        if name == "X":
            result.X = array
        else:
            result.layers[name] = array
    for name, arrays in _joined([adata.obsm for adata in adatas], names, "obsm", join).items():
        widths = [0 if array is None else array.shape[1] for array in arrays]
        result.obsm[name] = to_dask(stacked(arrays, f"obsm/{name}", _widths(widths, fill_value, join=join)))
    result.raw = _joined_raw(adatas, names, join=join, fill_value=fill_value, **{**options, "merge": None})
    dropped = _dropped.get()
    if dropped is not None:
        kept = _element_paths(result)
        dropped += dict.fromkeys(key for adata in adatas for key in _element_paths(adata) if key not in kept)
    return result


def _warn_of_labels(column: str, columns: Mapping[str, pd.Series[Any]]) -> None:
    """Warn of categories that lose their order, or that differ only by white space around them."""
    dtypes = {name: one.dtype for name, one in columns.items() if isinstance(one.dtype, pd.CategoricalDtype)}
    ordered = [name for name, dtype in dtypes.items() if dtype.ordered]
    if ordered and (len(set(dtypes.values())) > 1 or len(dtypes) < len(columns)):
        warnings.warn(
            f"obs column {column!r} is ordered in {ordered[0]!r}, but other atlases have other categories or another "
            "order. The joined column has no order, so a filter with < or > compares text. Use the same ordered "
            "categories in all atlases",
            stacklevel=2,
        )
    distinct = {label for dtype in dtypes.values() for label in dtype.categories if isinstance(label, str)}
    by_text: dict[str, str] = {}
    alike = next((label for label in sorted(distinct) if by_text.setdefault(label.strip(), label) != label), None)
    if alike is not None:
        warnings.warn(
            f"obs column {column!r} has the labels {by_text[alike.strip()]!r} and {alike!r}, which differ only in the "
            "white space around them and are two classes. Remove it with .str.strip() before the atlases are opened",
            stacklevel=2,
        )


def _refuse_no_common_variable(adatas: Sequence[AnnData], names: Sequence[str]) -> None:
    """Raise an error for atlases without common variables, with example names from two of them."""
    first = next((i for i, adata in enumerate(adatas) if adata.n_vars), None)
    if first is None:
        return  # tables of cells only
    # Prefer an atlas that shares no name with the first; it probably has names of another kind.
    own = adatas[first].var_names
    other = min(range(len(adatas)), key=lambda i: len(own.intersection(adatas[i].var_names)))
    found = [f"{names[i]!r} has {some(adatas[i].var_names) or 'none at all'}" for i in (first, other)]
    raise InputError(
        f"{len(adatas)} atlases have no variable in common, so join='inner' leaves no column: {', and '.join(found)}. "
        "Use the same kind of names in all atlases, such as Ensembl IDs (adata.var_names = adata.var['gene_ids']), or "
        "give join='outer' to keep the variables of each"
    )


def _joined_raw(adatas: Sequence[AnnData], names: Sequence[str], *, join: Join, **options: Any) -> AnnData | None:
    """Join raw of all atlases; None, with a log message, if some lack it or its genes cannot be matched."""
    raws = [adata.raw for adata in adatas]
    if all(raw is None for raw in raws):
        return None
    without = [name for name, raw in zip(names, raws, strict=True) if raw is None]
    if without:
        _log_dropped("raw", without)
        return None
    repeating = [name for name, raw in zip(names, raws, strict=True) if not raw.var_names.is_unique]
    if repeating:
        logger.warning("raw is left out: its variables repeat in %s", ", ".join(repeating[:3]))
        return None
    if join == "inner" and not functools.reduce(lambda a, b: a.intersection(b), (raw.var_names for raw in raws)).size:
        logger.warning("raw is left out: no variable is common to %s", ", ".join(names[:3]))
        return None
    of_raw = [
        AnnData(X=raw.X, obs=pd.DataFrame(index=adata.obs_names), var=raw.var, varm=dict(raw.varm))
        for adata, raw in zip(adatas, raws, strict=True)
    ]
    with collecting_dropped():  # only a missing raw is recorded, not its parts
        return concatenated(of_raw, [f"raw of {name}" for name in names], join=join, **options)


def _element_paths(adata: AnnData) -> dict[str, None]:
    """Return the paths of the elements of an AnnData other than X, in order."""
    groups = {name: getattr(adata, name) for name in ("obs", "var", "obsm", "obsp", "varm", "varp", "uns")}
    groups["layers"] = _layers(adata)
    held = dict.fromkeys(f"{name}/{key}" for name, group in groups.items() for key in group)
    return held if adata.raw is None else held | {"raw": None}


def _tables(adatas: Sequence[AnnData], **options: Any) -> AnnData:
    """Concatenate everything except matrices with `anndata.concat`."""
    tables = _tables_of_obsm(adatas)
    obs = None if tables else _nameless_obs([adata.obs for adata in adatas], **options)
    bare = [
        AnnData(
            obs=adata.obs if obs is None else pd.DataFrame(index=nameless_index(0)),
            var=adata.var,
            varm=dict(adata.varm),
            uns=adata.uns,
            obsm={name: adata.obsm[name] for name in tables if name in adata.obsm},
        )
        for adata in adatas
    ]
    try:
        result = anndata.concat(bare, **options)
    except (TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise InputError(f"the atlases cannot be concatenated: {error}") from error
    if obs is None:
        return result
    return AnnData(obs=obs, var=result.var, varm=dict(result.varm), uns=result.uns)


def _nameless_obs(
    tables: Sequence[pd.DataFrame],
    *,
    join: Join,
    keys: Sequence[str],
    label: str | None = None,
    index_unique: str | None = None,
    **_: Any,
) -> pd.DataFrame | None:
    """Concatenate obs without names; None if there are names, which `anndata.concat` joins."""
    # `anndata.concat` would need 8 bytes per cell to store which atlas the cell comes from.
    alike = all(is_nameless(obs.index) and obs.columns.is_unique for obs in tables)
    unified = unified_dtypes(tables) if alike and index_unique is None else None
    if unified is None:
        return None
    joined = pd.concat(unified, join=join, ignore_index=True)
    if label is not None:
        origins = np.arange(len(tables), dtype=np.min_scalar_type(-len(tables)))
        joined[label] = pd.Categorical.from_codes(
            np.repeat(origins, [len(obs) for obs in tables]), categories=list(keys)
        )
    joined.index = nameless_index(len(joined))  # set_axis would copy the columns
    return joined


def _tables_of_obsm(adatas: Sequence[AnnData]) -> list[str]:
    held: dict[str, list[Any]] = {}
    for adata in adatas:
        for name in adata.obsm:
            held.setdefault(name, []).append(adata.obsm[name])
    return [name for name, values in held.items() if all(isinstance(value, pd.DataFrame) for value in values)]


def _maps(
    var_names: Sequence[pd.Index[Any] | None], common: pd.Index[Any], fill_value: float | None
) -> ColumnMaps | None:
    """Map the variables of each atlas to the common ones; None if all atlases have exactly these, in this order."""
    # An entry of `var_names` is None if its atlas lacks the matrix to join.
    distinct: list[tuple[pd.Index[Any], NDArray[np.int64]]] = []
    positions = []
    for given in var_names:
        names = common[:0] if given is None else given
        where = next((where for index, where in distinct if index is names or index.equals(names)), None)
        if where is None:
            where = common.get_indexer(names)
            distinct.append((names, where))
        positions.append(where)
    if len(distinct) == 1 and distinct[0][0].equals(common):
        return None
    return ColumnMaps(positions, len(common), fill_value=fill_value)


def _widths(widths: Sequence[int], fill_value: float | None, *, join: Join) -> ColumnMaps | None:
    """Map the columns of obsm, which have no names, by position."""
    if len(set(widths)) == 1:
        return None
    kept = min(widths) if join == "inner" else max(widths)
    every = {width: np.where(np.arange(width) < kept, np.arange(width), -1) for width in set(widths)}
    return ColumnMaps([every[width] for width in widths], kept, fill_value=fill_value)


def _joined(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: str, join: Join
) -> dict[str, list[da.Array | None]]:
    """Return the matrices to concatenate, with None for atlases that lack one; log the matrices that are left out."""
    joined: dict[str, list[da.Array | None]] = {}
    for key in dict.fromkeys(key for held in groups for key in held):
        arrays = [held.get(key) for held in groups]
        if all(array is None or isinstance(array, pd.DataFrame) for array in arrays):
            continue  # handled with the tables
        without = [name for name, array in zip(names, arrays, strict=True) if array is None]
        if not all(array is None or isinstance(array, da.Array) for array in arrays):
            logger.warning("%s[%r] is left out: it is not a numeric matrix", group, key)
        elif without and join == "inner":
            _log_dropped(f"{group}[{key!r}]", without)
        else:
            joined[key] = arrays
    return joined


def _log_dropped(what: str, without: Sequence[str]) -> None:
    logger.warning("%s is left out: missing in %s", what, ", ".join(without[:3]))


def _layers(adata: AnnData) -> dict[str, Any]:
    # From AnnData 0.13 on, layers[None] is X.
    return {name: adata.layers[name] for name in adata.layers if name is not None}


def _warn_of_types(matrices: Sequence[Matrix], joined: Matrix, names: Sequence[str], label: str) -> None:
    types = {
        str(matrix.dtype): name
        for name, matrix in zip(names, matrices, strict=True)
        if not isinstance(matrix, AbsentMatrix)
    }
    if len(types) > 1:
        found = ", ".join(f"{dtype} (as in {name})" for dtype, name in types.items())
        warnings.warn(f"{label} has several data types and becomes {joined.dtype}: {found}", stacklevel=2)
    elif str(joined.dtype) not in types:
        warnings.warn(
            f"{label} has data type {next(iter(types))} and becomes {joined.dtype}, since columns that some atlases "
            "lack need a fill value; fill_value=0 or join='inner' keeps the original type",
            stacklevel=2,
        )

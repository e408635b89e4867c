"""Concatenation of opened atlases: tables by AnnData, matrices without reading them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any, Literal, NoReturn

import anndata
import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc._compat.anndata import unified_dtypes
from dasksc.atlas.anndata_objects import layers_of
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
    result = _joined(adatas, names, join=join, fill_value=fill_value, **options)
    result.raw = _joined_raw(adatas, names, join=join, fill_value=fill_value, **{**options, "merge": None})
    dropped = _dropped.get()
    if dropped is not None:
        kept = _element_paths(result)
        dropped += dict.fromkeys(key for adata in adatas for key in _element_paths(adata) if key not in kept)
    return result


def _joined(
    adatas: Sequence[AnnData], names: Sequence[str], *, join: Join, fill_value: float | None, **options: Any
) -> AnnData:
    """Concatenate everything except raw."""
    for name, adata in zip(names, adatas, strict=True):
        if not adata.var_names.is_unique:
            repeated = adata.var_names[adata.var_names.duplicated()].unique()[:3].tolist()
            raise InputError(
                f"variables of {name} repeat ({repeated}), so they cannot be matched with other atlases. Make them "
                "unique: adata.var_names_make_unique()"
            )
    without = [name for name, adata in zip(names, adatas, strict=True) if adata.X is None]
    if without and len(without) < len(adatas):
        raise InputError(
            f"there is no X in {', '.join(without[:5])}, but other atlases have one. Leave out the atlases "
            "without X, or set it from a layer: adata.X = adata.layers['counts']"
        )
    _warn_of_lost_orders(adatas, names)
    result = _tables(adatas, join=join, fill_value=fill_value, **options)
    if not result.n_vars and any(adata.n_vars for adata in adatas):
        _refuse_no_common_variable(adatas, names)
    maps = _maps([adata.var_names for adata in adatas], result.var_names, fill_value)
    sizes = [adata.n_obs for adata in adatas]
    stacked = {} if without else {"X": _stacked([adata.X for adata in adatas], sizes, names, "X", maps)}
    for name, arrays in _common([layers_of(adata) for adata in adatas], names, "layers", join).items():
        held = [adata.var_names if array is not None else None for adata, array in zip(adatas, arrays, strict=True)]
        own = maps if all(array is not None for array in arrays) else _maps(held, result.var_names, fill_value)
        stacked[name] = _stacked(arrays, sizes, names, f"layers/{name}", own)
    rows = chunk_rows_for(*stacked.values()) if stacked else None
    for name, matrix in stacked.items():
        if name == "X":
            result.X = to_dask(matrix, chunk_rows=rows)
        else:
            result.layers[name] = to_dask(matrix, chunk_rows=rows)
    for name, arrays in _common([adata.obsm for adata in adatas], names, "obsm", join).items():
        widths = [0 if array is None else array.shape[1] for array in arrays]
        by_position = _widths(widths, fill_value, join=join)
        result.obsm[name] = to_dask(_stacked(arrays, sizes, names, f"obsm/{name}", by_position))
    return result


def _stacked(
    arrays: Sequence[da.Array | None], sizes: Sequence[int], names: Sequence[str], label: str, maps: ColumnMaps | None
) -> Matrix:
    """Return one matrix of the rows of all atlases; None stands for an atlas that lacks the matrix."""
    found = [None if array is None else matrix_of(array) for array in arrays]
    held = [matrix for matrix in found if matrix is not None]
    layout: Layout = "csr" if any(matrix.layout == "csr" for matrix in held) else "dense"
    fill_value = None if maps is None else maps.fill_value
    if layout == "csr" and fill_value and maps is not None and maps.n_filled():
        raise InputError(
            f"{label} is sparse, so missing variables are 0; fill_value={fill_value} would make it dense. Give "
            "fill_value=0, or leave it out"
        )
    # Atlases that lack the matrix have the type of the others if there is a fill value, and one with NaN otherwise.
    absent = np.dtype(np.float64) if fill_value is None else np.result_type(*[matrix.dtype for matrix in held])
    parts = [
        AbsentMatrix(n, layout, absent) if matrix is None else matrix for matrix, n in zip(found, sizes, strict=True)
    ]
    joined = ConcatenatedMatrix(label=f"{label} of {len(names)} atlases", parts=parts, maps=maps)
    types = {str(matrix.dtype): name for name, matrix in zip(names, found, strict=True) if matrix is not None}
    if len(types) > 1 or str(joined.dtype) not in types:
        listed = ", ".join(f"{dtype} (as in {name})" for dtype, name in types.items())
        why = (
            "" if len(types) > 1 else ". Columns that some atlases lack need a fill value; fill_value=0 keeps the type"
        )
        warnings.warn(f"{label} has several data types and becomes {joined.dtype}: {listed}{why}", stacklevel=2)
    if joined.n_missing():
        logger.warning(
            "%s, joined from %d atlases, has NaN in %d of %d columns, for cells of atlases without these columns. "
            "Give fill_value=0 for zeros, or join='inner' for the columns common to all",
            *(label, len(names), joined.n_missing(), joined.shape[1]),
        )
    return joined


def _common(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: str, join: Join
) -> dict[str, list[da.Array | None]]:
    """Return the matrices to concatenate, with None for atlases that lack one; log the matrices that are left out."""
    common: dict[str, list[da.Array | None]] = {}
    for key in dict.fromkeys(key for held in groups for key in held):
        arrays = [held.get(key) for held in groups]
        if all(array is None or isinstance(array, pd.DataFrame) for array in arrays):
            continue  # handled with the tables
        without = [name for name, array in zip(names, arrays, strict=True) if array is None]
        if not all(array is None or isinstance(array, da.Array) for array in arrays):
            logger.warning("%s[%r] is left out: it is not a numeric matrix", group, key)
        elif without and join == "inner":
            logger.warning("%s[%r] is left out: missing in %s", group, key, ", ".join(without[:3]))
        else:
            common[key] = arrays
    return common


def _joined_raw(adatas: Sequence[AnnData], names: Sequence[str], **options: Any) -> AnnData | None:
    """Join raw of all atlases; None, with a log message, if some lack it or its genes cannot be matched."""
    without = [name for name, adata in zip(names, adatas, strict=True) if adata.raw is None]
    if without:
        if len(without) < len(adatas):
            logger.warning("raw is left out: missing in %s", ", ".join(without[:3]))
        return None
    of_raw = [
        AnnData(X=adata.raw.X, obs=pd.DataFrame(index=adata.obs_names), var=adata.raw.var, varm=dict(adata.raw.varm))
        for adata in adatas
    ]
    try:
        return _joined(of_raw, [f"raw of {name}" for name in names], **options)
    except InputError as error:
        logger.warning("raw is left out: %s", error)
        return None


def _warn_of_lost_orders(adatas: Sequence[AnnData], names: Sequence[str]) -> None:
    for column in dict.fromkeys(column for adata in adatas for column in adata.obs):
        dtypes = {
            name: adata.obs[column].dtype for name, adata in zip(names, adatas, strict=True) if column in adata.obs
        }
        ordered = [name for name, dtype in dtypes.items() if getattr(dtype, "ordered", False)]
        if ordered and len(set(dtypes.values())) > 1:
            warnings.warn(
                f"obs column {column!r} is ordered in {ordered[0]!r}, but other atlases have other categories or "
                "another order. The joined column has no order, so a filter with < or > compares text. Use the same "
                "ordered categories in all atlases",
                stacklevel=2,
            )


def _refuse_no_common_variable(adatas: Sequence[AnnData], names: Sequence[str]) -> NoReturn:
    """Raise an error with example names of two atlases."""
    first = next(i for i, adata in enumerate(adatas) if adata.n_vars)
    # Prefer an atlas that shares no name with the first; it probably has names of another kind.
    own = adatas[first].var_names
    other = min(range(len(adatas)), key=lambda i: len(own.intersection(adatas[i].var_names)))
    found = [f"{names[i]!r} has {some(adatas[i].var_names) or 'none at all'}" for i in (first, other)]
    raise InputError(
        f"{len(adatas)} atlases have no variable in common, so join='inner' leaves no column: {', and '.join(found)}. "
        "Use the same kind of names in all atlases, such as Ensembl IDs (adata.var_names = adata.var['gene_ids']), or "
        "give join='outer' to keep the variables of each"
    )


def _element_paths(adata: AnnData) -> dict[str, None]:
    """Return the paths of the elements of an AnnData other than X, in order."""
    groups = {name: getattr(adata, name) for name in ("obs", "var", "obsm", "obsp", "varm", "varp", "uns")}
    groups["layers"] = layers_of(adata)
    held = dict.fromkeys(f"{name}/{key}" for name, group in groups.items() for key in group)
    return held if adata.raw is None else held | {"raw": None}


def _tables(adatas: Sequence[AnnData], **options: Any) -> AnnData:
    """Concatenate everything except matrices with `anndata.concat`."""
    tables = [
        name
        for name in dict.fromkeys(name for adata in adatas for name in adata.obsm)
        if all(isinstance(adata.obsm.get(name, pd.DataFrame()), pd.DataFrame) for adata in adatas)
    ]
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

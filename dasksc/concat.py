"""Several opened atlases as one: tables concatenated by AnnData, matrices stacked without reading them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import anndata
import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.lazy import chunk_rows_for, matrix_of, to_dask
from dasksc.storage import ColumnMaps, Matrix, StackedMatrix

__all__ = ["Join", "concatenated", "noting_left_out"]

logger = logging.getLogger(__name__)

Join = Literal["inner", "outer"]

_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_left_out() -> Iterator[list[str]]:
    """Collect what joining leaves out while this is entered, by its place in a store: ``raw``, ``layers/counts``."""
    noted: list[str] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def concatenated(adatas: Sequence[AnnData], names: Sequence[str], *, join: Join, **options: Any) -> AnnData:
    """Return AnnDatas of Dask arrays as one, row after row; nothing of their matrices is read.

    Parameters
    ----------
    adatas
        What `dasksc.open` returned, at least one.
    names
        What to call them in errors.
    join
        Which variables to keep: those that all have, or any.
    options
        As for `anndata.concat`, which concatenates the tables.

    Raises
    ------
    InputError
        If variables repeat within one, or some have no X.
    """
    without = [name for name, adata in zip(names, adatas, strict=True) if adata.X is None]
    if without and len(without) < len(adatas):
        raise InputError(f"{', '.join(without[:5])} has no X, and others have; give layers= to all, or leave them out")
    for name, adata in zip(names, adatas, strict=True):
        if not adata.var_names.is_unique:
            repeated = adata.var_names[adata.var_names.duplicated()].unique()[:3].tolist()
            raise InputError(f"variables of {name} repeat ({repeated}), so they cannot be matched with those of others")
    result = _tables(adatas, join=join, **options)
    maps = _maps([adata.var_names for adata in adatas], result.var_names)

    def stacked(arrays: Sequence[da.Array], label: str, maps: ColumnMaps | None) -> Matrix:
        matrices = [matrix_of(array) for array in arrays]
        joined = StackedMatrix(label=f"{label} of {len(names)} atlases", parts=matrices, maps=maps)
        _warn_of_types(matrices, joined, names, label)
        return joined

    aligned = {} if without else {"X": stacked([adata.X for adata in adatas], "X", maps)}
    for name, arrays in _common([_layers(adata) for adata in adatas], names, "layers").items():
        aligned[name] = stacked(arrays, f"layers/{name}", maps)
    rows = chunk_rows_for(*aligned.values()) if aligned else None
    for name, matrix in aligned.items():
        array = to_dask(matrix, chunk_rows=rows)
        if name == "X":
            result.X = array
        else:
            result.layers[name] = array
    for name, arrays in _common([adata.obsm for adata in adatas], names, "obsm").items():
        widths = [array.shape[1] for array in arrays]
        result.obsm[name] = to_dask(stacked(arrays, f"obsm/{name}", _widths(widths, join=join)))
    noted = _noted.get()
    if noted is not None:
        kept = _held(result)
        noted += dict.fromkeys(key for adata in adatas for key in _held(adata) if key not in kept)
    return result


def _held(adata: AnnData) -> dict[str, None]:
    """Return what there is in an AnnData beside X, by its place in a store."""
    groups = {name: getattr(adata, name) for name in ("obs", "var", "obsm", "obsp", "varm", "varp", "uns")}
    groups["layers"] = _layers(adata)
    held = dict.fromkeys(f"{name}/{key}" for name, group in groups.items() for key in group)
    return held if adata.raw is None else held | {"raw": None}


def _tables(adatas: Sequence[AnnData], **options: Any) -> AnnData:
    """Return what `anndata.concat` makes of everything but the matrices."""
    bare = [AnnData(obs=adata.obs, var=adata.var, varm=dict(adata.varm), uns=adata.uns) for adata in adatas]
    try:
        return anndata.concat(bare, **options)
    except (TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise InputError(f"the atlases cannot be concatenated: {error}") from error


def _maps(var_names: Sequence[pd.Index[Any]], common: pd.Index[Any]) -> ColumnMaps | None:
    """Return where each atlas's variables go among the common ones; None if all have these, in this order."""
    distinct: list[tuple[pd.Index[Any], NDArray[np.int64]]] = []
    positions = []
    for names in var_names:
        where = next((where for known, where in distinct if known is names or known.equals(names)), None)
        if where is None:
            where = common.get_indexer(names)
            distinct.append((names, where))
        positions.append(where)
    if len(distinct) == 1 and distinct[0][0].equals(common):
        return None
    return ColumnMaps(positions, len(common))


def _widths(widths: Sequence[int], *, join: Join) -> ColumnMaps | None:
    """Columns of obsm have no names: the first of one are the first of all."""
    if len(set(widths)) == 1:
        return None
    kept = min(widths) if join == "inner" else max(widths)
    every = {width: np.where(np.arange(width) < kept, np.arange(width), -1) for width in set(widths)}
    return ColumnMaps([every[width] for width in widths], kept)


def _common(groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: str) -> dict[str, list[da.Array]]:
    """Return the matrices that all have; say which others are left out."""
    keys = list(dict.fromkeys(key for held in groups for key in held))
    common = {}
    for key in keys:
        arrays = [held[key] for held in groups if key in held]
        if len(arrays) == len(groups) and all(isinstance(array, da.Array) for array in arrays):
            common[key] = arrays
        else:
            without = [name for name, held in zip(names, groups, strict=True) if key not in held]
            why = f"{', '.join(without[:3])} has none" if without else "it is no numeric matrix"
            logger.warning("%s[%r] is left out: %s", group, key, why)
    return common


def _layers(adata: AnnData) -> dict[str, Any]:
    # From AnnData 0.13 on, layers[None] is X.
    return {name: adata.layers[name] for name in adata.layers if name is not None}


def _warn_of_types(matrices: Sequence[Matrix], joined: Matrix, names: Sequence[str], label: str) -> None:
    types = {str(matrix.dtype): name for name, matrix in zip(names, matrices, strict=True)}
    if len(types) > 1:
        found = ", ".join(f"{dtype} (as in {name})" for dtype, name in types.items())
        warnings.warn(f"{label} is of several types and becomes {joined.dtype}: {found}", stacklevel=2)
    elif str(joined.dtype) not in types:
        what = "columns that some lack are NaN there; join='inner' keeps the type"
        warnings.warn(f"{label} is of {next(iter(types))} and becomes {joined.dtype}: {what}", stacklevel=2)

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
from dasksc.storage import AbsentMatrix, ColumnMaps, Layout, Matrix, StackedMatrix

__all__ = ["MERGES", "Join", "concatenated", "noting_left_out"]

logger = logging.getLogger(__name__)

Join = Literal["inner", "outer"]
MERGES = ("same", "unique", "first", "only")
"""What AnnData knows of what describes genes in several."""

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
    if not result.n_vars and all(adata.n_vars for adata in adatas):
        logger.warning(
            "%d atlases have no variable in common, so X has no columns: one has %s, another %s. Give them names of "
            "one kind, or join='outer'",
            len(adatas),
            *(", ".join(map(str, adata.var_names[:2])) for adata in (adatas[0], adatas[-1])),
        )
    sizes = [adata.n_obs for adata in adatas]
    maps = _maps([adata.var_names for adata in adatas], result.var_names)

    def stacked(arrays: Sequence[da.Array | None], label: str, maps: ColumnMaps | None) -> Matrix:
        layout: Layout = (
            "csr" if any(array is not None and matrix_of(array).layout == "csr" for array in arrays) else "dense"
        )
        parts = [
            AbsentMatrix(n, layout) if array is None else matrix_of(array)
            for array, n in zip(arrays, sizes, strict=True)
        ]
        joined = StackedMatrix(label=f"{label} of {len(names)} atlases", parts=parts, maps=maps)
        _warn_of_types(parts, joined, names, label)
        return joined

    aligned = {} if without else {"X": stacked([adata.X for adata in adatas], "X", maps)}
    for name, arrays in _joined([_layers(adata) for adata in adatas], names, "layers", join).items():
        of_layer = maps
        if any(array is None for array in arrays):
            held = [adata.var_names if array is not None else None for adata, array in zip(adatas, arrays, strict=True)]
            of_layer = _maps(held, result.var_names)
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
        result.obsm[name] = to_dask(stacked(arrays, f"obsm/{name}", _widths(widths, join=join)))
    result.raw = _joined_raw(adatas, names, join=join, **{**options, "merge": None})
    noted = _noted.get()
    if noted is not None:
        kept = _held(result)
        noted += dict.fromkeys(key for adata in adatas for key in _held(adata) if key not in kept)
    return result


def _joined_raw(adatas: Sequence[AnnData], names: Sequence[str], **options: Any) -> AnnData | None:
    """Return the raw of all as one; None, said, if some have none or their genes cannot be matched."""
    raws = [adata.raw for adata in adatas]
    if all(raw is None for raw in raws):
        return None
    without = [name for name, raw in zip(names, raws, strict=True) if raw is None]
    if without:
        _log_left_out("raw", without)
        return None
    repeating = [name for name, raw in zip(names, raws, strict=True) if not raw.var_names.is_unique]
    if repeating:
        logger.warning("raw is left out: its variables repeat in %s", ", ".join(repeating[:3]))
        return None
    of_raw = [
        AnnData(X=raw.X, obs=pd.DataFrame(index=adata.obs_names), var=raw.var, varm=dict(raw.varm))
        for adata, raw in zip(adatas, raws, strict=True)
    ]
    with noting_left_out():  # raw is there, whatever of it is not
        return concatenated(of_raw, [f"raw of {name}" for name in names], **options)


def _held(adata: AnnData) -> dict[str, None]:
    """Return what there is in an AnnData beside X, by its place in a store."""
    groups = {name: getattr(adata, name) for name in ("obs", "var", "obsm", "obsp", "varm", "varp", "uns")}
    groups["layers"] = _layers(adata)
    held = dict.fromkeys(f"{name}/{key}" for name, group in groups.items() for key in group)
    return held if adata.raw is None else held | {"raw": None}


def _tables(adatas: Sequence[AnnData], **options: Any) -> AnnData:
    """Return what `anndata.concat` makes of everything but the matrices."""
    tables = _tables_of_obsm(adatas)
    bare = [
        AnnData(
            obs=adata.obs,
            var=adata.var,
            varm=dict(adata.varm),
            uns=adata.uns,
            obsm={name: adata.obsm[name] for name in tables if name in adata.obsm},
        )
        for adata in adatas
    ]
    try:
        return anndata.concat(bare, **options)
    except (TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise InputError(f"the atlases cannot be concatenated: {error}") from error


def _tables_of_obsm(adatas: Sequence[AnnData]) -> list[str]:
    held: dict[str, list[Any]] = {}
    for adata in adatas:
        for name in adata.obsm:
            held.setdefault(name, []).append(adata.obsm[name])
    return [name for name, values in held.items() if all(isinstance(value, pd.DataFrame) for value in values)]


def _maps(var_names: Sequence[pd.Index[Any] | None], common: pd.Index[Any]) -> ColumnMaps | None:
    """Return where each atlas's variables go among the common ones; None if all have these, in this order.

    One that has none of a matrix is None.
    """
    distinct: list[tuple[pd.Index[Any], NDArray[np.int64]]] = []
    positions = []
    for given in var_names:
        names = common[:0] if given is None else given
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


def _joined(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: str, join: Join
) -> dict[str, list[da.Array | None]]:
    """Return the matrices that all have, or any, with None for those that lack one; say which others are left out."""
    joined: dict[str, list[da.Array | None]] = {}
    for key in dict.fromkeys(key for held in groups for key in held):
        arrays = [held.get(key) for held in groups]
        if all(array is None or isinstance(array, pd.DataFrame) for array in arrays):
            continue  # among the tables
        without = [name for name, array in zip(names, arrays, strict=True) if array is None]
        if not all(array is None or isinstance(array, da.Array) for array in arrays):
            logger.warning("%s[%r] is left out: it is no numeric matrix", group, key)
        elif without and join == "inner":
            _log_left_out(f"{group}[{key!r}]", without)
        else:
            joined[key] = arrays
    return joined


def _log_left_out(what: str, without: Sequence[str]) -> None:
    logger.warning("%s is left out: %s has none", what, ", ".join(without[:3]))


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
        warnings.warn(f"{label} is of several types and becomes {joined.dtype}: {found}", stacklevel=2)
    elif str(joined.dtype) not in types:
        what = "what some lack has no type of its own; join='inner' keeps it"
        warnings.warn(f"{label} is of {next(iter(types))} and becomes {joined.dtype}: {what}", stacklevel=2)

"""Concatenation of opened atlases: tables by AnnData, matrices without reading them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, NoReturn

import anndata
import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray
from pandas.arrays import NumpyExtensionArray

from dasksc._compat import unified_dtypes
from dasksc.atlas.elements import Elements, matrix_behind
from dasksc.checks import some
from dasksc.displays import first_of
from dasksc.errors import InputError
from dasksc.readers.arrays import Lazy
from dasksc.readers.names import nameless_index
from dasksc.storage import AbsentMatrix, ColumnMaps, ConcatenatedMatrix, Layout

logger = logging.getLogger("dasksc.concat")

Join = Literal["inner", "outer"]
MERGES = ("same", "unique", "first", "only")
"""Values of ``merge`` in `anndata.concat`, for annotations of genes."""


def check_fill_value(fill_value: Any, join: str) -> None:
    """Raise an error for a fill value that is not a number, or has no effect."""
    if fill_value is None:
        return
    if not isinstance(fill_value, Real | np.number | np.bool_):
        raise InputError(f"fill_value={fill_value!r} must be a number, such as 0")
    if join != "outer":
        raise InputError(f"without join='outer', there are no missing variables for fill_value={fill_value!r}")


def concatenated(
    parts: Sequence[Elements], names: Sequence[str], *, join: Join, fill_value: float | None = None, **options: Any
) -> Elements:
    """Concatenate atlases along obs, without reading their matrices."""
    result = _joined(parts, names, join=join, fill_value=fill_value, **options)
    result.raw = _joined_raw(parts, names, join=join, fill_value=fill_value, **{**options, "merge": None})
    kept = _element_paths(result)
    lost = dict.fromkeys(key for part in parts for key in _element_paths(part) if key not in kept)
    return replace(result, left_out=list(lost))


def _joined(
    parts: Sequence[Elements], names: Sequence[str], *, join: Join, fill_value: float | None, **options: Any
) -> Elements:
    """Concatenate everything except raw."""
    for name, part in zip(names, parts, strict=True):
        if not part.var.index.is_unique:
            repeated = part.var.index[part.var.index.duplicated()].unique()[:3].tolist()
            raise InputError(
                f"variables of {name} repeat ({repeated}), so they cannot be matched with other atlases. Make them "
                "unique: adata.var_names_make_unique()"
            )
    without = [name for name, part in zip(names, parts, strict=True) if part.X is None]
    if without and len(without) < len(parts):
        raise InputError(f"there is no X in {first_of(without)}, but other atlases have one. Leave these atlases out")
    _warn_of_lost_orders(parts, names)
    result = _tables(parts, join=join, fill_value=fill_value, **options)
    if not result.n_vars and any(part.n_vars for part in parts):
        _refuse_no_common_variable(parts, names)
    maps = _maps([part.var.index for part in parts], result.var.index, fill_value)
    sizes = [part.n_obs for part in parts]
    if not without:
        result.X = _stacked([part.X for part in parts], sizes, names, "X", maps)
    for name, arrays in _common([part.layers for part in parts], names, "layers", join).items():
        held = [part.var.index if array is not None else None for part, array in zip(parts, arrays, strict=True)]
        own = maps if all(array is not None for array in arrays) else _maps(held, result.var.index, fill_value)
        result.layers[name] = _stacked(arrays, sizes, names, f"layers/{name}", own)
    for name, arrays in _common([part.obsm for part in parts], names, "obsm", join).items():
        widths = [0 if array is None else matrix_behind(array).shape[1] for array in arrays]
        by_position = _widths(widths, fill_value, join=join)
        result.obsm[name] = _stacked(arrays, sizes, names, f"obsm/{name}", by_position)
    return result


def _stacked(
    arrays: Sequence[da.Array | Lazy | None],
    sizes: Sequence[int],
    names: Sequence[str],
    label: str,
    maps: ColumnMaps | None,
) -> Lazy:
    """Return one matrix of the rows of all atlases; None stands for an atlas that lacks the matrix."""
    found = [None if array is None else matrix_behind(array) for array in arrays]
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
    parts = [AbsentMatrix(n, absent) if matrix is None else matrix for matrix, n in zip(found, sizes, strict=True)]
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
    return Lazy(matrix=joined)


def _common(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], group: str, join: Join
) -> dict[str, list[da.Array | Lazy | None]]:
    """Return the matrices to concatenate, with None for atlases that lack one; log the matrices that are left out."""
    common: dict[str, list[da.Array | Lazy | None]] = {}
    for key in dict.fromkeys(key for held in groups for key in held):
        arrays = [held.get(key) for held in groups]
        if all(array is None or isinstance(array, pd.DataFrame) for array in arrays):
            continue  # handled with the tables
        without = [name for name, array in zip(names, arrays, strict=True) if array is None]
        if not all(array is None or isinstance(array, da.Array | Lazy) for array in arrays):
            logger.warning("%s[%r] is left out: it is not a numeric matrix", group, key)
        elif without and join == "inner":
            logger.warning("%s[%r] is left out: missing in %s", group, key, ", ".join(without[:3]))
        else:
            common[key] = arrays
    return common


def _joined_raw(parts: Sequence[Elements], names: Sequence[str], **options: Any) -> dict[str, Any] | None:
    """Join raw of all atlases; None, with a log message, if some lack it or its genes cannot be matched."""
    without = [name for name, part in zip(names, parts, strict=True) if part.raw is None]
    if without:
        if len(without) < len(parts):
            logger.warning("raw is left out: missing in %s", ", ".join(without[:3]))
        return None
    of_raw = [Elements(**part.raw, obs=pd.DataFrame(index=part.obs.index)) for part in parts if part.raw is not None]
    try:
        joined = _joined(of_raw, [f"raw of {name}" for name in names], **options)
        return {"X": joined.X, "var": joined.var, "varm": joined.varm}
    except InputError as error:
        logger.warning("raw is left out: %s", error)
        return None


def _warn_of_lost_orders(parts: Sequence[Elements], names: Sequence[str]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, part in zip(names, parts, strict=True):
        for column, values in part.obs.items():
            found.setdefault(str(column), {})[name] = values.dtype
    for column, dtypes in found.items():
        ordered = [name for name, dtype in dtypes.items() if getattr(dtype, "ordered", False)]
        if ordered and len(set(dtypes.values())) > 1:
            warnings.warn(
                f"obs column {column!r} is ordered in {ordered[0]!r}, but other atlases have other categories or "
                "another order. The joined column has no order, so a filter with < or > compares text. Use the same "
                "ordered categories in all atlases",
                stacklevel=2,
            )


def _refuse_no_common_variable(parts: Sequence[Elements], names: Sequence[str]) -> NoReturn:
    # An atlas that shares no name with the first probably has names of another kind.
    own = parts[0].var.index
    other = min(range(1, len(parts)), key=lambda i: len(own.intersection(parts[i].var.index)))
    found = " and ".join(f"{names[i]!r} has {some(parts[i].var.index) or 'none at all'}" for i in (0, other))
    raise InputError(
        f"{len(parts)} atlases have no variable in common, so join='inner' leaves no column: {found}. "
        "Use the same kind of names in all atlases, such as Ensembl IDs (adata.var_names = adata.var['gene_ids']), or "
        "give join='outer' to keep the variables of each"
    )


def _element_paths(atlas: Elements) -> dict[str, None]:
    groups = {name: getattr(atlas, name) for name in ("obs", "var", "obsm", "obsp", "varm", "varp", "uns", "layers")}
    held = dict.fromkeys(f"{name}/{key}" for name, group in groups.items() for key in group)
    return held if atlas.raw is None else held | {"raw": None}


def _tables(
    parts: Sequence[Elements],
    *,
    join: Join,
    keys: Sequence[str],
    label: str | None = None,
    index_unique: str | None = None,
    merge: Any = None,
    fill_value: float | None,
) -> Elements:
    """Concatenate everything except matrices, as `anndata.concat` does."""
    tables = [
        name
        for name in dict.fromkeys(name for part in parts for name in part.obsm)
        if all(isinstance(part.obsm.get(name, pd.DataFrame()), pd.DataFrame) for part in parts)
    ]
    of_obsm = [
        Elements(
            obs=pd.DataFrame(index=nameless_index(part.n_obs)),
            obsm={name: part.obsm[name] for name in tables if name in part.obsm},
        ).to_anndata()
        for part in (parts if tables else ())
    ]
    of_genes = [
        AnnData(obs=pd.DataFrame(index=nameless_index(0)), var=part.var, varm=dict(part.varm))
        for part in (parts if callable(merge) or merge == "only" else _distinct(parts, merge))
    ]
    try:
        obs = joined_obs(parts, join=join, keys=keys, label=label, index_unique=index_unique)
        genes = anndata.concat(of_genes, join=join, merge=merge, fill_value=fill_value)
        obsm = anndata.concat(of_obsm, join=join, fill_value=fill_value).obsm if tables else {}
    except (TypeError, ValueError, pd.errors.InvalidIndexError) as error:
        raise InputError(f"the atlases cannot be concatenated: {error}") from error
    return Elements(obs=obs, var=genes.var, varm=dict(genes.varm), obsm=dict(obsm))


def _distinct(parts: Sequence[Elements], merge: str | None) -> Sequence[Elements]:
    """Return the parts that determine the genes of the result."""
    if merge is not None:
        return parts
    # Lists of genes that have been read before are the same object.
    distinct: dict[int, Elements] = {}
    for part in parts:
        distinct.setdefault(id(part.var.index), part)
    return [replace(part, var=part.var[[]], varm={}) for part in distinct.values()]


def joined_obs(
    parts: Sequence[Elements], *, join: Join, keys: Sequence[str], label: str | None, index_unique: str | None
) -> pd.DataFrame:
    """Concatenate obs, with a column and an end of the names that tell the atlases apart."""
    tables = [part.obs for part in parts]
    for key, table in zip(keys, tables, strict=True):
        if label is not None and label in table:
            raise InputError(
                f"label={label!r} adds a column to obs, but {key!r} has a column of this name. Give another label="
            )
    joined = _joined_alike(tables)
    if joined is None:
        for table in tables:
            if not table.columns.is_unique:
                repeated = table.columns[table.columns.duplicated()][0]
                raise InputError(f"the atlases cannot be concatenated: obs has several columns {repeated!r}")
        joined = pd.concat(unified_dtypes(tables), join=join, ignore_index=True)
    sizes = [len(table) for table in tables]
    if label is not None:
        # `anndata.concat` would need 8 bytes per cell to store which atlas the cell comes from.
        origins = np.arange(len(tables), dtype=np.min_scalar_type(-len(tables)))
        joined[label] = pd.Categorical.from_codes(np.repeat(origins, sizes), categories=list(keys))
    if all(isinstance(table.index, pd.RangeIndex) for table in tables) and index_unique is None:
        return joined
    names = tables[0].index.append([table.index for table in tables[1:]])
    if index_unique is not None:
        names = names.str.cat(np.repeat(np.array(keys, dtype=object), sizes), sep=index_unique)
    joined.index = names
    return joined


def _joined_alike(tables: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """Concatenate tables with the same columns, categorical or of the same NumPy type; None for other tables."""
    # pandas would take longer than reading the tables if there are thousands.
    columns = tables[0].columns
    if not columns.is_unique or not all(table.columns is columns or table.columns.equals(columns) for table in tables):
        return None
    joined: dict[Any, Any] = {}
    for name in columns:
        arrays = [table[name].array for table in tables]
        if all(isinstance(array, pd.Categorical) for array in arrays):
            # Categories that have been read before are the same object.
            dtypes = {(id(array.categories), array.ordered): array.dtype for array in arrays}
            heads = [pd.DataFrame({"": pd.Categorical([], dtype=dtype)}) for dtype in dtypes.values()]
            unified = unified_dtypes(heads) if len(heads) > 1 else heads
            dtype = unified[0][""].dtype
            if not isinstance(dtype, pd.CategoricalDtype) or len({one[""].dtype for one in unified}) > 1:
                return None
            narrow = pd.Categorical.from_codes([], dtype=dtype).codes.dtype
            new = {key: dtype.categories.get_indexer(one.categories) for key, one in dtypes.items()}
            # The code -1 of a missing value stays -1.
            tables_of_codes = {key: np.append(codes, -1).astype(narrow) for key, codes in new.items()}
            numbers = [tables_of_codes[id(array.categories), array.ordered][array.codes] for array in arrays]
            joined[name] = pd.Categorical.from_codes(np.concatenate(numbers), dtype=dtype)
        elif all(isinstance(array, NumpyExtensionArray) for array in arrays):
            if len({array.dtype for array in arrays}) > 1:
                return None
            values = np.concatenate([array.to_numpy() for array in arrays])
            joined[name] = pd.array(values, dtype=arrays[0].dtype, copy=False)  # pandas 3 has text in such arrays, too
        else:
            return None
    return pd.DataFrame(joined, index=pd.RangeIndex(sum(map(len, tables))), columns=columns, copy=False)


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

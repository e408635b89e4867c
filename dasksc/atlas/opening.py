"""Opening an atlas: paths and AnnData objects become an AnnData of Dask arrays.

Nothing with one row per cell is read but the obs table: X, the layers, obsm, obsp and raw.X stay
where they are until they are computed or fetched. What describes genes (var, varm, varp) and uns is
read as AnnData reads it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pandas as pd
from anndata import AnnData

from dasksc.atlas.anndata_objects import open_anndata
from dasksc.atlas.assemble import raw_of, unchecked
from dasksc.atlas.attaching import attach_elements, check_attach
from dasksc.atlas.cell_names import any_repeat, number_rows
from dasksc.atlas.concat import MERGES, Join, check_fill_value, concatenated
from dasksc.atlas.inputs import Part, is_anncollection, parts_of, quoted
from dasksc.atlas.options import ACCEPTED, Openable, OpenOptions, check_mmap
from dasksc.atlas.stored_anndata import open_path
from dasksc.errors import InputError, MissingKeyError
from dasksc.storage import Cache, UseMmap

__all__ = ["is_several", "open", "several_of"]

logger = logging.getLogger("dasksc.collection")


def open(
    data: Openable | Sequence[Openable] | Mapping[str, Openable],
    *,
    obs: Sequence[str] | None = None,
    mmap: UseMmap = "auto",
    names: bool = True,
    join: Join = "inner",
    label: str | None = None,
    keys: Sequence[str] | None = None,
    index_unique: str | None = None,
    merge: str | None = None,
    fill_value: float | None = None,
    raw: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    attach: Mapping[str, str | os.PathLike[str]] | None = None,
) -> AnnData:
    """Open an atlas lazily, or several as one.

    Parameters
    ----------
    data
        The path of an ``.h5ad`` file or of a Zarr store (v2 or v3), or an `AnnData`: in memory (its
        arrays are shared, not copied), read with ``backed="r"`` (X comes from its file, everything
        else, with your edits, from the object), or of Dask arrays already. Paths may be URLs
        (``s3://``, ``gs://``, ``az://``, ``https://``, ``http://``, ``file://``, and those that fsspec knows).

        Several, one below the other: a list of these and of what follows, or a dict of these by their keys; a pattern
        (``"atlas/*.h5ad"``; ``**`` for folders of any depth) or a directory, whose files and stores are taken by name
        (behind URLs too, but of web servers, which do not tell what they have), one alone as if it had been given; a
        store of ``dataset_*`` groups, as annbatch writes it; AnnData's `AnnCollection`, whose obs is that of what is
        opened. Nothing is rewritten: a column is renumbered while the rows of a batch are gathered.
    obs
        The obs columns to read. Default: all of them.
    mmap
        Whether uncompressed files of this machine are mapped into memory. Mapping is the fastest way to read them
        where their pages stay in memory; a file that is truncated while it is read ends the process, where
        ``mmap=False`` raises an error. ``"auto"`` maps them unless they are too large to stay in the page cache,
        as the memory that the process may use allows; that is decided when an epoch begins.
    names
        Whether the names of cells are read. Without them obs has a `pandas.RangeIndex`, and opening takes time and
        memory for the columns read only: 10^8 names are 10 GB. Copies that AnnData makes number the cells, as strings.
    join, label, keys, index_unique, merge
        Of several, as for `anndata.concat`, which concatenates their tables: keep the variables that all have
        (``"inner"``) or any (``"outer"``); name an obs column that says which row is of which, by `keys`, one for each
        atlas that a pattern or directory stands for (default: of paths, their names, with the folders that tell them
        apart; of an AnnCollection, those in the column that its ``label`` made). Matrices of different types take
        their common one, with a warning. Left out are obsp, uns, varp, a raw that not all have, and layers and obsm
        that only some have unless `join` is ``"outer"``.
    fill_value
        What ``join="outer"`` puts where an atlas lacks a variable, a layer or an entry of obsm. Default: 0 in sparse
        matrices, which take nothing else, and NaN in dense ones, with a warning.
    raw
        Open what is in ``raw`` instead: its X, var and varm beside obs, obsm and uns, without layers, obsp and varp.
        Of several, that of each, joined as any X is.
    storage_options
        For URLs: credentials, region, endpoint, by the names of obstore's stores (or of fsspec's file systems,
        for what it reads); what is not given comes from the environment (``AWS_...``, ``GOOGLE_...``,
        ``AZURE_...``). Public buckets: ``{"skip_signature": True}``.
    cache
        A folder of this machine for blocks of what is read, or ``{"path": ..., "limit": "100GiB"}``; also of paths
        that are no URLs, such as those of a network file system. Default: ``dasksc.cache`` of Dask's
        configuration, for URLs only.
    attach
        Elements of other stores to add, such as those that `dasksc.predict` writes: paths by key,
        ``{"obsm/X_emb": "emb.zarr", "obs/predicted": "emb.zarr"}``. Matrices of obsm stay on disk; columns of obs are
        read. The store must have the cells of the atlas, in its order: their number is compared, and their names
        unless ``names=False``.

    Returns
    -------
    AnnData
        ``X``, ``layers``, ``obsm`` and ``raw.X`` are Dask arrays, and so is ``obsp`` when a path is opened;
        nothing of them has been read. obsm entries that are not numeric matrices (tables, images)
        are read as AnnData reads them.

    Raises
    ------
    InputError
        If `data` is of another kind, or several do not fit together, such as by ``"inner"`` without a common variable;
        or if the cells of a store in `attach` are others.
    MissingPathError
        If there is nothing at the path.
    StorageError
        If what is there is not an AnnData file or store (`CorruptDataError`: a damaged one).
    MissingKeyError
        If obs has no column of a name in `obs`, or there is no raw; or if a store in `attach` has no such key.
    """
    if isinstance(obs, str):
        raise InputError(f"obs={obs!r} is a string; give a list of column names: obs=[{obs!r}]")
    check_mmap(mmap)
    if join not in ("inner", "outer"):
        raise InputError(f"join={join!r} is neither 'inner' nor 'outer'")
    if merge not in (None, *MERGES) and not callable(merge):
        raise InputError(f"merge={merge!r} is none of {', '.join(map(repr, MERGES))}; leave it out for none")
    check_fill_value(fill_value, join)
    if attach is not None:
        check_attach(attach)
    given: dict[str, Any] = {
        "label": label,
        "keys": keys,
        "index_unique": index_unique,
        "merge": merge,
        "fill_value": fill_value,
    }
    told = {name: value for name, value in given.items() if value is not None}
    remedy = "adata.obs_names_make_unique() makes them unique"
    if isinstance(data, AnnData) and isinstance(data.obs.index, pd.RangeIndex):
        names = False  # AnnData would make strings of its numbers
    if not names and index_unique is not None:
        raise InputError("index_unique= is of names, which names=False leaves out")
    options = OpenOptions(
        mmap=mmap, has_names=names, storage_options=dict(storage_options or {}), cache=Cache.of(cache)
    )
    with unchecked():
        parts = parts_of(data, options.storage_options)
        if parts == []:
            raise InputError(f"there is nothing to open in {data!r}")
        # A pattern or folder may stand for one, which is then as if it had been given.
        if parts is None or (len(parts) == 1 and isinstance(data, str | os.PathLike)):
            result = _open_one(data if parts is None else parts[0].data, obs, options)
            if raw:
                result = raw_of(result, quoted(data))
            if parts is not None:
                key = _keys_of(keys, [part.name for part in parts], are_given=False, are_told=True)[0]
                _label(result, key, label=label, index_unique=index_unique)
            elif told:
                what = ", ".join(f"{name}=" for name in told)
                verb = "is" if len(told) == 1 else "are"
                raise InputError(f"{what} {verb} of several atlases, and {quoted(data)} is one; give a list: [...]")
        else:
            result = _open_several(
                parts, obs, options, are_given=isinstance(data, Mapping), raw=raw, join=join, **given
            )
            if index_unique is None:
                remedy = "index_unique='-' adds the key of its atlas to each"
        if attach is not None:
            attach_elements(result, attach, options)
    if not names:
        number_rows(result)
    elif any_repeat(result.obs_names):
        is_path = isinstance(data, str | os.PathLike)
        what = quoted(data) if is_path else "the AnnData given" if parts is None else f"{len(parts)} atlases"
        logger.warning("obs_names repeat in %s; %s", what, remedy)
    # Of an AnnData that a data set opens again it was said when it was made.
    if (names or not isinstance(data, AnnData)) and not result.var_names.is_unique:
        logger.warning("var_names repeat; adata.var_names_make_unique() makes them unique")
    return result


def _open_one(data: Any, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    if isinstance(data, AnnData):
        return open_anndata(data, obs, options)
    if isinstance(data, str | os.PathLike):
        return open_path(os.fspath(data), obs, options)
    raise InputError(
        f"cannot open an object of type {type(data).__module__}.{type(data).__qualname__}; expected {ACCEPTED}"
    )


def _open_part(part: Part, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    if part.obs is None:
        return _open_one(part.data, obs, options)
    return open_anndata(part.data, obs, options, table=part.obs)


def _open_several(
    parts: Sequence[Part],
    obs: Sequence[str] | None,
    options: OpenOptions,
    *,
    are_given: bool,
    raw: bool,
    join: Join,
    keys: Sequence[str] | None,
    **given: Any,
) -> AnnData:
    """Open atlases as one; `are_given` says that their names are keys."""
    names = [part.name for part in parts]
    are_told = given["label"] is not None or given["index_unique"] is not None
    keys = _keys_of(keys, names, are_given=are_given, are_told=are_told)
    lenient = replace(options, may_lack=True)
    opened = [_open_part(part, obs, lenient) for part in parts]
    columns = [adata.obs.columns for adata in opened]
    if raw:
        opened = [raw_of(adata, name) for adata, name in zip(opened, names, strict=True)]
    result = concatenated(opened, names, join=join, keys=keys, **given)
    for column in () if obs is None else obs:
        if column not in result.obs:
            without = [name for name, held in zip(names, columns, strict=True) if column not in held]
            _refuse_column(column, parts, without, options)
    return result


def _refuse_column(column: str, parts: Sequence[Part], without: Sequence[str], options: OpenOptions) -> NoReturn:
    """Refuse a column of obs that no atlas has, or not all that are joined by 'inner'; `without` names those."""
    if len(without) == len(parts):
        _open_part(parts[0], [column], options)  # says which it has
    raise MissingKeyError(
        f"obs of {len(parts)} atlases joined by 'inner' has no column {column!r}: {', '.join(without[:3])}"
        f"{', ...' if len(without) > 3 else ''} lacks it. Leave it out of obs=, or give join='outer', which fills it "
        "with missing values there."
    )


def _label(adata: AnnData, key: str, *, label: str | None, index_unique: str | None) -> None:
    """Do to one atlas what `anndata.concat` does to several."""
    if index_unique is not None:
        adata.obs_names = adata.obs_names.astype(str) + f"{index_unique}{key}"
    if label is not None:
        adata.obs[label] = pd.Categorical([key] * adata.n_obs)


def _keys_of(keys: Sequence[str] | None, names: Sequence[str], *, are_given: bool, are_told: bool) -> Sequence[str]:
    """Return what the atlases are called in obs; `are_told` says that it is seen there."""
    if keys is None:
        if len(set(names)) == len(names):
            return names
        if are_told:
            repeated = next(name for name in names if names.count(name) > 1)
            logger.warning(
                "the atlases are called '0', '1', ... since several are called %r; keys= gives them names", repeated
            )
        return [str(i) for i in range(len(names))]
    if are_given:
        raise InputError("keys= cannot be used with a dict, whose own keys these are")
    if isinstance(keys, str) or len(keys) != len(names):
        raise InputError(
            f"keys={keys!r} must be a list of {len(names)} names, one for each atlas: {', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}"
        )
    return keys


def is_several(data: Any) -> bool:
    """Return whether `data` is a list, tuple or dict of what `open` takes.

    An AnnCollection by itself is not: hooks expect to index it. `open` makes it an AnnData all the same.
    """
    items = list(data.values()) if isinstance(data, Mapping) else data
    if type(items) not in (list, tuple):
        return False
    return bool(items) and all(
        isinstance(item, str | os.PathLike | AnnData) or is_anncollection(item) for item in items
    )


def several_of(data: Any) -> tuple[list[Any], list[str]] | None:
    """Return the atlases that `data` stands for, and their names; None if it is one."""
    parts = parts_of(data, {})
    return None if parts is None else ([part.data for part in parts], [part.name for part in parts])

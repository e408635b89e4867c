"""Opening an atlas: paths and AnnData objects become an AnnData of Dask arrays.

Nothing with one row per cell is read but the obs table: X, the layers, obsm, obsp and raw.X stay
where they are until they are computed or fetched. What describes genes (var, varm, varp) and uns is
read as AnnData reads it.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias

import anndata
import dask.array as da
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from anndata import AnnData, OldFormatWarning
from anndata.io import read_elem
from numpy.typing import NDArray

from dasksc import config
from dasksc.atlas.concat import MERGES, Join, check_fill_value, concatenated
from dasksc.atlas.parts import Part, is_anncollection, parts_of, quoted, stem_of
from dasksc.errors import CorruptDataError, InputError, MissingKeyError, MissingPathError, StorageError
from dasksc.memory.limits import memory_limit
from dasksc.pushdown import MatrixRows, chunk_rows_for, gather_block, matrix_of, to_dask
from dasksc.storage import (
    Cache,
    Matrix,
    Place,
    UseMmap,
    as_matrix,
    is_of_content,
    is_url,
    open_matrix,
    open_place,
    shown,
)
from dasksc.storage.hdf5.strings import read_strings
from dasksc.storage.remote.places import ZARR_MARKERS
from dasksc.storage.safety import hdf5 as hdf5_guard
from dasksc.storage.safety import zarr as zarr_guard
from dasksc.storage.safety.decompression_limits import DEFLATE_RATIO
from dasksc.storage.safety.hdf5_links import check_item, check_links
from dasksc.storage.zarr.reader import ZarrFile

__all__ = [
    "AnnDataView",
    "Openable",
    "check_mmap",
    "encode_column",
    "holds_modalities",
    "is_several",
    "known",
    "open",
    "open_modalities",
    "several_of",
    "split_columns",
    "stem_of",
]

logger = logging.getLogger("dasksc.collection")

Openable: TypeAlias = str | os.PathLike[str] | AnnData

ACCEPTED = (
    "the path of an .h5ad file, the path of a Zarr store (a directory), an AnnData (in memory, backed, or of Dask "
    "arrays), or several: a list or dict of these, a pattern such as 'atlas/*.h5ad', or a directory of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What `open` was told, for everything that it opens, however deep in the file.

    Parameters
    ----------
    mmap
        Whether uncompressed files of this machine are mapped into memory, as for `open`.
    has_names
        Whether the names of cells are read.
    may_lack
        Whether columns of obs that were asked for may be missing: of several atlases, some may lack what others have.
    storage_options
        How what is behind a URL is reached.
    cache
        Where blocks of what is read are kept. None: what Dask's configuration says, for URLs only.
    """

    mmap: UseMmap = "auto"
    has_names: bool = True
    may_lack: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    cache: Cache | None = None

    def cache_of_places(self) -> Cache | None:
        """Return the cache of what is read by way of a `Place`: the one given, or that of the configuration."""
        return self.cache or Cache.of(config.get("cache"))


def where_of(path: str, options: OpenOptions) -> str | Place:
    """Return the place of a URL, or of a path that is read through a cache; of other paths, the absolute path."""
    place = Place.of(path, options.storage_options) if is_url(path) else None
    # Absolute, because tasks may run in processes with another working directory.
    local = os.path.abspath(path) if place is None else place.local
    if local is None:
        assert place is not None
        return place
    if not os.path.exists(local):
        raise MissingPathError(_nothing_at(local))
    return local if options.cache is None else Place.of_local(local)


# A chunk is decoded as a whole: how much larger than its array it may be. Tables and uns may take as much of memory
# whatever is stored for them.
_ROOM_BYTES = 2**30
_FEW_NAMES = 100_000


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

    Returns
    -------
    AnnData
        ``X``, ``layers``, ``obsm`` and ``raw.X`` are Dask arrays, and so is ``obsp`` when a path is opened;
        nothing of them has been read. obsm entries that are not numeric matrices (tables, images)
        are read as AnnData reads them.

    Raises
    ------
    InputError
        If `data` is of another kind, or several do not fit together, such as by ``"inner"`` without a common variable.
    MissingPathError
        If there is nothing at the path.
    StorageError
        If what is there is not an AnnData file or store (`CorruptDataError`: a damaged one).
    MissingKeyError
        If obs has no column of a name in `obs`, or there is no raw.
    """
    if isinstance(obs, str):
        raise InputError(f"obs={obs!r} is a string; give a list of column names: obs=[{obs!r}]")
    check_mmap(mmap)
    if join not in ("inner", "outer"):
        raise InputError(f"join={join!r} is neither 'inner' nor 'outer'")
    if merge not in (None, *MERGES) and not callable(merge):
        raise InputError(f"merge={merge!r} is none of {', '.join(map(repr, MERGES))}; leave it out for none")
    check_fill_value(fill_value, join)
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
    with _unchecked():
        parts = parts_of(data, options.storage_options)
        if parts == []:
            raise InputError(f"there is nothing to open in {data!r}")
        # A pattern or folder may stand for one, which is then as if it had been given.
        if parts is None or (len(parts) == 1 and isinstance(data, str | os.PathLike)):
            result = _open_one(data if parts is None else parts[0].data, obs, options)
            if raw:
                result = _raw_of(result, quoted(data))
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
    if not names:
        _number_rows(result)
    elif _repeat(result.obs_names):
        is_path = isinstance(data, str | os.PathLike)
        what = quoted(data) if is_path else "the AnnData given" if parts is None else f"{len(parts)} atlases"
        logger.warning("obs_names repeat in %s; %s", what, remedy)
    # Of an AnnData that a data set opens again it was said when it was made.
    if (names or not isinstance(data, AnnData)) and not result.var_names.is_unique:
        logger.warning("var_names repeat; adata.var_names_make_unique() makes them unique")
    return result


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
        opened = [_raw_of(adata, name) for adata, name in zip(opened, names, strict=True)]
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


@contextmanager
def _unchecked() -> Iterator[None]:
    """Keep AnnData from looking for repeated names at each step; what is opened is looked at once."""
    with anndata.settings.override(check_uniqueness=False):
        yield


def _repeat(names: pd.Index[Any]) -> bool:
    """Return whether names repeat; hashes are quicker to sort than names are to look up."""
    if len(names) < _FEW_NAMES:
        return not names.is_unique
    hashes = np.fromiter(map(hash, names.to_numpy()), dtype=np.int64, count=len(names))
    hashes.sort()
    return bool((hashes[1:] == hashes[:-1]).any()) and not names.is_unique


def _nameless(n: int) -> pd.Index[Any]:
    """Return an index of `n` rows that AnnData takes for one of strings, and of which none is made."""
    return pd.CategoricalIndex(pd.Categorical.from_codes(np.zeros(n, dtype=np.int8), categories=[""]))  # type: ignore[arg-type, unused-ignore]


def _number_rows(adata: AnnData) -> None:
    """Replace what `_nameless` returned by numbers, which AnnData would make strings of where it builds anything."""
    tables = [table for table in adata.obsm.values() if isinstance(table, pd.DataFrame)]
    for table in (adata.obs, *tables):
        table.index = pd.RangeIndex(adata.n_obs)


def _open_one(data: Any, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    if isinstance(data, AnnData):
        return _open_anndata(data, obs, options)
    if isinstance(data, str | os.PathLike):
        return _open_path(os.fspath(data), obs, options)
    raise InputError(
        f"cannot open an object of type {type(data).__module__}.{type(data).__qualname__}; expected {ACCEPTED}"
    )


def _open_part(part: Part, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    if part.obs is None:
        return _open_one(part.data, obs, options)
    return _open_anndata(part.data, obs, options, table=part.obs)


def _raw_of(adata: AnnData, name: str) -> AnnData:
    if adata.raw is None:
        raise MissingKeyError(f"{name} has no raw; leave out raw=True")
    return AnnData(
        X=adata.raw.X,
        obs=adata.obs,
        var=adata.raw.var,
        uns=adata.uns,
        obsm=dict(adata.obsm),
        varm=dict(adata.raw.varm),
    )


def check_mmap(mmap: Any) -> None:
    """Refuse what is no way of reading files."""
    if not (isinstance(mmap, bool) or mmap == "auto"):
        raise InputError(f"mmap={mmap!r} must be True, False or 'auto'")


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


def known(kind: str, name: str, held: Any) -> str:
    """Return `name` if `held` has it; else raise an error that says which of `held` are near it."""
    if name in held:
        return name
    names = [str(one) for one in held]
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {names[:20]}"
    raise MissingKeyError(f"{kind} has no {name!r}; {hint}")


def holds_modalities(path: str) -> bool:
    """Return whether at a path there is a MuData: an ``.h5mu`` file, or a Zarr store of this machine with modalities.

    What is behind a URL is known by its ending only, or once it is open.
    """
    place = Place.of(path) if is_url(path) else None
    if place is not None and place.local is None:
        return place.key.endswith(".h5mu")
    local = path if place is None or place.local is None else place.local
    return local.endswith(".h5mu") or (
        os.path.isdir(os.path.join(local, "mod")) and any(os.path.exists(os.path.join(local, m)) for m in ZARR_MARKERS)
    )


def open_modalities(
    path: str,
    obs: Sequence[str] | None,
    *,
    mmap: UseMmap,
    storage_options: Mapping[str, Any] | None,
    cache: str | os.PathLike[str] | Mapping[str, Any] | None,
    raw: bool,
) -> tuple[AnnData, dict[str, AnnData]]:
    """Open a stored MuData: its own obs and obsm, and its modalities, as AnnData of Dask arrays; rows as stored.

    Parameters
    ----------
    path
        Of an ``.h5mu`` file or a Zarr store, or the URL of one.
    obs
        The columns to read, as `split_columns` takes them.
    mmap, storage_options, cache, raw
        As for `open`; `raw` is that of each modality.
    """
    options = OpenOptions(mmap=mmap, storage_options=dict(storage_options or {}), cache=Cache.of(cache))
    with _unchecked():
        where = where_of(path, options)
        with _reading(where), _root_of(where, options) as root:
            if "mod" not in root or "obs" not in root:
                raise StorageError(f"{where} holds no MuData: there is {', '.join(sorted(root)) or 'nothing'} in it")
            order = [str(name) for name in root["mod"].attrs.get("mod-order", sorted(root["mod"]))]
            held = {name: _column_names(root["mod"][name]["obs"]) for name in order}
            own, columns = split_columns(obs, _column_names(root["obs"]), held)
            # MuData keeps there, by the names of modalities, which cells each has.
            stored = {name: root["obsm"][name] for name in root.get("obsm", ()) if name not in order}
            read = [item for item in stored.values() if not _is_left(item)]
            _check_before_reading(where, {"obs": _columns_of(root["obs"], own, options), "obsm": read})
            mod = {name: _read_root(where, root["mod"][name], columns[name], options) for name in order}
            shared = _bare(
                _read_table(root["obs"], own, where, options),
                {name: _lazy_element(where, item, options) for name, item in stored.items()},
                options,
            )
    return shared, {name: _raw_of(adata, name) for name, adata in mod.items()} if raw else mod


def split_columns(
    obs: Sequence[str] | None, own: Collection[str], held: Mapping[str, Collection[str]]
) -> tuple[list[str] | None, dict[str, list[str] | None]]:
    """Return which columns are meant of a MuData's own obs, and which of each modality; None: all.

    Parameters
    ----------
    obs
        Names; of modalities as ``"modality:column"``. None: all.
    own
        The columns that its own obs has. It may have copies of those of modalities, which go before.
    held
        The columns of each modality.
    """
    if obs is None:
        return None, dict.fromkeys(held)
    of_own: list[str] = []
    of_modality: dict[str, list[str]] = {name: [] for name in held}
    for name in obs:
        modality, _, column = name.partition(":")
        if modality in held and (column in held[modality] or name not in own) and column:
            of_modality[modality].append(column)
        else:
            of_own.append(name)
    return of_own, dict(of_modality)


def _bare(obs: pd.DataFrame, obsm: dict[str, Any], options: OpenOptions) -> AnnData:
    """Return a table and what is beside it of rows, without any genes."""
    return _assemble(
        x=None,
        obs=obs,
        var=pd.DataFrame(index=pd.Index([], dtype=str)),
        uns={},
        layers={},
        obsm=obsm,
        varm={},
        obsp={},
        varp={},
        raw=None,
        options=options,
    )


def encode_column(series: pd.Series[Any], *, narrow: bool = False) -> tuple[NDArray[Any], list[Any] | None]:
    """Turn an obs column into numbers.

    Parameters
    ----------
    series
        Categorical, string, boolean, numeric, or of dates or durations; the nullable pandas types too.
    narrow
        Leave codes in the type that they are held in, which may be one byte wide.

    Returns
    -------
    tuple[NDArray, list or None]
        Values of shape (n_obs,), in native byte order, and labels. Categoricals and strings become
        int64 codes into the labels (categories in their order; strings sorted), -1 where missing.
        Booleans stay bool and numbers keep their dtype, with no labels. With missing values, nullable
        numbers become float64 with NaN, and nullable booleans int64 codes into ``[False, True]``,
        -1 where missing. Dates become float64 seconds since the beginning of 1970 (UTC; those without a time
        zone are taken as they are), and durations seconds, NaN where missing.

    Raises
    ------
    InputError
        If the column holds anything else (periods, mixed objects).
    """
    values, labels = _encoded(series)
    return (values if labels is None or narrow else values.astype(np.int64, copy=False)), labels


def _encoded(series: pd.Series[Any]) -> tuple[NDArray[Any], list[Any] | None]:
    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _codes(series.array)
    if pd.api.types.is_bool_dtype(dtype):
        if not series.hasnans:
            return series.to_numpy(dtype=bool), None
        codes = series.astype("Int8").fillna(-1).to_numpy(dtype=np.int8)
        return codes, [False, True]
    if pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return _numbers(series), None
    if isinstance(dtype, pd.DatetimeTZDtype):
        return _encoded(series.dt.tz_convert("UTC").dt.tz_localize(None))
    if dtype.kind in "mM":
        return _seconds(series), None
    if pd.api.types.is_string_dtype(dtype) or pd.api.types.is_object_dtype(dtype):
        return _encode_objects(series)
    raise InputError(
        f"obs column {series.name!r} has dtype {dtype}, which has no tensor form. "
        "Convert it to numbers, strings or categories first."
    )


# What of an AnnData has nothing to do with the names of its cells.
_WITHOUT_NAMES = {"isbacked", "layers", "n_obs", "n_vars", "raw", "shape", "uns", "var", "var_names", "varm", "varp"}


class AnnDataView:
    """An AnnData of Dask arrays, as the hooks of a dataset see it.

    ``view[rows]`` reads one fetch of each of X, layers and obsm; every other attribute is that of the
    AnnData.

    Parameters
    ----------
    adata
        What `open` returned.
    with_names
        Opens the same with the names of cells, once they are asked for; None: `adata` has them.
    opening
        Opens the same as `open` does, for columns of obs that `adata` leaves out; None: it has all.
    """

    __slots__ = ("_matrices", "_opened", "_opening", "_with_names")

    def __init__(
        self,
        adata: AnnData,
        with_names: Callable[[], AnnData] | None = None,
        opening: Callable[..., AnnData] | None = None,
    ) -> None:
        self._opened = adata
        self._opening = opening
        self._with_names = with_names
        self._matrices: dict[str, Matrix] = {}

    @property
    def adata(self) -> AnnData:
        """The AnnData seen through this view."""
        return self._adata

    @property
    def table(self) -> pd.DataFrame:
        """The obs columns that were read, with or without names."""
        return self._opened.obs

    def column(self, name: str) -> pd.Series[Any]:
        """Return a column of obs, which is read now if it was left out."""
        if self._opening is not None and name not in self.table:
            return self._opening(obs=[name], names=False).obs[name]
        return self.table[known("obs", name, self.table)]

    @property
    def _adata(self) -> AnnData:
        if self._with_names is not None:
            self._opened, self._with_names = self._with_names(), None
        return self._opened

    @property
    def X(self) -> Any:
        """X as an array whose rows are read when it is indexed."""
        array = self._opened.X
        return MatrixRows(matrix=self._matrix("X", array)) if isinstance(array, da.Array) else array

    def __len__(self) -> int:
        return int(self._opened.n_obs)

    def __getattr__(self, name: str) -> Any:
        # Pickle looks for special methods before the slots are set.
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self._opened if name in _WITHOUT_NAMES else self._adata, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._opened, self._with_names, self._opening)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._opened!r}"

    def _matrix(self, name: str, array: da.Array) -> Matrix:
        if name not in self._matrices:
            self._matrices[name] = matrix_of(array)
        return self._matrices[name]

    def __getitem__(self, index: Any) -> AnnData:
        """Read rows into memory.

        Parameters
        ----------
        index
            Row numbers in any order, repeats allowed; or a slice, a boolean mask, names; or one of these
            and, as AnnData has it, a second index for columns.

        Returns
        -------
        AnnData
            In memory: those rows of obs, X, layers and obsm in the order asked for, with var, varm and
            uns. Without obsp and raw.

        Raises
        ------
        IndexError
            If any row lies outside [0, n_obs).
        MissingKeyError
            If a name is not in obs_names.
        """
        if isinstance(index, tuple):
            rows, columns = index
            return self[rows][:, columns].copy()
        adata = self._adata
        rows = _row_numbers(index, adata.obs_names)
        unique, positions = np.unique(rows, return_inverse=True)

        def read(name: str, array: Any) -> Any:
            if isinstance(array, da.Array) and array.ndim == 2:
                return gather_block(self._matrix(name, array).fetch(unique), positions)
            return _take(array, rows)

        obs = adata.obs.iloc[rows]
        names = obs.index
        # AnnData warns of repeated names when it is built; here they only say that rows were drawn twice.
        result = AnnData(
            X=None if adata.X is None else read("X", adata.X),
            obs=obs.set_axis(pd.RangeIndex(len(rows)).astype(str)),
            var=adata.var,
            uns=adata.uns,
            layers={name: read(f"layers/{name}", array) for name, array in _layers(adata).items()},
            obsm={
                name: read(f"obsm/{name}", array)
                for name, array in adata.obsm.items()
                if not isinstance(array, pd.DataFrame)
            },
            varm=dict(adata.varm),
        )
        result.obs_names = names
        for name, table in adata.obsm.items():
            if isinstance(table, pd.DataFrame):
                result.obsm[name] = table.iloc[rows]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unwrapped:
    """A matrix that is to become a Dask array; `token` as for `to_dask`."""

    matrix: Matrix
    token: str | None = None


def _stored(path: str | Place, key: str, options: OpenOptions) -> _Unwrapped:
    cache = options.cache_of_places() if isinstance(path, Place) else None
    return _Unwrapped(matrix=open_matrix(path, key.strip("/"), use_mmap=options.mmap, cache=cache))


def _open_anndata(
    adata: AnnData, obs: Sequence[str] | None, options: OpenOptions, *, table: pd.DataFrame | None = None
) -> AnnData:
    """Open an AnnData, with `table` in place of its obs."""
    table = _in_memory(adata.obs if table is None else table)
    if not options.has_names:
        table = table.set_axis(_nameless(len(table)))
    if obs is not None:
        table = table[_known_columns(obs, table.columns, "the AnnData given", may_lack=options.may_lack)]
    x, raw = adata.X if not adata.isbacked else None, None
    if adata.isbacked:
        path = os.path.abspath(adata.filename)
        with _reading(path):
            x = _backed_x(path, adata, options)
            # Of the raw of a backed view AnnData itself knows the rows only.
            if adata.raw is not None and not adata.is_view:
                key = "raw/X" if "raw/X" in adata.file else "raw.X"
                x_of_raw = _stored(path, adata.file[key].name, options)
                raw = {"X": x_of_raw, "var": adata.raw.var, "varm": dict(adata.raw.varm)}
    elif adata.raw is not None:
        raw = {"X": _lazy(adata.raw.X, "raw/X", options), "var": adata.raw.var, "varm": dict(adata.raw.varm)}
    return _assemble(
        x=_lazy(x, "X", options),
        obs=table,
        var=_in_memory(adata.var),
        uns=adata.uns,
        layers={name: _lazy(array, f"layers/{name}", options) for name, array in _layers(adata).items()},
        obsm={
            name: (
                array.set_axis(table.index)
                if isinstance(array, pd.DataFrame)
                else _lazy(array, f"obsm/{name}", options)
            )
            for name, array in adata.obsm.items()
        },
        varm=dict(adata.varm),
        obsp=dict(adata.obsp),
        varp=dict(adata.varp),
        raw=raw,
        options=options,
    )


def _layers(adata: AnnData) -> dict[str, Any]:
    # From AnnData 0.13 on, layers[None] is X, which a backed file need not have.
    return {name: adata.layers[name] for name in adata.layers if name is not None}


def _in_memory(table: Any) -> pd.DataFrame:
    """A frame of its own over the same columns; AnnData has lazy tables and views of tables too."""
    return pd.DataFrame(table if isinstance(table, pd.DataFrame) else table.to_memory(), copy=False)


def _backed_x(path: str, adata: AnnData, options: OpenOptions) -> da.Array | _Unwrapped | None:
    """X of a backed AnnData, through our readers; of a view, its rows and columns."""
    if "X" not in adata.file:
        return None
    # A modality of a MuData is a group of the file.
    stored = _stored(path, adata.file["X"].name, options)
    if not adata.is_view:
        return stored
    # AnnData keeps what a view selects in these; going by names would fail where they repeat.
    array = to_dask(stored.matrix)
    n_obs, n_vars = array.shape
    taken: da.Array = array[np.arange(n_obs)[adata._oidx], :][:, np.arange(n_vars)[adata._vidx]]
    return taken


def _lazy(array: Any, label: str, options: OpenOptions) -> Any:
    """The matrix over an array, shared; a Dask array, or what is no numeric matrix, as it is."""
    if isinstance(array, da.Array | _Unwrapped):
        return array
    stored = getattr(array, "group", array)
    if isinstance(stored, h5py.Group) or (isinstance(stored, h5py.Dataset) and _is_numeric_matrix(stored)):
        return _stored(os.path.abspath(stored.file.filename), stored.name, options)
    if isinstance(stored, zarr.Group) or (isinstance(stored, zarr.Array) and _is_numeric_matrix(stored)):
        root = getattr(stored.store, "root", None)
        if root is None:
            raise InputError(
                f"{label} is a Zarr array in {stored.store}; Zarr stores are read from a local directory only"
            )
        return _stored(os.path.abspath(root), stored.path, options)
    if sp.issparse(array) or (isinstance(array, np.ndarray) and _is_numeric_matrix(array)):
        # Hashing what is in memory would cost a pass over it, and it may be edited in place.
        return _Unwrapped(matrix=as_matrix(array, label), token=uuid.uuid4().hex)
    return array


def _is_numeric_matrix(array: Any) -> bool:
    return len(array.shape) == 2 and np.dtype(array.dtype).kind in "biuf"


def _open_path(path: str, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    if holds_modalities(path):
        _refuse_modalities(path)
    where = where_of(path, options)
    with _reading(where), _root_of(where, options) as root:
        if "mod" in root and _is_group(root["mod"]):
            _refuse_modalities(path)
        missing = [name for name in ("obs", "var") if name not in root]
        if missing:
            raise StorageError(
                f"{where} holds no AnnData: it has no {' and no '.join(missing)}, "
                f"only {', '.join(sorted(root)) or 'nothing'}"
            )
        return _read_root(where, root, obs, options)


def _refuse_modalities(path: str) -> NoReturn:
    raise InputError(
        f"{shown(path) if is_url(path) else path} holds several modalities; open it by dasksc.Modalities(...), which "
        "takes the same path and storage_options, and may be given to scDataset"
    )


def _nothing_at(path: str) -> str:
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        return f"there is nothing at {path}, nor is {folder} a directory"
    near = difflib.get_close_matches(name, os.listdir(folder), n=3)
    return f"there is nothing at {path}" + (f"; near it: {', '.join(near)}" if near else "")


@contextmanager
def _root_of(path: str | Place, options: OpenOptions) -> Iterator[Any]:
    if isinstance(path, Place):
        with open_place(path, cache=options.cache_of_places()) as root:
            yield root
        return
    if os.path.isdir(path):
        if not any(os.path.exists(os.path.join(path, marker)) for marker in ZARR_MARKERS):
            raise StorageError(
                f"{path} is a directory but not a Zarr group (it holds none of {', '.join(ZARR_MARKERS)}), nor are "
                f"there .h5ad files or .zarr stores in it. Expected {ACCEPTED}."
            )
        yield ZarrFile(path).root()
        return
    if not h5py.is_hdf5(path):
        raise CorruptDataError(
            f"{path} ({os.path.getsize(path)} bytes) is not an HDF5 file, or its beginning is damaged. "
            f"Expected {ACCEPTED}; a zipped store must be unpacked first."
        )
    with h5py.File(path, "r") as file:
        check_links(file, path, folder=os.path.dirname(path))
        yield file


@contextmanager
def _reading(path: str | Place) -> Iterator[None]:
    """Name the file in whatever the libraries raise, and keep old files from warning once per element."""
    with warnings.catch_warnings(), zarr_guard.chunks_that_fit():
        warnings.simplefilter("ignore", OldFormatWarning)
        warnings.filterwarnings("ignore", message="Moving element from", category=FutureWarning)
        # AnnData 0.13 asks pandas 3 for an option that is going away.
        warnings.filterwarnings("ignore", message="The 'future.infer_string' option")
        try:
            yield
        except (StorageError, InputError):
            raise
        except OSError as error:
            if "truncated" in str(error) and not isinstance(path, Place):
                raise CorruptDataError(
                    f"{path} is truncated ({os.path.getsize(path)} bytes are there): {error}. Copy it again."
                ) from error
            raise StorageError(f"{path} cannot be read: {error}") from error
        # Whatever the libraries raise on damaged metadata.
        except Exception as error:
            if not is_of_content(error):
                error.add_note(f"while {path} was opened")
                raise
            raise StorageError(f"{path} cannot be read as AnnData: {error}") from error


def _read_root(path: str | Place, root: Any, obs: Sequence[str] | None, options: OpenOptions) -> AnnData:
    def lazily(stored: Any) -> Any:
        return _lazy_element(path, stored, options)

    _check_before_reading(path, _read_whole(root, obs, options))
    uns = _read_mapping(root, "uns", read_elem)
    tables = [
        _read_table(root["obs"], obs, path, options),
        _read_table(root["var"], None, path, replace(options, has_names=True)),
    ]
    if _is_record_array(root["obs"]):
        tables = _decode_old_categories(tables, uns)
    if obs is not None:
        wanted = _known_columns(obs, tables[0].columns, path, may_lack=options.may_lack)
        if list(tables[0].columns) != wanted:  # columns that are taken are copied
            tables[0] = tables[0][wanted]
    return _assemble(
        x=lazily(root["X"]) if "X" in root else None,
        obs=tables[0],
        var=tables[1],
        uns=uns,
        layers=_read_mapping(root, "layers", lazily),
        obsm={
            name: value.set_axis(tables[0].index) if isinstance(value, pd.DataFrame) else value
            for name, value in _read_mapping(root, "obsm", lazily).items()
        },
        varm=_read_mapping(root, "varm", read_elem),
        obsp=_read_mapping(root, "obsp", lazily),
        varp=_read_mapping(root, "varp", read_elem),
        raw=_read_raw(path, root, options),
        options=options,
    )


def _read_raw(path: str | Place, root: Any, options: OpenOptions) -> dict[str, Any] | None:
    if "raw" in root:
        raw = root["raw"]
        if _is_null(raw):
            return None
        parts = {name: raw[name] for name in ("X", "var", "varm") if name in raw}
    else:
        # As written before AnnData 0.7.
        parts = {name: root[f"raw.{name}"] for name in ("X", "var", "varm") if f"raw.{name}" in root}
    if "X" not in parts or "var" not in parts:
        return None
    return {
        "X": _lazy_element(path, parts["X"], options),
        "var": _read_table(parts["var"], None, path, replace(options, has_names=True)),
        "varm": _read_mapping(parts, "varm", read_elem),
    }


def _lazy_element(path: str | Place, stored: Any, options: OpenOptions) -> Any:
    """The matrix of a stored element, unread; an element that is no numeric matrix, read."""
    if _is_null(stored):
        return None
    return _stored(_path_of(stored, path), stored.name, options) if _is_left(stored) else read_elem(stored)


def _is_left(stored: Any) -> bool:
    """Whether a stored element is a matrix whose values are left where they are."""
    encoding = stored.attrs.get("encoding-type", "")
    if isinstance(stored, h5py.Group | zarr.Group):
        return encoding in ("csr_matrix", "csc_matrix") or "h5sparse_format" in stored.attrs
    return encoding in ("array", "") and _is_numeric_matrix(stored)


def _path_of(stored: Any, path: str | Place) -> str | Place:
    """The file that an element is in: a link of HDF5 may lead to another one."""
    if isinstance(path, Place) or isinstance(stored, zarr.Group | zarr.Array):
        return path
    check_item(stored, path, folder=os.path.dirname(path))
    return os.path.abspath(str(stored.file.filename))


def _read_mapping(parent: Any, name: str, read: Callable[[Any], Any]) -> dict[str, Any]:
    if name not in parent or _is_null(parent[name]):
        return {}
    stored = parent[name]
    if _is_record_array(stored):
        # obsm and varm before AnnData 0.7: one record per row, one field per entry.
        fields = {field: np.ascontiguousarray(stored[()][field]) for field in stored.dtype.names}
        return {field: array[:, None] if array.ndim == 1 else array for field, array in fields.items()}
    return {key: read(stored[key]) for key in stored}


def _read_table(stored: Any, columns: Sequence[str] | None, path: str | Place, options: OpenOptions) -> pd.DataFrame:
    """Read obs or var; only `columns`, where the encoding keeps columns apart."""
    if _is_record_array(stored):
        records = stored[()]
        table = pd.DataFrame({name: _decoded(records[name]) for name in records.dtype.names})
        table = table.set_index(table.columns[0])
    else:
        _check_table(stored, path)
        version = stored.attrs.get("encoding-version")
        if version == "0.2.0" or (columns is not None and version != "0.1.0"):
            return _read_columns(stored, columns, path, options)
        table = read_elem(stored)
    return table if options.has_names else table.set_axis(_nameless(len(table)))


def _read_columns(stored: Any, columns: Sequence[str] | None, path: str | Place, options: OpenOptions) -> pd.DataFrame:
    """Read a table column by column, nothing of it that is not asked for."""
    order = _column_order(stored)
    kept = order if columns is None else _known_columns(columns, order, path, may_lack=options.may_lack)
    index_key = stored.attrs["_index"]
    if options.has_names:
        index = _read_names(stored[index_key], path, options)
    else:
        index = _nameless(_lengths(stored)[index_key])
    table = pd.DataFrame({name: read_elem(stored[name]) for name in kept}, index=index, columns=kept)
    if index_key != "_index" and options.has_names:
        table.index.name = index_key
    return table


def _read_names(stored: Any, path: str | Place, options: OpenOptions) -> Any:
    """Read the names of rows; those of a local HDF5 file by way of its bytes, if that can be."""
    names = None
    if isinstance(stored, h5py.Dataset) and not isinstance(path, Place) and options.mmap is not False:
        names = read_strings(stored, path)
    # Of all names pandas finds the type that it finds of one, in 40 bytes for each.
    return read_elem(stored) if names is None else pd.Index(names, dtype=pd.Index(names[:1]).dtype)


def _check_table(stored: Any, path: str | Place) -> None:
    """Refuse a table that contradicts itself, before anything is made as large as its longest column."""
    lengths = _lengths(stored)
    if len(set(lengths.values())) > 1:
        longest, shortest = max(lengths, key=lengths.__getitem__), min(lengths, key=lengths.__getitem__)
        raise CorruptDataError(
            f"{path}:{stored.name} has columns of different lengths: {longest!r} has {lengths[longest]} values, "
            f"{shortest!r} {lengths[shortest]}. The file is corrupt; write it again from its source."
        )


def _lengths(stored: Any) -> dict[str, int]:
    """Return the length of every column of a stored table."""
    lengths: dict[str, int] = {}
    for name in stored:
        item = stored[name]
        if isinstance(item, h5py.Group | zarr.Group):  # categories and nullable values
            item = next((item[part] for part in ("codes", "values") if part in item), None)
        if item is not None and len(item.shape) >= 1:
            lengths[name] = item.shape[0]
    return lengths


def _read_whole(root: Any, obs: Sequence[str] | None, options: OpenOptions) -> dict[str, list[Any]]:
    """Return what opening reads as a whole, by the group that it is in: all but the matrices, and columns not named."""
    whole = {name: [root[name]] for name in ("var", "uns", "varm", "varp") if name in root}
    whole["obs"] = _columns_of(root["obs"], obs, options)
    for name in ("X", "layers", "obsm", "obsp"):
        if name in root:
            stored = root[name]
            inside = [stored] if name == "X" or not _is_group(stored) else [stored[key] for key in stored]
            whole[name] = [item for item in inside if not _is_left(item)]
    old = {name: root[f"raw.{name}"] for name in ("X", "var", "varm") if f"raw.{name}" in root}
    raw = root["raw"] if "raw" in root and _is_group(root["raw"]) else old
    whole["raw"] = [raw[name] for name in ("X", "var", "varm") if name in raw]
    whole["raw"] = [item for item in whole["raw"] if not _is_left(item)]
    return whole


def _columns_of(stored: Any, columns: Sequence[str] | None, options: OpenOptions) -> list[Any]:
    """Return what is read of a table, the parts of `columns` and its index; the table itself, if that is all of it."""
    is_whole = columns is None and options.has_names
    if is_whole or not _is_group(stored) or stored.attrs.get("encoding-version") == "0.1.0":
        return [stored]
    index_key = stored.attrs.get("_index")
    wanted = set(stored if columns is None else columns) - {index_key} | ({index_key} if options.has_names else set())
    return [stored[name] for name in stored if name in wanted]


def _check_before_reading(path: str | Place, groups: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what lies in other files, or in no memory, before any of it is read."""
    arrays = {name: [array for item in items for array in _arrays_in(item, path)] for name, items in groups.items()}
    sizes = {name: sum(map(_nbytes, held)) for name, held in arrays.items()}
    n_bytes, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    memory = memory_limit().n_bytes if n_bytes > _ROOM_BYTES else n_bytes
    if n_bytes > memory:
        raise StorageError(
            f"{path} has {n_bytes} bytes beside its matrices, {sizes[largest]} of them in {largest}, and this machine "
            f"{memory} bytes of memory. Name the columns of obs that you need: obs=[...]; if it cannot be so large, "
            "the file is corrupt."
        )
    if n_bytes > _ROOM_BYTES:
        # Compared as a whole: a single column may well hold one value a billion times.
        needed = -(-(n_bytes - _ROOM_BYTES) // DEFLATE_RATIO)
        stored = _stored_bytes(path, [array for held in arrays.values() for array in held], enough=needed)
        if stored < needed:
            raise CorruptDataError(
                f"{path} claims {n_bytes} bytes beside its matrices, {sizes[largest]} of them in {largest}, for which "
                f"the {stored} bytes stored there have no room. The file is corrupt, or made to fill memory; write it "
                "again from its source."
            )


def _stored_bytes(path: str | Place, arrays: Sequence[Any], *, enough: int) -> int:
    """Return what is stored for arrays, or at least `enough` if that is more or cannot be told cheaply."""
    if all(isinstance(array, h5py.Dataset) for array in arrays):
        return hdf5_guard.stored_bytes(arrays)
    # Behind a URL each chunk would be a request.
    return enough if isinstance(path, Place) else zarr_guard.stored_bytes(path, arrays, enough=enough)


def _arrays_in(stored: Any, path: str | Place) -> Iterator[Any]:
    """Yield the arrays of a stored element, through links of HDF5 as far as they may lead."""
    if isinstance(stored, h5py.Group | h5py.Dataset) and not isinstance(path, Place):
        check_item(stored, path, folder=os.path.dirname(path))
    if not _is_group(stored):
        if stored.chunks and math.prod(stored.chunks) * _item_bytes(stored) > _nbytes(stored) + _ROOM_BYTES:
            raise CorruptDataError(
                f"{path}:{stored.name} has shape {stored.shape} and is stored in chunks of {stored.chunks}, far larger "
                "ones than it needs. The file is corrupt; write it again from its source."
            )
        if isinstance(stored, h5py.Dataset) and stored.chunks:
            hdf5_guard.check_chunks(stored, f"{path}:{stored.name}")
        yield stored
        return
    for name in stored:
        yield from _arrays_in(stored[name], path)


def _nbytes(array: Any) -> int:
    return math.prod(array.shape or ()) * _item_bytes(array)  # HDF5's null has no shape


def _item_bytes(array: Any) -> int:
    return int(np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype)).itemsize)


def _is_group(stored: Any) -> bool:
    return isinstance(stored, h5py.Group | zarr.Group)


def _column_names(stored: Any) -> list[str]:
    return list(stored.dtype.names) if _is_record_array(stored) else _column_order(stored)


def _column_order(stored: Any) -> list[str]:
    return [str(name) for name in stored.attrs["column-order"]]


def _decode_old_categories(tables: list[pd.DataFrame], uns: dict[str, Any]) -> list[pd.DataFrame]:
    """Decode the categoricals of AnnData before 0.7: codes in the table, "<name>_categories" in uns."""
    suffix = "_categories"
    for key in [key for key in uns if key.endswith(suffix)]:
        name, categories = key.removesuffix(suffix), np.atleast_1d(uns[key])
        for table in tables:
            if name in table and (table[name] < len(categories)).all():
                table[name] = pd.Categorical.from_codes(table[name].to_numpy(), categories)
                uns.pop(key, None)
    return tables


def _decoded(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8").astype(object)
    if values.dtype.kind == "O":
        return np.array([v.decode() if isinstance(v, bytes) else v for v in values], dtype=object)
    return values


def _is_record_array(stored: Any) -> bool:
    return isinstance(stored, h5py.Dataset | zarr.Array) and stored.dtype.names is not None


def _is_null(stored: Any) -> bool:
    return bool(stored.attrs.get("encoding-type", "") == "null")


def _assemble(
    *,
    x: Any,
    obs: pd.DataFrame,
    var: pd.DataFrame,
    uns: Mapping[str, Any],
    layers: dict[str, Any],
    obsm: dict[str, Any],
    varm: dict[str, Any],
    obsp: dict[str, Any],
    varp: dict[str, Any],
    raw: dict[str, Any] | None,
    options: OpenOptions,
) -> AnnData:
    """Build the AnnData, wrapping matrices as Dask arrays; X and the layers in the same chunks."""
    # Before they become Dask arrays, which have a chunk for every so many rows.
    for array in (x, *layers.values(), *obsm.values(), *obsp.values(), (raw or {}).get("X")):
        if isinstance(array, _Unwrapped) and array.matrix.shape[0] != len(obs):
            raise CorruptDataError(
                f"{array.matrix.label} has {array.matrix.shape[0]} rows, and obs {len(obs)}. The file is corrupt; "
                "write it again from its source."
            )
    alike = [array.matrix for array in (x, *layers.values()) if isinstance(array, _Unwrapped)]
    chunk_rows = chunk_rows_for(*alike) if alike else None

    def wrapped(array: Any, chunk_rows: int | None = None) -> Any:
        if not isinstance(array, _Unwrapped):
            return array
        return to_dask(array.matrix, chunk_rows=chunk_rows, token=array.token)

    def all_wrapped(arrays: dict[str, Any], chunk_rows: int | None = None) -> dict[str, Any]:
        return {name: wrapped(array, chunk_rows) for name, array in arrays.items() if array is not None}

    return AnnData(
        X=wrapped(x, chunk_rows),
        obs=obs,
        var=var,
        uns=dict(uns),
        layers=all_wrapped(layers, chunk_rows),
        obsm=all_wrapped({name: _lazy(array, f"obsm/{name}", options) for name, array in obsm.items()}),
        varm=varm,
        obsp=all_wrapped(obsp),
        varp=varp,
        raw=None if raw is None else all_wrapped(raw),
        shape=(len(obs), len(var)) if x is None else None,
    )


def _known_columns(wanted: Sequence[str], known: Iterable[str], where: str | Place, *, may_lack: bool) -> list[str]:
    known = list(known)
    missing = [name for name in wanted if name not in known]
    if may_lack:
        wanted = [name for name in wanted if name in known]
    elif missing:
        near = {name: difflib.get_close_matches(str(name), known, n=3) for name in missing}
        hints = "; ".join(f"{name!r}, near {', '.join(map(repr, found))}" for name, found in near.items() if found)
        raise MissingKeyError(
            f"obs of {where} has no column {', '.join(map(repr, missing))}"
            + (f" ({hints})" if hints else "")
            + f". Its columns: {', '.join(map(repr, known[:20]))}{', ...' if len(known) > 20 else ''}"
        )
    return list(dict.fromkeys(wanted))


def _row_numbers(index: Any, names: pd.Index[Any]) -> NDArray[np.int64]:
    """Resolve what AnnData accepts as rows to row numbers."""
    n_obs = len(names)
    if isinstance(index, slice):
        return np.arange(n_obs, dtype=np.int64)[index]
    values = np.atleast_1d(np.asarray(index))
    if values.size == 0:
        return np.empty(0, dtype=np.int64)
    if values.ndim != 1:
        raise InputError(f"rows must be one-dimensional; got an array of shape {values.shape}")
    if values.dtype == bool:
        if len(values) != n_obs:
            raise IndexError(f"a boolean mask of {len(values)} rows cannot index {n_obs} rows")
        return np.flatnonzero(values)
    if values.dtype.kind in "UOT":
        rows = names.get_indexer_for(values)
        if len(rows) != len(values) or (rows < 0).any():
            missing = [name for name in values if name not in names]
            raise MissingKeyError(f"obs_names has no {missing[:5]}" if missing else "obs_names repeat; use numbers")
        return np.asarray(rows, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise InputError(f"rows must be integers, a boolean mask or names; got {values.dtype}")
    rows = values.astype(np.int64)
    rows = np.where(rows < 0, rows + n_obs, rows)
    if rows.min() < 0 or rows.max() >= n_obs:
        raise IndexError(f"rows from {values.min()} to {values.max()} were asked for; there are {n_obs}")
    return rows


def _take(array: Any, rows: NDArray[np.int64]) -> Any:
    return array[rows].compute() if isinstance(array, da.Array) else array[rows]


def _codes(values: pd.Categorical) -> tuple[NDArray[np.integer[Any]], list[Any]]:
    return np.asarray(values.codes), values.categories.tolist()


def _numbers(series: pd.Series[Any]) -> NDArray[Any]:
    if isinstance(series.dtype, pd.api.extensions.ExtensionDtype) and series.hasnans:
        return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
    values = np.asarray(series.to_numpy(dtype=getattr(series.dtype, "numpy_dtype", None)))
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _seconds(series: pd.Series[Any]) -> NDArray[np.float64]:
    values = series.to_numpy()
    whole = values.astype(f"{values.dtype.kind}8[s]")
    # Apart, because nanoseconds since 1970 are more than a float64 can tell.
    rest = (values - whole) / np.timedelta64(1, "s")
    seconds = whole.astype(np.int64) + rest
    return np.where(np.isnat(values), np.nan, seconds)


def _encode_objects(series: pd.Series[Any]) -> tuple[NDArray[Any], list[Any] | None]:
    """Encode a column of strings, or of Python objects that are all of one kind."""
    kind = pd.api.types.infer_dtype(series, skipna=True)
    if kind in ("string", "empty"):
        return _codes(pd.Categorical(series))
    if kind == "boolean":
        return _encoded(series.astype("boolean"))
    if kind in ("integer", "floating", "mixed-integer-float"):
        return _numbers(pd.to_numeric(series)), None
    raise InputError(
        f"obs column {series.name!r} mixes types (pandas finds {kind!r}). Make it all strings, e.g. "
        f"adata.obs[{series.name!r}] = adata.obs[{series.name!r}].astype(str)."
    )

"""Opening of atlases as an AnnData of Dask arrays.

X, the layers, obsm, obsp and raw.X stay on disk until they are computed or fetched. Opening reads obs, the annotations
of genes (var, varm, varp) and uns into memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pandas as pd
from anndata import AnnData

from dasksc._compat import without_collection
from dasksc.atlas.concat import MERGES, Join, check_fill_value, concatenated, joined_obs
from dasksc.atlas.elements import Elements, attach_elements, raw_of, unchecked
from dasksc.atlas.inputs import atlas_inputs, describe_rows, quoted, selected_files
from dasksc.atlas.stored import Extent, open_one, remote_files
from dasksc.checks import check_flags, check_one_of, name_or_none
from dasksc.displays import first_of
from dasksc.errors import DaskscError, InputError, MissingKeyError
from dasksc.readers.arrays import Lazy
from dasksc.readers.names import any_repeat, digest_names, names_in_pieces
from dasksc.readers.options import Openable, OpenOptions, names_given, naming_errors
from dasksc.storage import Cache, ConcatenatedMatrix, UseMmap, is_url
from dasksc.storage.files import advise_ends

logger = logging.getLogger("dasksc.collection")

# Number of files whose metadata are read ahead together, so that opening one seldom waits for a disk.
_N_AHEAD = 64


def open(
    data: Openable | Sequence[Openable] | Mapping[str, Openable] | pd.DataFrame,
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
    feature_types: str | Sequence[str] | None = None,
    genome: str | Sequence[str] | None = None,
    reader_options: Mapping[str, Any] | None = None,
    attach: Mapping[str, str | os.PathLike[str]] | None = None,
    files: str | None = None,
    where: str | None = None,
    on_error: Literal["raise", "skip"] = "raise",
) -> AnnData:
    """Open an atlas lazily, or several atlases as one.

    Parameters
    ----------
    data
        One atlas:

        - path of an ``.h5ad`` file, of a 10x ``.h5`` file (Cell Ranger 2 and later), of a Zarr store (v2 or v3; a
          directory, or a local ``.zarr.zip`` file), of a SOMA experiment, or of a ``.parquet`` file with lists of genes
          and expressions. Paths may be URLs: ``s3://``, ``gs://``, ``az://``, ``https://``,
          ``http://``, ``file://``, and those that fsspec supports.
        - `AnnData` in memory, whose arrays are shared, not copied
        - `AnnData` opened with ``backed="r"``. X is read from its file, and everything else is taken from the object,
          with your changes.
        - `AnnData` of Dask arrays

        Several atlases, which are concatenated along obs:

        - list of atlases, each in any of the other forms listed here, or dict with one atlas per key
        - pattern, such as ``"atlas/*.h5ad"``, or directory, whose files and stores are sorted by name. In patterns,
          ``**`` stands for folders of any depth. A pattern or directory may be a URL, except on web servers,
          which do not list files. A pattern or directory with a single atlas opens that atlas.
        - store of ``dataset_*`` groups, as written by annbatch

        - table with a row for each file (a DataFrame, or the path of a ``.csv``, ``.tsv`` or ``.parquet`` file), with
          `files`

        Files are not rewritten: the columns of X are mapped to the joined variables while the rows of a batch are
        gathered.
    obs
        Columns of obs to read. Default: all of them.
    mmap
        If True, memory-map uncompressed local files, which is the fastest way to read them if their pages stay in
        memory. If a mapped file is truncated during reading, the operating system kills the process; with
        ``mmap=False``, an error is raised instead. ``"auto"`` decides at the beginning of each epoch, and maps files
        if the page cache has room for them within the memory that the process may use.
    names
        If True, read the names of cells. Otherwise obs has a `pandas.RangeIndex`, and opening takes time and memory
        only for the columns read (10^8 names take 10 GB). If you copy an AnnData without names (``adata.copy()``), the
        cell names of the copy are row numbers converted to strings.
    join
        Variables of several atlases to keep: those that all of them share (``"inner"``) or those of any (``"outer"``).
        Matrices of different data types are converted to a common type, with a warning. The result has no obsp, uns
        or varp, and no raw if an atlas lacks it. Unless `join` is ``"outer"``, it has only the layers and entries of
        obsm that all atlases share. `anndata.concat` concatenates the tables.
    label
        Name of a new obs column with the key of each row's atlas.
    keys
        Keys, one per atlas, also for a pattern or directory. Default for paths: their names, with folders if needed to
        distinguish them.
    index_unique
        Text between cell name and key in new names of cells, as in `anndata.concat`.
    merge
        Annotations of variables to keep, such as ``"same"``, as in `anndata.concat`. Default: none.
    fill_value
        With ``join="outer"``, value of the variables, layers and entries of obsm that an atlas lacks. Default: 0 in
        sparse matrices, which support no other value, and NaN in dense ones, with a warning.
    raw
        If True, open ``raw`` instead of X: the X, var and varm of ``raw`` with the obs, obsm and uns of the atlas,
        without layers, obsp and varp. For several atlases, the raw of each is joined in the same way as X.
    storage_options
        Options for URLs: credentials, region and endpoint. Options for the schemes listed under `data` have the names
        that obstore uses; options for other URLs, the names that fsspec's file systems use. Options that are not given
        come from the environment (``AWS_...``, ``GOOGLE_...``, ``AZURE_...``). For public buckets: ``{"skip_signature":
        True}``.
    cache
        Local folder in which blocks are cached after reading, or ``{"path": ..., "limit": "100GiB"}``. If given,
        it also applies to local paths, such as those of a network file system. The default, ``dasksc.cache`` in the
        configuration of Dask, applies to URLs only.
    feature_types
        Feature types of 10x ``.h5`` files to keep: one, such as ``"Gene Expression"``, or several. Default: all. Files
        of Cell Ranger 2 contain only genes.
    genome
        Genomes of 10x ``.h5`` files to keep: one or several. Default: all. A file of Cell Ranger 2 has a separate
        matrix for each genome, with its own cells. If such a file has several genomes, choose one.
    reader_options
        Options of the format of the paths, such as ``{"layer": "raw"}`` for SOMA experiments. The guide to formats
        lists those of SOMA and Parquet.
    attach
        Elements of other stores to add, such as the results of `dasksc.predict`: paths by key,
        ``{"obsm/X_emb": "emb.zarr", "obs/predicted": "emb.zarr"}``. Matrices of obsm stay on disk; columns of obs are
        read. The store must have the same cells in the same order. The number of cells is compared, and also their
        names unless ``names=False``.
    files
        Column of the table `data` with the paths or URLs of the files. Relative paths start at the folder of the table,
        or at the current one for a DataFrame. The other columns describe the files, and become columns of obs.
    where
        Expression over the columns of the table, such as ``"tissue == 'lung'"``, with the syntax of `rows_where`. Files
        for which it does not hold are not opened.
    on_error
        With ``"skip"``, atlases of several that cannot be opened are left out, with a warning that counts them. The
        logger ``dasksc.collection`` lists each at the level INFO.

    Returns
    -------
    AnnData
        AnnData in which ``X``, ``layers``, ``obsm`` and ``raw.X`` are Dask arrays that have not been read. The
        matrices of ``obsp`` are also Dask arrays if `data` is a path. Entries of obsm that are not numeric matrices
        (tables, images) are read by AnnData.

    Raises
    ------
    InputError
        If `data` has an unsupported type, if several atlases cannot be joined (for example, with ``join="inner"`` and
        no common variable), or if the cells of a store in `attach` differ.
    MissingPathError
        If the path does not exist.
    StorageError
        If the path is not an AnnData file or store (`CorruptDataError`: if it is damaged).
    MissingKeyError
        If obs lacks a column in `obs`, there is no raw, a 10x file lacks a feature type or genome, a store in `attach`
        lacks a key, or an experiment lacks the measurement or layer in `reader_options`.

    Examples
    --------
    >>> adata = dasksc.open("atlas.h5ad")
    >>> adata.shape, adata.X.chunks
    ((2000, 300), ((2000,), (300,)))
    >>> plates = dasksc.open("plates/*.h5ad", join="outer", label="plate")
    >>> plates.shape
    (600, 300)
    >>> plates.obs["plate"].value_counts().to_dict()
    {'1': 300, '2': 300}
    """
    if isinstance(obs, str):
        raise InputError(f"obs={obs!r} is a string; give a list of column names: obs=[{obs!r}]")
    check_flags(names=names, raw=raw)
    check_one_of("on_error", on_error, ("raise", "skip"))
    table: pd.DataFrame | None = None
    if files is not None:
        data, table = selected_files(data, files, where)
        if obs is not None:
            table = table[[name for name in table.columns if name in obs]]
            obs = [name for name in obs if name not in table.columns]
    elif where is not None or isinstance(data, pd.DataFrame):
        raise InputError(
            "where= selects files of a table, and files= names its column of paths; filter= of scDataset selects cells"
        )
    options = OpenOptions(
        mmap=mmap,
        has_names=names,
        storage_options=storage_options or {},
        cache=Cache.of(cache),
        feature_types=names_given("feature_types", feature_types),
        genomes=names_given("genome", genome),
        reader_options=reader_options or {},
    )
    joining: Any = {"join": join, "label": label, "keys": keys, "index_unique": index_unique, "merge": merge}
    joining |= {"fill_value": fill_value, "on_error": on_error, "table": table}
    elements = elements_of(data, obs, options, attach=attach, raw=raw, **joining)
    with naming_errors(quoted(data)):
        return elements.to_anndata()


def elements_of(
    data: Any,
    obs: Sequence[str] | None,
    options: OpenOptions,
    *,
    extent: Extent | None = None,
    table: pd.DataFrame | None = None,
    attach: Mapping[str, str | os.PathLike[str]] | None = None,
    raw: bool = False,
    join: Join = "inner",
    on_error: str = "raise",
    **joining: Any,
) -> Elements:
    """Open an atlas, or several atlases as one, as `open` does; by default, with all elements that `open` returns."""
    label, index_unique, merge = (joining.setdefault(name, None) for name in ("label", "index_unique", "merge"))
    name_or_none("label", label)
    check_one_of("join", join, ("inner", "outer"))
    if merge is not None and not callable(merge):
        check_one_of("merge", merge, MERGES)
    check_fill_value(joining.get("fill_value"), join)
    if isinstance(data, AnnData) and isinstance(data.obs.index, pd.RangeIndex):
        options = replace(options, has_names=False)
    if isinstance(data, Mapping) and joining.get("keys") is not None:
        raise InputError("keys= cannot be used with a dict, whose keys are already the names; leave keys= out")
    if not options.has_names and index_unique is not None:
        raise InputError(
            "index_unique= changes obs_names, which names=False does not read; leave out index_unique= or names=False"
        )
    parts = atlas_inputs(data, options.storage_options, skips_errors=on_error == "skip")
    if parts == []:
        raise InputError(f"{data!r} contains no atlas; give at least one path or AnnData")
    if parts is not None and (len(parts) > 1 or not isinstance(data, str | os.PathLike)):
        extent = "all" if extent == "all" or merge is not None else "joined"
        joining |= {"table": table, "raw": raw, "join": join, "on_error": on_error}
        found = _open_several(parts, obs, options, extent=extent, **joining)
    else:
        # A pattern or folder with a single atlas is equivalent to the path of that atlas.
        one = data if parts is None else parts[0][1]
        found = open_one(one, obs, options, "batches" if extent == "batches" and parts is None else "all")
        found = raw_of(found, quoted(data)) if raw else found
        given = [f"{name}=" for name, value in joining.items() if value is not None]
        is_catalogue = isinstance(found.X, Lazy) and isinstance(found.X.matrix, ConcatenatedMatrix)
        if join == "outer" and is_catalogue:
            given.append("join=")
        if parts is not None:
            keys = _keys_of(joining.get("keys"), [parts[0][0]])
            if label is not None or index_unique is not None:
                found.obs = joined_obs([found], join=join, keys=keys, label=label, index_unique=index_unique)
        elif given:
            raise InputError(
                f"{', '.join(given)} {'applies' if len(given) == 1 else 'apply'} only to several atlases, but "
                f"{quoted(data)} is a single atlas. Omit {', '.join(given)}, give several atlases, or index them again"
            )
        elif isinstance(one, str | os.PathLike):
            found.path = os.fspath(one)
    if attach is not None:
        attach_elements(found, attach, options)
    if options.has_names and any_repeat(found.obs.index):
        warn_of_repeated_names(data, None if parts is None else len(parts))
    # An AnnData that `scDataset` opens again has already been checked.
    if (options.has_names or not isinstance(data, AnnData)) and not found.var.index.is_unique:
        logger.warning("var_names repeat; adata.var_names_make_unique() makes them unique")
    return found


def warn_of_repeated_names(data: Any, n_atlases: int | None) -> None:
    """Log a warning that names of cells repeat."""
    is_path = isinstance(data, str | os.PathLike)
    logger.warning(
        "obs_names repeat in %s; make them unique with adata.obs_names_make_unique(), or open or index the atlases "
        "with index_unique='-'",
        quoted(data) if is_path else "the given AnnData" if n_atlases is None else f"{n_atlases} atlases",
    )


# The collector would visit the objects of all earlier files again and again.
@without_collection()
def _open_several(
    parts: Sequence[tuple[str, Any]],
    obs: Sequence[str] | None,
    options: OpenOptions,
    *,
    extent: Extent,
    table: pd.DataFrame | None,
    raw: bool,
    join: Join,
    on_error: str,
    keys: Sequence[str] | None = None,
    **given: Any,
) -> Elements:
    if table is not None and len(table) != len(parts):
        raise InputError(f"{len(table)} paths in the table of files contain {len(parts)} atlases; give one in each row")
    names = [name for name, _ in parts]
    keys = _keys_of(keys, names)
    lenient = replace(options, may_lack=True)
    failed: dict[int, DaskscError] = {}
    opened = []
    ahead = remote_files([one for _, one in parts], obs, lenient) if extent == "joined" else [None] * len(parts)
    for number, ((_, one), file) in enumerate(zip(parts, ahead, strict=True)):
        for _, path in parts[number : number + _N_AHEAD] if number % _N_AHEAD == 0 else ():
            if isinstance(path, str) and not is_url(path):
                advise_ends(path)
        try:
            opened.append(open_one(one, obs, lenient, extent, file))
        except DaskscError as error:
            failed[number] = error
            if on_error == "raise" or len(failed) == len(parts):
                raise
            logger.info("%s is left out: %s", names[number], error)
    if failed:
        first = next(iter(failed))
        logger.warning(
            "%d of %d atlases cannot be opened and are left out, such as %s: %s",
            *(len(failed), len(parts), names[first], failed[first]),
        )
        kept = [number for number in range(len(parts)) if number not in failed]
        parts, names, keys = [parts[i] for i in kept], [names[i] for i in kept], [keys[i] for i in kept]
        table = None if table is None else table.iloc[kept]
    columns = [one.obs.columns for one in opened]
    if raw:
        opened = [raw_of(one, name) for one, name in zip(opened, names, strict=True)]
    with unchecked():
        result = concatenated(opened, names, join=join, keys=keys, **given)
    for column in () if obs is None else obs:
        if column not in result.obs:
            without = [name for name, held in zip(names, columns, strict=True) if column not in held]
            if len(without) == len(parts):
                open_one(parts[0][1], [column], options)  # raises an error with the available columns
            raise MissingKeyError(
                f"obs of {len(parts)} atlases joined by 'inner' has no column {column!r}: it is missing in "
                f"{first_of(without)}. Leave it out of obs=, or give join='outer'"
            )
    if options.has_names and any_repeat(result.obs.index):
        _warn_of_same_cells(opened, names)
    if table is not None:
        describe_rows(result, table, [one.n_obs for one in opened])
    return result


def _warn_of_same_cells(opened: Sequence[Elements], names: Sequence[str]) -> None:
    found: dict[str, list[str]] = {}
    for one, name in zip(opened, names, strict=True):
        if one.n_obs:
            found.setdefault(digest_names(names_in_pieces(one.obs.index)), []).append(name)
    same = [group for group in found.values() if len(group) > 1]
    if same:
        logger.warning("groups of atlases with the same cell names: %d, such as %s", len(same), ", ".join(same[0][:3]))


def _keys_of(keys: Sequence[str] | None, names: Sequence[str]) -> Sequence[str]:
    """Return the keys of the atlases: their names, or their numbers if a name repeats."""
    if keys is None:
        return names if len(set(names)) == len(names) else [str(i) for i in range(len(names))]
    if isinstance(keys, str) or len(keys) != len(names):
        raise InputError(f"keys={keys!r} must be a list of {len(names)} names, one for each atlas: {first_of(names)}")
    return keys


def is_several(data: Any) -> bool:
    """Return True if `data` is a list, tuple or dict of inputs of `open`."""
    items = list(data.values()) if isinstance(data, Mapping) else data
    if type(items) not in (list, tuple):
        return False
    return bool(items) and all(isinstance(item, str | os.PathLike | AnnData) for item in items)

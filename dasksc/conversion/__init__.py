"""Conversion of atlases to one Zarr store that loads quickly: shuffled, sharded, and in narrow data types."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from dask.base import tokenize

from dasksc import config
from dasksc.atlas.concat import MERGES, Join, check_fill_value
from dasksc.atlas.elements import require_key
from dasksc.atlas.opening import elements_of, open, warn_of_repeated_names
from dasksc.checks import check_flags, check_one_of, name_or_none, names_or_none, true_or_false, whole_number
from dasksc.conversion.contents import Contents, contents_of, matrices_of
from dasksc.conversion.converting import Conversion
from dasksc.conversion.tables import StagedNames, check_tables
from dasksc.errors import InputError
from dasksc.inspection.report import Report
from dasksc.loader.genes import GeneRequest, Missing, Repeated
from dasksc.output.work_folder import StoreWorkFolder
from dasksc.pushdown import leaves_read, token_of
from dasksc.readers.options import Openable, OpenOptions, names_given
from dasksc.storage import Cache, Matrix, is_url

__all__ = ["convert"]

# Format version in every plan. A conversion with another version is not resumed.
_FORMAT = 4
_FILES = (".h5", ".h5ad", ".h5mu", ".hdf5", ".loom", ".zip")

Order = Literal["shuffle", "keep"]


def convert(
    data: Openable | Sequence[Openable] | Mapping[str, Openable],
    target: str | os.PathLike[str],
    *,
    order: Order = "shuffle",
    group_by: str | Sequence[str] | None = None,
    seed: int = 0,
    filter: str | None = None,
    genes: Any = None,
    genes_missing: Missing = "error",
    genes_key: str | None = None,
    genes_repeated: Repeated = "error",
    join: Join = "inner",
    label: str | None = None,
    keys: Sequence[str] | None = None,
    index_unique: str | None = None,
    merge: str | None = None,
    fill_value: float | None = None,
    layout: Literal["csr"] | None = None,
    narrow: bool = True,
    memory_limit: int | str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    feature_types: str | Sequence[str] | None = None,
    genome: str | Sequence[str] | None = None,
    reader_options: Mapping[str, Any] | None = None,
) -> Report:
    """Convert one or several atlases, or a subset of them, to a single Zarr store with shuffled cells.

    The store is a sharded Zarr v3 store that ``anndata.read_zarr`` can read. Column indices and counts are stored in
    the narrowest data types that represent them. A conversion can be interrupted at any time, with Ctrl-C or by killing
    the process; the same call resumes it. Output is written to ``TARGET.partial`` next to the target. The target
    appears only when the store is complete.

    Parameters
    ----------
    data
        Input, in any form that `dasksc.open` accepts. It is never modified.
    target
        Path of the directory to write, whose name should end in ``.zarr``.
    order
        Order of the cells. ``"shuffle"``: a random order, uniform and drawn once. ``"keep"``: the order of the input.
    group_by
        Name or names of obs columns. Cells with the same combination of categories are stored together; `order`
        applies within each group.
    seed
        Seed of the shuffle, an integer in [0, 2**64). The same input and seed give the same order.
    filter
        Convert only cells for which this expression over obs holds, such as ``"n_genes > 500"``; see
        `dasksc.rows_where`.
    genes, genes_missing, genes_key, genes_repeated
        Genes to write, in this order (columns of X and of every layer), as for `dasksc.scDataset`. With
        ``genes_missing="zero"``, missing genes are columns of zeros, and their rows of var have missing values. If a
        gene is the sum of several columns, its row of var is that of the first one. ``raw`` keeps its own genes.
    join, label, keys, index_unique, merge, fill_value
        Options for several inputs, as for `dasksc.open`.
    layout
        ``"csr"``: write dense X, layers and raw as sparse CSR matrices without zeros, as ``scipy.sparse.csr_matrix``
        makes them; obsm stays dense. Counts become smaller and faster to load; matrices with few zeros become larger.
        Default: each matrix keeps its layout.
    narrow
        If True, store column indices and counts in the narrowest data types that represent them, which makes the store
        smaller and faster to load. ``anndata.read_zarr`` then returns matrices with narrow column indices. Before
        calling SciPy functions that modify such a matrix in place (``eliminate_zeros``) or convert it to COO
        (``tocoo``, ``multiply``), copy the AnnData (``adata.copy()``). If False, values have the data types of the
        input, and column indices the types that SciPy chooses.
    memory_limit
        Memory to use, not counting obs, var, CSC matrices (which take three times their size) and the page cache, in
        bytes or as a string such as ``"4GiB"``. Default: ``dasksc.memory-limit`` of Dask's configuration. With more
        memory, compressed input is shuffled in fewer and longer reads.
    overwrite
        If True, replace a store at `target`, and discard an unfinished conversion that has other arguments.
    verify
        If True, read the store again, and compare its rows (lengths, sums and checksums) and obs with the input.
    progress
        If True, show a progress bar (requires tqdm).
    storage_options, cache
        Options for inputs at URLs, as for `dasksc.open`. A conversion resumes only with the same `storage_options`, so
        pass temporary credentials in environment variables.
    feature_types, genome, reader_options
        As for `dasksc.open`.

    Returns
    -------
    Report
        Facts by name, also as attributes: ``path``, ``n_obs``, ``n_vars`` and ``n_bytes`` of the store; ``elapsed_s``;
        ``is_verified``; how the names in ``genes`` matched; the data types (``types``) of the matrices; and the input
        elements ``left_out``, such as ``"obsp/neighbors"``.

    Raises
    ------
    InputError
        If an argument is invalid; if `target` exists and `overwrite` is False; if `target` is an input, lies inside an
        input or contains one; or if obs has a column that AnnData cannot write.
    StorageError
        If the input cannot be read, the disk is full, or another process writes to the same target.
    CorruptDataError
        If `verify` finds a difference. The output is then removed; call the function again to start over.

    Notes
    -----
    The conversion runs on as many threads as this process may use CPUs. The input is read twice: once to determine data
    types and row lengths, and once to write. Compressed files, files at URLs, and files larger than half the memory of
    this machine are slow to read in random order. To be shuffled, they are read only once, sequentially, into
    uncompressed temporary files next to the target. For each stored value, these files take the size of the value, and
    for sparse matrices two more bytes (four if there are more than 65,536 genes).

    The store omits obsp, and also varm and varp if genes are missing or summed. For several inputs, it omits uns, varp,
    and elements that `join` and `merge` do not keep.

    Examples
    --------
    >>> report = dasksc.convert("atlas.h5ad", "atlas.zarr", order="shuffle", seed=0, verify=True)
    >>> report.n_obs, report.is_verified
    (2000, True)
    >>> dasksc.open("atlas.zarr").shape
    (2000, 300)
    """
    begun = time.perf_counter()
    check_flags(overwrite=overwrite, verify=verify, progress=progress)
    joining: Any = {"join": join, "label": label, "keys": keys, "index_unique": index_unique}
    joining |= {"merge": merge, "fill_value": fill_value}
    recipe = _recipe_of(
        data, order=order, group_by=group_by, seed=seed, filter=filter, layout=layout, narrow=narrow, **joining
    )
    request = GeneRequest(genes, genes_missing, genes_key, genes_repeated)
    work_folder = StoreWorkFolder(_target_path(target))
    limit = config.memory_limit(memory_limit)
    options = OpenOptions(
        storage_options=storage_options or {},
        cache=Cache.of(cache),
        feature_types=names_given("feature_types", feature_types),
        genomes=names_given("genome", genome),
        reader_options=reader_options or {},
    )
    names = None if index_unique is not None else StagedNames.of(data, options, work_folder.folder / "names")
    elements = elements_of(data, None, replace(options, has_names=names is None), extent="all", **joining)
    left_out, adata = elements.left_out, elements.to_anndata()
    contents = contents_of(adata, filter, request, layout)
    for name in names_or_none("group_by", recipe["group_by"]):
        require_key("obs", name, adata.obs, of=adata)
    del adata, elements  # a filter has copied its columns
    if names is not None:
        names.rows = contents.rows
    check_tables(contents, names)
    _check_target(contents.matrices.values(), work_folder.target)
    plan = _plan_of(contents, recipe)
    job = Conversion(contents, work_folder, plan, names=names, limit_bytes=limit)
    try:
        with work_folder.explaining(), work_folder.locked():
            if work_folder.begin(plan, overwrite=overwrite):
                # The plan does not record the names of the cells. They may have changed, so a resumed conversion writes
                # them again.
                if names is not None and names.write(contents.n_obs):
                    warn_of_repeated_names(data, len(names.paths))
                job.run(verify=verify, shown=progress)
                work_folder.publish(overwrite=overwrite)
    except KeyboardInterrupt as error:
        error.add_note(
            f"The rows written so far are kept in {work_folder.folder}. Run the same command again to resume."
        )
        raise
    written = open(work_folder.target, obs=[], names=False)
    return Report(
        path=str(work_folder.target),
        n_obs=contents.n_obs,
        n_vars=len(contents.others["var"]),
        n_bytes=sum(path.stat().st_size for path in work_folder.target.rglob("*") if path.is_file()),
        elapsed_s=time.perf_counter() - begun,
        is_verified=verify,
        genes=None if contents.match is None else str(contents.match),
        types=Report({key: str(matrix.stored_dtype) for key, matrix in matrices_of(written).items()}),
        left_out=[*left_out, *contents.left_out],
    )


def _target_path(target: Any) -> Path:
    """Return the absolute path of the target; raise `InputError` if no store can be written there."""
    if isinstance(target, str | os.PathLike) and not is_url(os.fspath(target)):
        path = Path(os.path.abspath(target))
        if path.name and path.suffix not in _FILES:
            return path
    raise InputError(f"target={target!r} cannot be written; give the path of a local directory, such as 'atlas.zarr'")


def _recipe_of(data: Any, **given: Any) -> dict[str, Any]:
    """Check the arguments of `convert` that affect its output; return them as plain JSON types."""
    check_one_of("order", given["order"], ("shuffle", "keep"))
    check_one_of("layout", given["layout"] or "csr", ("csr",))
    groups, keys = names_or_none("group_by", given["group_by"]), given["keys"]
    if given["group_by"] is not None and not 0 < len(groups) == len(set(groups)):
        raise InputError(f"group_by={groups} must name at least one obs column, each only once")
    name_or_none("index_unique", given["index_unique"])
    if keys is not None and not hasattr(keys, "__len__"):
        raise InputError(f"keys={keys!r} is not a list; give names, one for each input")
    # AnnData also accepts a function, which cannot be compared with that of an unfinished conversion.
    check_one_of("merge", given["merge"] or "same", MERGES)
    check_fill_value(given["fill_value"], given["join"])
    keys = data if isinstance(data, Mapping) else keys
    return {
        **given,
        "group_by": groups[0] if len(groups) == 1 else groups or None,
        "seed": whole_number("seed", given["seed"], 0, 2**64),
        "narrow": true_or_false("narrow", given["narrow"]),
        "fill_value": None if given["fill_value"] is None else float(given["fill_value"]),
        "keys": None if keys is None else [str(key) for key in keys],
    }


def _check_target(matrices: Iterable[Matrix], target: Path) -> None:
    """Raise `InputError` if the target is an input, lies inside one, or contains one."""
    # The label of a matrix in memory contains no path.
    for path in {leaf.label.rpartition(":/")[0] for matrix in matrices for leaf in leaves_read(matrix)}:
        if not path or (is_url(path) and not os.path.exists(path)):
            continue
        real, found = Path(os.path.realpath(target)), Path(os.path.realpath(path))
        if real == found or (found in real.parents and (found / "obs").exists()):
            raise InputError(f"{target} is, or lies in, the input {found}. Give another target.")
        if real in found.parents:
            raise InputError(f"{target} contains the input {found}. Give another target.")


def _plan_of(contents: Contents, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that identifies a conversion: the state of the input files, and the arguments."""
    groups = [pd.Categorical(contents.cells["obs"][name]) for name in names_or_none("group_by", recipe["group_by"])]
    return {
        "format": _FORMAT,
        "n_obs": contents.n_obs,
        "genes": tokenize(list(contents.others["var"].index)),
        "inputs": {key: token_of(matrix) for key, matrix in contents.matrices.items()},
        # The columns of obs to group by affect the order; the names of the cells do not.
        "groups": tokenize(*groups) if groups else None,
        **recipe,
    }

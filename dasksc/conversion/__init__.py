"""Conversion of atlases to one Zarr store that loads quickly: shuffled, sharded, and in narrow data types."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from dasksc import config
from dasksc.atlas.assemble import require_key
from dasksc.atlas.concat import Join
from dasksc.atlas.opening import elements_of, open, warn_of_repeated_names
from dasksc.checks import check_flags, names_or_none
from dasksc.conversion.contents import contents_of, matrices_of
from dasksc.conversion.converting import Conversion
from dasksc.conversion.inputs import Order, check_target, plan_of, recipe_of, target_path
from dasksc.conversion.names import StagedNames
from dasksc.conversion.tables import check_tables
from dasksc.inspection.report import Report
from dasksc.loader.genes import GeneRequest, Missing, Repeated
from dasksc.output.work_folder import StoreWorkFolder
from dasksc.readers.options import Openable, OpenOptions, names_given
from dasksc.storage import Cache

__all__ = ["convert"]


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
        Memory to use, not counting obs, var and the page cache, in bytes or as a string such as ``"4GiB"``. Default:
        ``dasksc.memory-limit`` of Dask's configuration. With more memory, compressed input is shuffled in fewer and
        longer reads.
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
    recipe = recipe_of(
        data, order=order, group_by=group_by, seed=seed, filter=filter, layout=layout, narrow=narrow, **joining
    )
    request = GeneRequest(genes, genes_missing, genes_key, genes_repeated)
    work_folder = StoreWorkFolder(target_path(target))
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
    check_target(contents.matrices.values(), work_folder.target)
    plan = plan_of(contents, recipe)
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

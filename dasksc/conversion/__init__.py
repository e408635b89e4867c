"""Writing atlases anew, as one Zarr store that is quick to load: shuffled, sharded, in narrow types."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dasksc import config
from dasksc.atlas.concat import Join, noting_left_out
from dasksc.atlas.opening import open
from dasksc.atlas.options import Openable
from dasksc.conversion.arguments import Recipe, check_options, target_path
from dasksc.conversion.converting import Conversion
from dasksc.conversion.inputs import check_target, leaves_read, matrices_of, paths_of, plan_of
from dasksc.conversion.rows import Order
from dasksc.conversion.tables import check_tables
from dasksc.conversion.task_runner import check_progress
from dasksc.conversion.work_folder import Workplace
from dasksc.errors import DaskscError, MissingKeyError, StorageError
from dasksc.executor.schedulers import resolve_scheduler

if TYPE_CHECKING:
    from distributed import Client


__all__ = ["ConversionReport", "convert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What `convert` did.

    Parameters
    ----------
    path
        The store.
    n_obs, n_vars
        Its cells and genes.
    n_bytes
        Its size.
    elapsed_s
        How long it took, this time.
    types
        The type of the values of each matrix, by its place in the store.
    left_out
        What of the input is not in the store, by its place there: ``"obsp/neighbours"``; of several, also what
        joining them leaves out of any: uns, varp, columns of obs and var, what only some have.
    is_verified
        Whether the store was compared with the input.
    """

    path: str
    n_obs: int
    n_vars: int
    n_bytes: int
    elapsed_s: float
    types: dict[str, str]
    left_out: tuple[str, ...]
    is_verified: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain types."""
        return asdict(self)


def convert(
    data: Openable | Sequence[Openable] | Mapping[str, Openable],
    target: str | os.PathLike[str],
    *,
    order: Order = "shuffle",
    group_by: str | Sequence[str] | None = None,
    seed: int = 0,
    join: Join = "inner",
    label: str | None = None,
    keys: Sequence[str] | None = None,
    index_unique: str | None = None,
    merge: str | None = None,
    fill_value: float | None = None,
    narrow: bool = True,
    memory_limit: int | str | None = None,
    scheduler: Client | str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> ConversionReport:
    """Write an atlas, or several as one, to a Zarr store whose cells are shuffled once and for all.

    The store is Zarr v3, sharded, and an AnnData that ``anndata.read_zarr`` reads. Column numbers and counts are
    stored in the narrowest types that hold them. The conversion can be stopped at any time, by Ctrl-C or harder:
    the same call goes on with it. Until all is there nothing is at `target`; what grows is beside it, in
    ``TARGET.partial``.

    Parameters
    ----------
    data
        Whatever `dasksc.open` takes. It is never written to.
    target
        The directory to write, whose name should end in ``.zarr``.
    order
        ``"shuffle"``: cells in an order that is drawn once, every one as likely; ``"keep"``: as they are.
    group_by
        A column of obs, or several: cells of one category, or combination of categories, are put together, in `order`
        among themselves.
    seed
        Of the shuffle. The same input and seed give the same order.
    join, label, keys, index_unique, merge, fill_value
        Of several inputs, as for `dasksc.open`.
    narrow
        Whether to store columns and counts in the narrowest types that hold them, by which a store is smaller and
        quicker to load. Functions of SciPy that change a matrix in place (``eliminate_zeros``) or go by way of COO
        (``tocoo``, ``multiply``) do not take the narrow columns that ``anndata.read_zarr`` then gives, until it has
        been copied (``adata.copy()``); with False, types are those of the input, and columns as SciPy makes them.
    memory_limit
        Anonymous memory, in bytes or as a text, ``"4GiB"``, to use beside the tables. Default: ``dasksc.memory-limit``
        of Dask's configuration. With more of it, what is compressed is shuffled in fewer and longer reads.
    scheduler
        As for `dasksc.scDataset`: an active Client, whose workers must see the files, else threads.
    overwrite
        Whether to replace a store at `target`, and to drop what another conversion has begun there.
    verify
        Whether to read the store again and compare all rows with the input: lengths, sums and checksums, and obs.
    progress
        Whether to show a progress bar (needs tqdm).
    storage_options, cache
        Of an input behind URLs, as for `dasksc.open`. A conversion goes on only with the `storage_options` it was
        begun with: credentials that change belong in the environment.

    Returns
    -------
    ConversionReport
        What was written.

    Raises
    ------
    InputError
        If an argument cannot be used, `target` exists and `overwrite` is False, or is or holds an input; or if
        obs has a column that AnnData cannot write.
    StorageError
        If the input cannot be read, the disk is full, or another process writes to the same target.
    CorruptDataError
        If `verify` finds a difference. What was written is removed then: the same call begins anew.

    Notes
    -----
    The input is read twice: to find types and the lengths of rows, and to write. What can only be read in runs
    (compressed files, files behind URLs, and files larger than half the memory of this machine) is read in order both
    times and shuffled through uncompressed files beside the target, which take up to six bytes for each stored value.

    obsp is left out, and of several inputs uns, varp, and what `join` and `merge` do not keep;
    `ConversionReport.left_out` names it.
    """
    begun = time.perf_counter()
    recipe = Recipe(
        order=order,
        group_by=group_by,
        seed=seed,
        join=join,
        label=label,
        keys=keys,
        index_unique=index_unique,
        merge=merge,
        fill_value=fill_value,
        narrow=narrow,
    )
    place = Workplace(target_path(target))
    limit = config.memory_limit(memory_limit)
    check_options(storage_options)
    if progress:
        check_progress()
    for path in paths_of(data):
        check_target(path, place.target)
    resolved = resolve_scheduler(scheduler)
    with noting_left_out() as left_out:
        adata = open(
            data,
            join=join,
            label=label,
            keys=recipe.keys,
            index_unique=index_unique,
            merge=merge,
            fill_value=recipe.fill_value,
            storage_options=storage_options,
            cache=cache,
        )
    for name in recipe.grouped_by:
        if name not in adata.obs:
            raise MissingKeyError(
                f"obs has no column {name!r} to group by; it has {', '.join(map(str, adata.obs.columns))}"
            )
    check_tables(adata)
    matrices = matrices_of(adata)
    for matrix in matrices.values():
        for leaf in leaves_read(matrix):
            # Of what is in memory the label has no path.
            check_target(leaf.label.rpartition(":/")[0], place.target)
    job = Conversion(adata, matrices, place, recipe, limit=limit, scheduler=resolved)
    plan = plan_of(adata, matrices, data, recipe)
    try:
        with place.locked():
            if place.begin(plan, overwrite=overwrite):
                job.run(verify=verify, shown=progress)
                place.publish(overwrite=overwrite)
    except KeyboardInterrupt as error:
        error.add_note(f"What is done is kept in {place.folder}; the same again goes on with it.")
        raise
    except DaskscError:
        raise
    except OSError as error:
        # Libraries may wrap what the system said.
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise place.no_space(error, needed_bytes=job.needed_bytes()) from error
        raise StorageError(f"{place.target} cannot be written: {error}") from error
    written = open(place.target, obs=[], names=False)
    return ConversionReport(
        path=str(place.target),
        n_obs=adata.n_obs,
        n_vars=adata.n_vars,
        n_bytes=sum(path.stat().st_size for path in place.target.rglob("*") if path.is_file()),
        elapsed_s=time.perf_counter() - begun,
        types={key: str(matrix.stored_dtype) for key, matrix in matrices_of(written).items()},
        left_out=(*left_out, *(f"obsp/{name}" for name in adata.obsp)),
        is_verified=verify,
    )

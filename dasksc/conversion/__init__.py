"""Writing atlases anew, as one Zarr store that is quick to load: shuffled, sharded, in narrow types."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import pandas as pd
from anndata import AnnData
from dask.base import tokenize
from numpy.typing import NDArray

from dasksc import config
from dasksc.atlas.concat import Join, noting_left_out
from dasksc.atlas.opening import open, several_of
from dasksc.atlas.options import Openable
from dasksc.conversion.arguments import Recipe, check_options, target_path
from dasksc.conversion.rows import Order, row_order
from dasksc.conversion.running import Runner, check_progress, progress_bar
from dasksc.conversion.scanning import ROW, Scan, Verification, pieces
from dasksc.conversion.staging import Staging
from dasksc.conversion.tables import check_obs, check_tables, write_tables
from dasksc.conversion.workplace import Workplace, array_appearing
from dasksc.conversion.writing import Copy, CSRCopy, DenseCopy, narrowest_count, wide_enough
from dasksc.errors import CorruptDataError, DaskscError, InputError, MissingKeyError, StorageError
from dasksc.executor.schedulers import Scheduler, resolve_scheduler
from dasksc.memory.limits import memory_limit
from dasksc.pushdown import DaskMatrix, leaves_of, matrix_of
from dasksc.storage import Matrix, Place, StackedMatrix, is_url
from dasksc.storage.arrays import logical_dtype

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["ConversionReport", "convert"]

# Written into every plan: what was begun in another way is not gone on with.
_FORMAT = 3
# Rows of a task that reads the input in order, at the least; files of such tasks are at most 256.
_SCAN_ROWS = 2**14
_SCAN_TASKS = 256
# Where any row can be read by itself, longer pieces gain nothing.
_PIECE_VALUES = 2**22
# Of what is known of rows, those that are looked at together.
_PIECE_ROWS = 2**20
# What a value takes while it is gathered: as it was stored, a copy with wide columns, and what is written.
_VALUE_BYTES = 24


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
    group_by: str | None = None,
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
        A column of obs: cells of one category are put together, in `order` among themselves.
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
    for path in _paths_of(data):
        _check_target(path, place.target)
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
    if group_by is not None and group_by not in adata.obs:
        raise MissingKeyError(
            f"obs has no column {group_by!r} to group by; it has {', '.join(map(str, adata.obs.columns))}"
        )
    check_tables(adata)
    matrices = _matrices(adata)
    for matrix in matrices.values():
        for leaf in _leaves_of(matrix):
            # Of what is in memory the label has no path.
            _check_target(leaf.label.rpartition(":/")[0], place.target)
    job = _Conversion(adata, matrices, place, recipe, limit=limit, scheduler=resolved)
    plan = _plan(adata, matrices, data, recipe)
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
        types={key: str(matrix.stored_dtype) for key, matrix in _matrices(written).items()},
        left_out=(*left_out, *(f"obsp/{name}" for name in adata.obsp)),
        is_verified=verify,
    )


class _Conversion:
    """A conversion under way.

    Parameters
    ----------
    adata
        The input.
    matrices
        Its matrices of cells, by their place in the store.
    place
        Where the target grows.
    recipe
        What is to become of it.
    limit
        Memory to use, in bytes.
    scheduler
        What runs the tasks.
    """

    def __init__(
        self,
        adata: AnnData,
        matrices: Mapping[str, Matrix],
        place: Workplace,
        recipe: Recipe,
        *,
        limit: int,
        scheduler: Scheduler,
    ) -> None:
        self._recipe = recipe
        self._adata = adata
        self._matrices = matrices
        self._place = place
        self._limit = limit
        self._scheduler = scheduler
        self._order = place.folder / "order.npy"
        self._places = place.folder / "places.npy"
        self._copies: dict[str, Copy] = {}
        in_order = recipe.order == "keep" and recipe.group_by is None
        self._staged = {key for key, matrix in matrices.items() if not in_order and _needs_runs(matrix)}

    def run(self, *, verify: bool, shown: bool) -> None:
        """Go on until the store is there."""
        n_obs, place, recipe = self._adata.n_obs, self._place, self._recipe
        if not self._order.exists():
            with array_appearing(self._order, np.int64, n_obs) as out:
                row_order(self._adata.obs, order=recipe.order, group_by=recipe.group_by, seed=recipe.seed, out=out)
        n_passes = len(self._matrices) * (2 + verify) + len(self._staged)
        with progress_bar(total=n_obs * n_passes, shown=shown) as advance:
            runner = Runner(self._scheduler, advance)
            budget = max(1, self._limit // runner.n_threads)
            rows = {}
            for key, matrix in self._matrices.items():
                rows[key] = self._scanned(runner, key, matrix, budget)
                self._copies[key] = self._copy(key, matrix, rows[key], budget)
                self._written(runner, key, self._copies[key], budget, in_runs=key in self._staged)
            written = np.load(self._order, mmap_mode="r")
            how = {"order": recipe.order, "group_by": recipe.group_by, "seed": recipe.seed}
            write_tables(self._adata, place.folder / "tables", place.store, written, how)
            if verify:
                try:
                    for key, matrix in self._matrices.items():
                        self._verify(runner, key, matrix, rows[key], budget)
                    check_obs(self._adata, place.store, written)
                except CorruptDataError:
                    # Either what was written is wrong or what is known of the input: nothing of it is gone on with.
                    place.clear()
                    raise

    def _scanned(self, runner: Runner, key: str, matrix: Matrix, budget: int) -> Path:
        """Read a matrix in order; return the file that says what its rows are."""
        scan = Scan(
            matrix=matrix,
            folder=self._place.folder / "scan" / key,
            task_rows=max(_SCAN_ROWS, -(-matrix.shape[0] // _SCAN_TASKS)),
            piece_rows=_piece_rows(matrix, budget),
        )
        runner.run(scan, what=f"reading {key}", n_cells=matrix.shape[0])
        return scan.collect()

    def _copy(self, key: str, matrix: Matrix, rows: Path, budget: int) -> Copy:
        """Return how a matrix is to be written, according to what its rows are."""
        known = np.load(rows, mmap_mode="r")
        largest = float(known["largest"].max(initial=0))
        dtype = wide_enough(matrix.stored_dtype, largest)
        if self._recipe.narrow and not key.startswith("obsm/") and len(known):
            dtype = narrowest_count(dtype, largest)
        computed = logical_dtype(matrix.dtype)
        folder = self._place.store / key
        if matrix.layout == "dense":
            return DenseCopy(
                matrix=matrix,
                order=self._order,
                folder=folder,
                dtype=dtype,
                computed=computed,
                # Expression repeats within a cell; no coordinate of an embedding is like another.
                shuffle="noshuffle" if dtype.kind == "f" and not key.startswith("obsm/") else "shuffle",
                piece_rows=_piece_rows(matrix, budget),
            )
        indptr = rows.with_name("indptr.npy")
        if not indptr.exists():
            order = np.load(self._order, mmap_mode="r")
            with array_appearing(indptr, np.int64, len(order) + 1) as out:
                _fill_indptr(out, known, order)
        return CSRCopy(
            matrix=matrix,
            order=self._order,
            indptr=indptr,
            folder=folder,
            dtype=dtype,
            computed=computed,
            narrow=self._recipe.narrow,
            n_values=int(np.load(indptr, mmap_mode="r")[-1]),
            piece_values=max(1, min(_PIECE_VALUES, budget // _VALUE_BYTES)),
        )

    def _written(self, runner: Runner, key: str, copy: Copy, budget: int, *, in_runs: bool) -> None:
        """Write a matrix, by way of runs if need be."""
        runs = None
        if in_runs and all(map(copy.is_done, range(copy.n_tasks))):
            runner.skip(copy.matrix.shape[0], what=f"sorting {key}")
        elif in_runs:
            runs = self._runs(runner, key, copy.matrix, budget)
            order = runs.folder / "order.npy"
            with array_appearing(order, np.int64, copy.matrix.shape[0]) as out:
                runs.fill_order(out)
            copy = replace(copy, matrix=runs.staged(), order=order)
            if isinstance(copy, CSRCopy):
                # Each piece is read from every run: the longer, the fewer reads.
                copy = replace(copy, piece_values=max(1, budget // _VALUE_BYTES))
        runner.run(copy, what=f"writing {key}", n_cells=copy.matrix.shape[0])
        copy.finish()
        if runs is not None:
            shutil.rmtree(runs.folder)

    def _runs(self, runner: Runner, key: str, matrix: Matrix, budget: int) -> Staging:
        if not self._places.exists():
            order = np.load(self._order, mmap_mode="r")
            with array_appearing(self._places, np.int64, len(order)) as out:
                for start, stop in pieces(0, len(order), _PIECE_ROWS):
                    out[order[start:stop]] = np.arange(start, stop)
        # A run is held as it was decoded, and once more sorted, its columns wide.
        run_rows = max(1, int(budget // (3 * matrix.cost.row)))
        staging = Staging(
            matrix=matrix,
            places=self._places,
            folder=self._place.folder / "stage" / f"{key}-{run_rows}",
            run_rows=run_rows,
        )
        runner.run(staging, what=f"sorting {key}", n_cells=matrix.shape[0])
        return staging

    def _verify(self, runner: Runner, key: str, matrix: Matrix, rows: Path, budget: int) -> None:
        check = Verification(
            store=self._place.store,
            key=key,
            rows=rows,
            order=self._order,
            task_rows=max(_SCAN_ROWS, -(-matrix.shape[0] // _SCAN_TASKS)),
            piece_rows=_piece_rows(matrix, budget),
            n_obs=matrix.shape[0],
        )
        runner.run(check, what=f"checking {key}", n_cells=matrix.shape[0])

    def needed_bytes(self) -> int:
        """Estimate the bytes still to be written: matrices uncompressed, runs, obs, and the facts about rows."""
        n_obs = self._adata.n_obs
        total = float(self._adata.obs.memory_usage(deep=True).sum())
        total += 8 * n_obs * (not self._order.exists())
        runs = 0.0
        for key, matrix in self._matrices.items():
            copy = self._copies.get(key)
            left = 1.0
            if copy is None:
                # Facts about rows are written by task and again together, then the offsets.
                total += n_obs * (2 * ROW.itemsize + 8)
            elif copy.n_tasks:
                left = sum(not copy.is_done(k) for k in range(copy.n_tasks)) / copy.n_tasks
            total += left * matrix.cost.row * n_obs
            if key in self._staged and left == 1:
                # Runs of one matrix at a time lie on the disk.
                runs = max(runs, n_obs * (matrix.cost.row + 8 + 8 * (not self._places.exists())))
        return int(total + runs)


def _paths_of(data: Any) -> Iterator[str]:
    """Yield the paths of what was given, each atlas of a pattern or directory; not what is elsewhere or opened."""
    if isinstance(data, str | os.PathLike) and not _is_local(data):
        return
    several = several_of(data)
    for one in [data] if several is None else several[0]:
        if isinstance(one, str | os.PathLike) and _is_local(one):
            text = os.fspath(one)
            yield str(Place.of(text)) if is_url(text) else text


def _is_local(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    return not is_url(text) or text.startswith("file:")


def _leaves_of(matrix: Matrix) -> Iterator[Matrix]:
    """Yield the matrices, in files or memory, from which one is read."""
    if isinstance(matrix, StackedMatrix):
        parts: Sequence[Matrix] = matrix.parts
    elif isinstance(matrix, DaskMatrix):
        parts = leaves_of(matrix.array)
    else:
        yield matrix
        return
    for part in parts:
        yield from _leaves_of(part)


def _check_target(path: str, target: Path) -> None:
    """Refuse a target that is an input, lies in one, or holds one; `path` is an input's, or empty."""
    if not path or (is_url(path) and not os.path.exists(path)):
        return
    real, found = Path(os.path.realpath(target)), Path(os.path.realpath(path))
    if real == found or (found in real.parents and (found / "obs").exists()):
        raise InputError(f"{target} is, or lies in, the input {found}. Give another target.")
    if real in found.parents:
        raise InputError(f"{target} holds the input {found}. Give another target.")


def _matrices(adata: AnnData) -> dict[str, Matrix]:
    """Return the matrices of an AnnData that have a row for each cell, by their place in a store."""
    arrays: dict[str, Any] = {"X": adata.X}
    # From AnnData 0.13 on, layers[None] is X.
    arrays |= {f"layers/{name}": adata.layers[name] for name in adata.layers if name is not None}
    arrays |= {f"obsm/{name}": array for name, array in adata.obsm.items() if isinstance(array, da.Array)}
    if adata.raw is not None:
        arrays["raw/X"] = adata.raw.X
    for key in arrays:
        if any(part in ("", ".", "..") for part in key.split("/")) or key.count("/") > 1:
            raise InputError(f"{key!r} cannot be a place in a store; rename it first")
    return {key: matrix_of(array) for key, array in arrays.items() if array is not None}


def _plan(adata: AnnData, matrices: Mapping[str, Matrix], data: Any, recipe: Recipe) -> dict[str, Any]:
    """Return what tells this conversion from others: the files as they are now, and what becomes of them."""
    group_by = recipe.group_by
    return {
        "format": _FORMAT,
        "n_obs": adata.n_obs,
        "inputs": {key: tokenize(matrix) for key, matrix in matrices.items()},
        # Without the names of the cells, by which nothing is grouped.
        "groups": None if group_by is None else tokenize(pd.Categorical(adata.obs[group_by])),
        **recipe.as_plan(data),
    }


def _needs_runs(matrix: Matrix) -> bool:
    """Whether rows here and there are read much more slowly than rows in order."""
    if matrix.cost.chunk_rows > 0 or matrix.cost.row * matrix.shape[0] > memory_limit().n_bytes / 2:
        return True
    # Each row here and there would be a request of its own.
    return any(is_url(leaf.label) for leaf in _leaves_of(matrix))


def _piece_rows(matrix: Matrix, budget: int) -> int:
    """Return how many rows to hold at a time: decoded, gathered, and with wide columns."""
    return max(1, min(_SCAN_ROWS, int(budget // (4 * matrix.cost.row))))


def _fill_indptr(indptr: NDArray[np.int64], rows: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Write where each row of the output begins."""
    indptr[0] = 0
    for start, stop in pieces(0, len(order), _PIECE_ROWS):
        lengths = rows["length"][order[start:stop]]
        np.cumsum(lengths, out=indptr[start + 1 : stop + 1])
        indptr[start + 1 : stop + 1] += indptr[start]

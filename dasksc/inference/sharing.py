"""Each rank's part of the work, and the outcome that the rank reports to the other ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dasksc.errors import InputError, StorageError
from dasksc.inference.outputs import Output, Outputs, nan_rows
from dasksc.inference.work import UnitWriter, Work, runs_of
from dasksc.loader.dataset import scDataset, titled
from dasksc.loader.row_range import over_range
from dasksc.planning.agreement import shared_store
from dasksc.planning.process_groups import torch_distributed
from dasksc.planning.ranks import World

__all__ = ["NanError", "RankStatus", "Share", "max_over_ranks"]

_POLL_S = 0.05
# Number of calls of `predict` that this process has begun, by rank and group. It distinguishes the records of different
# calls.
_ordinals: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)


class Share:
    """Share of one rank: the missing units in a contiguous range of all units.

    No other process can predict a unit of the range until the caller releases the range by calling `abandon`, which is
    required after success as well as after failure. The caller must hold the lock of the work folder while it creates a
    share.

    Parameters
    ----------
    work
        Work that the units belong to.
    dataset
        Data set whose batch size, genes, obs, layers, obsm, layout, dtype, hooks and transform are used.
    world
        Rank and world size.
    outputs
        Conversion of the results of the model.
    """

    def __init__(self, work: Work, dataset: scDataset, world: World, outputs: Outputs) -> None:
        first, last = (work.n_units * rank // world.world_size for rank in (world.rank, world.rank + 1))
        self._claim = work.claim(first, last) if first < last else None
        self.units = work.missing(first, last)
        self._has_checked_outputs = False
        self._dataset = dataset
        self._work = work
        self._outputs = outputs
        self._writer = UnitWriter(work)
        self._starts = self._batch_starts()
        ranges = list(map(work.rows, self.units))
        self.n_rows = sum(stop - start for start, stop in ranges)
        self.n_rows_done = sum(b - a for a, b in map(work.rows, range(first, last))) - self.n_rows
        self.n_batches = sum(-(-(stop - start) // work.batch_size) for start, stop in ranges)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for first, last in runs_of(self.units):
            yield self._work.rows(first)[0], self._work.rows(last - 1)[1]

    def _batch_starts(self) -> Iterator[tuple[int, int]]:
        for start, stop in self._ranges():
            for at in range(start, stop, self._work.batch_size):
                yield at, min(self._work.batch_size, stop - at)

    def batches(self, *, device: Any = None, n_calls: int | None = None) -> Iterator[Any]:
        """Yield the batches of the missing units, in order.

        Parameters
        ----------
        device
            Device of the batches. Default: that of the data set.
        n_calls
            Minimum number of batches to yield. Surplus batches repeat the last batch, or the first batch of the atlas
            if the share has none; `write_batch` discards them.
        """
        batch = None
        for start, stop in self._ranges():
            # Only one batch is referenced, so the memory of the others can be reused.
            part = over_range(self._dataset, start, stop, device=device)
            for batch in titled(part, f"prediction of rows {start:,} to {stop:,}"):
                yield batch
        n_surplus = 0 if n_calls is None else n_calls - self.n_batches
        if n_surplus > 0 and batch is None:
            batch = next(iter(over_range(self._dataset, 0, self._work.batch_size, device=device)))
        for _ in range(n_surplus):
            yield batch

    def write_batch(
        self, returned: Any, *, nan_allowed: bool, check_outputs: Callable[[tuple[Output, ...]], None]
    ) -> int:
        """Write the predictions for the next batch; return its number of rows, 0 for surplus batches.

        Parameters
        ----------
        returned
            Result of the model: an array, a tensor, or a dict of these.
        nan_allowed
            If False, raise an error for rows with NaN.
        check_outputs
            Function that is called with the outputs of the first batch, and may raise an error.

        Raises
        ------
        InputError
            If the result is invalid (`Outputs.arrays`), or contains NaN.
        """
        start, n_rows = next(self._starts, (0, 0))
        if not n_rows:
            return 0
        try:
            self._write_batch(returned, start, n_rows, nan_allowed=nan_allowed, check_outputs=check_outputs)
        except BaseException:
            self.abandon()
            raise
        return n_rows

    def _write_batch(
        self,
        returned: Any,
        start: int,
        n_rows: int,
        *,
        nan_allowed: bool,
        check_outputs: Callable[[tuple[Output, ...]], None],
    ) -> None:
        arrays = self._outputs.arrays(returned, n_rows)
        described = self._outputs.described(arrays)
        if not self._has_checked_outputs:
            check_outputs(described)
            self._has_checked_outputs = True
        nan = nan_rows(arrays)
        if nan and not nan_allowed:
            name, rows = next(iter(nan.items()))
            raise NanError(name, len(rows), [start + int(row) for row in rows[:5]])
        self._writer.write_batch(start, arrays, described, nan)

    def flush(self) -> None:
        """Wait until all written units are complete.

        Raises
        ------
        OSError
            If a unit cannot be completed, such as on a full disk.
        """
        self._writer.flush()

    def abandon(self) -> None:
        """Remove the files of an unfinished unit, and let other processes predict it."""
        self._writer.abandon()
        if self._claim is not None:
            self._claim.release()


class NanError(Exception):
    """Error for NaN in predictions, with row numbers; the caller adds the names of the cells."""

    def __init__(self, name: str, n: int, rows: list[int]) -> None:
        super().__init__(name, n, rows)
        self.name, self.n, self.rows = name, n, rows


def max_over_ranks(n: int, device: torch.device | None) -> int:
    """Return the maximum of `n` over all ranks of the process group. All ranks must call this function."""
    distributed = torch_distributed()
    if distributed is None:
        return n
    value = torch.tensor(n, device=device)
    distributed.all_reduce(value, distributed.ReduceOp.MAX)
    return int(value)


class RankStatus:
    """Outcome of each rank, recorded in the store of the process group.

    Parameters
    ----------
    world
        Rank and world size. Calls of `predict` on different ranks are matched by their order.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: Any = None
        if world.world_size > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            number = next(_ordinals[world.rank, world.group])
            self._store = shared_store(f"dasksc/predict/{attempt}/{world.group}/{number}")

    def new_run(self) -> str:
        """Return a name that no other call of `predict` has, the same on all ranks.

        Raises
        ------
        InputError
            If there is no process group through which the ranks can agree.
        """
        proposed = os.urandom(16).hex()
        if self._world.world_size == 1:
            return proposed
        if self._store is None:
            raise InputError(
                f"with world_size={self._world.world_size} and no process group, the ranks cannot agree to predict all "
                "cells again, which overwrite=True (--overwrite) asks for, and which a model or data set requires "
                "that cannot be pickled. Call torch.distributed.init_process_group first, use one rank, or write to "
                "a new out="
            )
        return str(self._store.compare_set("run", "", proposed).decode())

    @contextlib.contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record that this rank has failed if the body raises an error."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Record that this rank has failed."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited
                self._store.compare_set(f"rank {self._world.rank}", "", f"failed: {type(error).__name__}: {error}")

    def await_others(self, work: Work) -> None:
        """Record that this rank is done, and wait until all ranks are done or one has failed.

        Without a process group, the function returns at once.

        Parameters
        ----------
        work
            Shared work, for the error message.

        Raises
        ------
        StorageError
            If another rank failed.
        """
        store = self._store
        if store is None:
            return
        store.compare_set(f"rank {self._world.rank}", "", "done")
        waiting = set(range(self._world.world_size))
        while waiting:
            for rank in sorted(waiting):
                if not store.check([f"rank {rank}"]):
                    continue
                note = store.get(f"rank {rank}").decode()
                if note != "done":
                    raise StorageError(
                        f"rank {rank} {note}. Finished predictions are kept in {work.folder}. Run the same command "
                        "again to resume, on any number of ranks"
                    )
                waiting.discard(rank)
            if waiting:
                time.sleep(_POLL_S)

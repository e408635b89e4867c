"""Epoch counter shared by the copies of a data set.

DataLoader workers hold copies of the data set, and non-persistent workers discard theirs after each epoch. A counter in
the object would therefore start again from zero in every epoch. `EpochCounter` keeps the count in a small file that all
copies share, whether they were made by fork or by pickling.

The base seed of the DataLoader identifies the workers of one pass. A new base seed begins an epoch. A worker that joins
again with the same base seed also begins a new epoch: either the user reseeded torch, or the workers are persistent.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

from dasksc.errors import StorageError
from dasksc.platforms import lock_file

__all__ = ["EpochCounter"]

# Number of passes whose workers may still be starting: several DataLoader iterators can be active at once.
_REMEMBERED_PASSES = 16


class EpochCounter:
    """Epoch counter shared by every copy of a data set on this machine."""

    # The original counter owns the file and removes it when the counter is garbage-collected or the process exits. A
    # copy continues the count in a file of its own if the shared file does not exist, for example on another machine,
    # or if the copy begins an epoch in another process that is not a DataLoader worker.

    def __init__(self) -> None:
        self._make(next_epoch=0)

    def _make(self, next_epoch: int) -> None:
        try:
            descriptor, self._path = tempfile.mkstemp(prefix="dasksc-epoch-")
            self._finalizer = weakref.finalize(self, _remove, self._path, os.getpid())
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump({"next": next_epoch, "passes": [], "by_workers": False}, file)
            except OSError:
                self._finalizer()
                raise
        except OSError as error:
            raise StorageError(
                f"the epoch counter cannot be written to {tempfile.gettempdir()}: {error}. Free disk space there, or "
                "set TMPDIR to another folder"
            ) from error
        self._next = next_epoch
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path, "next": self.peek(), "pid": self._pid}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._next, self._pid = state["path"], state["next"], state["pid"]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        if not os.path.exists(self._path):
            self._make(self._next)
        with open(self._path, "r+b", buffering=0) as file:
            lock_file(file, wait=True)
            before = file.readall()
            state = json.loads(before)
            yield state
            self._next = state["next"]
            # A single write keeps the file valid if the process is killed. If the previous contents were longer, spaces
            # overwrite their end.
            file.seek(0)
            file.write(json.dumps(state).encode().ljust(len(before)))

    def peek(self) -> int:
        """Return the epoch that the next iteration will read."""
        with self._locked() as state:
            return int(state["next"])

    def set(self, epoch: int) -> None:
        """Make the next iteration read `epoch`."""
        with self._locked() as state:
            state["next"] = epoch

    def advance(self) -> int:
        """Begin an epoch in this process and return its number."""
        # A process that received a copy and is not a DataLoader worker is a rank of its own. It counts independently
        # from now on.
        if self._pid != os.getpid():
            self._make(self.peek())
        with self._locked() as state:
            epoch = int(state["next"])
            state["next"] = epoch + 1
            state["by_workers"] = False
            return epoch

    def resume(self, base_seed: int, worker: int, n_workers: int, epoch: int) -> None:
        """Make the DataLoader workers of a pass resume `epoch` when they `join`."""
        # The pass after this one reads epoch ``epoch + 1``, even if it begins before any worker of this pass has
        # joined.
        with self._locked() as state:
            for one in reversed(state["passes"]):
                if one["seed"] == base_seed and one["of"] == n_workers:
                    if one["epoch"] == epoch and worker not in one["workers"]:
                        return
                    break
            state["next"] = epoch + 1
            _append(state, {"seed": base_seed, "of": n_workers, "epoch": epoch, "workers": []})

    def join(self, base_seed: int, worker: int, n_workers: int) -> int:
        """Return the epoch that a DataLoader worker reads; the first worker of a pass begins an epoch."""
        with self._locked() as state:
            state["by_workers"] = True
            for one in reversed(state["passes"]):
                if one["seed"] == base_seed and one["of"] == n_workers:
                    if worker not in one["workers"]:
                        one["workers"].append(worker)
                        return int(one["epoch"])
                    break
            epoch = int(state["next"])
            state["next"] = epoch + 1
            _append(state, {"seed": base_seed, "of": n_workers, "epoch": epoch, "workers": [worker]})
            return epoch

    def report(
        self, base_seed: int, worker: int, n_workers: int, epoch: int, figures: dict[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Store the report of a DataLoader worker that has finished an epoch."""
        with self._locked() as state:
            for one in reversed(state["passes"]):
                if (one["seed"], one["of"], one["epoch"]) == (base_seed, n_workers, epoch):
                    reports: dict[str, dict[str, Any]] = one.setdefault("reports", {})
                    reports[str(worker)] = figures
                    return list(reports.values()) if len(reports) == n_workers else None
        return None

    def reports(self) -> list[dict[str, Any]] | None:
        """Return the reports of the DataLoader workers for the latest epoch; None if no DataLoader worker began it."""
        with self._locked() as state:
            return list(state["passes"][-1].get("reports", {}).values()) if state["by_workers"] else None

    def unfinished(self) -> int | None:
        """Return the latest epoch if DataLoader workers read it and not all of them have finished, otherwise None."""
        with self._locked() as state:
            if not state["by_workers"]:
                return None
            last = state["passes"][-1]
            return None if len(last.get("reports", {})) == last["of"] else int(last["epoch"])


def _append(state: dict[str, Any], one_pass: dict[str, Any]) -> None:
    state["passes"].append(one_pass)
    del state["passes"][:-_REMEMBERED_PASSES]


def _remove(path: str, pid: int) -> None:
    # A forked child inherits the finalizer, but does not own the file.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)

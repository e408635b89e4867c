"""Epoch counter shared by the copies of a data set.

DataLoader workers hold copies of the data set, which they may discard after each epoch, so the count is in a small file
that all copies share. On Linux, this file is in memory, and nothing is left behind if the process that made it is
killed. The base seed of the DataLoader identifies the workers of one pass. A new base seed begins an epoch. So does a
worker that joins again with the same base seed: either the user reseeded torch, or the workers are persistent.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

from dasksc.errors import StorageError

# Number of passes whose workers may still be starting: several DataLoader iterators can be active at once.
_REMEMBERED_PASSES = 16


class _File:
    """File of a count, which disappears with the last of the counters of its process."""

    def __init__(self, next_epoch: int, begun: int) -> None:
        try:
            if sys.platform == "linux":
                descriptor = os.memfd_create(f"dasksc-epoch-{secrets.token_hex(8)}")
                self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
            else:
                descriptor, self.path = tempfile.mkstemp(prefix="dasksc-epoch-")
                weakref.finalize(self, _remove, self.path, os.getpid())
            weakref.finalize(self, os.close, descriptor)
            count = {"next": next_epoch, "begun": begun, "passes": [], "by_workers": False}
            os.write(descriptor, json.dumps(count).encode())
        except OSError as error:
            raise StorageError(
                f"the file of an epoch counter cannot be made: {error}. Free memory or disk space, or close files"
            ) from error
        # The name of the file behind the path: the number of a descriptor may later stand for another file.
        self.name = os.path.realpath(self.path)


# Files that this process made, by name, and its counters.
_files: weakref.WeakValueDictionary[str, _File] = weakref.WeakValueDictionary()
_counters: weakref.WeakSet[EpochCounter] = weakref.WeakSet()


class EpochCounter:
    """Epoch counter shared by every copy of a data set on this machine."""

    # A copy continues the count in a file of its own if the shared file does not exist, for example on another machine,
    # or in another process that is not a DataLoader worker, but a rank of its own.

    def __init__(self) -> None:
        self._make(next_epoch=0, begun=0)
        _counters.add(self)

    def _make(self, next_epoch: int, begun: int) -> None:
        self._file: _File | None = _File(next_epoch, begun)
        self._path, self._name = self._file.path, self._file.name
        _files[self._name] = self._file
        self._next, self._begun = next_epoch, begun
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        count = {"next": self.peek(), "begun": self._begun}
        return count | {"path": self._path, "name": self._name, "pid": self._pid}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._next, self._begun = state["next"], state["begun"]
        self._path, self._name, self._pid = state["path"], state["name"], state["pid"]
        self._file = _files.get(self._name)  # None in another process
        _counters.add(self)
        if not self._has_file:  # DataLoader workers of this process shall share a new file
            self._make(self._next, self._begun)

    @property
    def _has_file(self) -> bool:
        return os.path.exists(self._path) and os.path.realpath(self._path) == self._name

    def own(self) -> None:
        """Make a file of its own in a process that lacks one, unless it is a DataLoader worker."""
        if not self._has_file:
            self._make(self._next, self._begun)
        elif self._pid != os.getpid() and not _is_worker():
            with open(self._path, "rb", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                state = json.loads(file.readall())
            self._make(state["next"], state["begun"])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        self.own()
        with open(self._path, "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = file.readall()
            state = json.loads(before)
            yield state
            self._next, self._begun = state["next"], state["begun"]
            # A single write keeps the file valid if the process is killed. If the previous contents were longer, spaces
            # overwrite their end.
            file.seek(0)
            file.write(json.dumps(state).encode().ljust(len(before)))

    def peek(self) -> int:
        with self._locked() as state:
            return int(state["next"])

    def set(self, epoch: int) -> None:
        with self._locked() as state:
            state["next"] = epoch

    def advance(self) -> int:
        """Begin an epoch in this process and return its number."""
        with self._locked() as state:
            epoch = int(state["next"])
            state |= {"next": epoch + 1, "begun": state["begun"] + 1, "by_workers": False}
            return epoch

    def resume(self, base_seed: int, worker: int, n_workers: int, epoch: int) -> None:
        """Make the DataLoader workers of a pass resume `epoch` when they `join`."""
        # The pass after this one reads epoch ``epoch + 1``, even if it begins before any worker of this pass has
        # joined.
        with self._locked() as state:
            one = _latest(state, base_seed, n_workers)
            if one is None or one["epoch"] != epoch or worker in one["workers"]:
                _begin(state, base_seed, n_workers, epoch)

    def join(self, base_seed: int, worker: int, n_workers: int) -> int:
        """Return the epoch that a DataLoader worker reads; the first worker of a pass begins an epoch."""
        with self._locked() as state:
            state["by_workers"] = True
            one = _latest(state, base_seed, n_workers)
            if one is None or worker in one["workers"]:
                one = _begin(state, base_seed, n_workers, int(state["next"]))
            one["workers"].append(worker)
            return int(one["epoch"])

    def pass_of(self, base_seed: int, n_workers: int, before: int | None = None) -> tuple[int, int]:
        """Return how many epochs began before the pass of these workers, and its epoch."""
        # With the number of a worker as `before`, it is the pass that this worker joins next, which others may have.
        with self._locked() as state:
            one = _latest(state, base_seed, n_workers)
            is_begun = one is not None and before not in one["workers"]
            return (one["number"], one["epoch"]) if is_begun else (state["begun"], state["next"])

    def report(
        self, base_seed: int, worker: int, n_workers: int, epoch: int, figures: dict[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Store the report of a DataLoader worker that has finished an epoch; return all reports with the last."""
        with self._locked() as state:
            one = _latest(state, base_seed, n_workers, epoch)
            if one is None:
                return None
            one["reports"][str(worker)] = figures
            return list(one["reports"].values()) if len(one["reports"]) == n_workers else None

    def reports(self) -> list[dict[str, Any]] | None:
        """Return the reports of the DataLoader workers for the latest epoch; None if no DataLoader worker began it."""
        with self._locked() as state:
            return list(state["passes"][-1]["reports"].values()) if state["by_workers"] else None

    def unfinished(self) -> int | None:
        """Return the latest epoch if DataLoader workers read it and not all of it has been read, otherwise None."""
        with self._locked() as state:
            if not state["by_workers"]:
                return None
            last = state["passes"][-1]
            n_read = sum(not report["n_batches_left"] for report in last["reports"].values())
            return None if n_read == last["of"] else int(last["epoch"])


def _is_worker() -> bool:
    """Return True in a DataLoader worker; never import torch."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _own_all() -> None:
    for counter in list(_counters):
        counter.own()


# Workers that a rank forks share its count, not that of the process that has started the rank.
os.register_at_fork(before=_own_all)


def _latest(state: dict[str, Any], base_seed: int, n_workers: int, epoch: int | None = None) -> Any:
    """Return the latest pass of these DataLoader workers, or None."""
    for one in reversed(state["passes"]):
        if (one["seed"], one["of"]) == (base_seed, n_workers) and epoch in (None, one["epoch"]):
            return one
    return None


def _begin(state: dict[str, Any], base_seed: int, n_workers: int, epoch: int) -> Any:
    """Begin a pass over `epoch`, after which the next one reads ``epoch + 1``."""
    one = {"seed": base_seed, "of": n_workers, "epoch": epoch, "number": state["begun"], "workers": [], "reports": {}}
    state |= {"next": epoch + 1, "begun": state["begun"] + 1}
    state["passes"] = [*state["passes"][1 - _REMEMBERED_PASSES :], one]
    return one


def _remove(path: str, pid: int) -> None:
    # A forked child inherits the finalizer, but does not own the file.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)

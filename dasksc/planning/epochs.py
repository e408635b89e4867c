"""Which epoch an iteration reads, counted across the copies of a data set.

DataLoader workers hold copies of the data set, and non-persistent workers die with theirs: a counter
in the object would start again every epoch. `EpochCounter` keeps the count in a small file that all
copies share, whether they came to be by fork or by pickling.

Workers of one pass over a DataLoader recognise each other by the loader's base seed. A base seed not
met before begins an epoch; so does a worker that has already read this one (the user reseeded torch,
or the workers are persistent).
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

_REMEMBERED_PASSES = 16
# Passes whose workers may still be starting: several DataLoader iterators can be under way at once.


class EpochCounter:
    """A count of epochs shared by every copy of a data set on this machine.

    The first copy made owns the file and removes it at the end; a copy that outlives the file, that was unpickled on
    another machine, or that begins an epoch in another process, counts on by itself.
    """

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
                f"the count of epochs cannot be written to {tempfile.gettempdir()}: {error}. Make room there, or set "
                "TMPDIR to a folder that has some"
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
            # In one piece, whatever interrupts or kills this process; spaces cover the end of what was longer.
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
        """Begin an epoch in this process: return its number.

        A process that is no DataLoader worker, and was begun with a copy, is a rank of its own: it counts by itself
        from here on.
        """
        if self._pid != os.getpid():
            self._make(self.peek())
        with self._locked() as state:
            epoch = int(state["next"])
            state["next"] = epoch + 1
            state["by_workers"] = False
            return epoch

    def resume(self, base_seed: int, worker: int, n_workers: int, epoch: int) -> None:
        """Make a DataLoader worker, and those of the same pass, go on with `epoch` when they `join`.

        The pass after it reads the next epoch, whether or not this one has been asked for a batch by then.

        Parameters
        ----------
        base_seed, worker, n_workers
            As for `join`.
        epoch
            Which epoch the pass was reading.
        """
        with self._locked() as state:
            for known in reversed(state["passes"]):
                if known["seed"] == base_seed and known["of"] == n_workers:
                    if known["epoch"] == epoch and worker not in known["workers"]:
                        return
                    break
            state["next"] = epoch + 1
            _append(state, {"seed": base_seed, "of": n_workers, "epoch": epoch, "workers": []})

    def join(self, base_seed: int, worker: int, n_workers: int) -> int:
        """Return the epoch that a DataLoader worker reads, beginning one if it is the first to ask.

        Parameters
        ----------
        base_seed
            ``worker_info.seed - worker_info.id``: the same in all workers of one pass.
        worker, n_workers
            Which worker, of how many.
        """
        with self._locked() as state:
            state["by_workers"] = True
            for known in reversed(state["passes"]):
                if known["seed"] == base_seed and known["of"] == n_workers:
                    if worker not in known["workers"]:
                        known["workers"].append(worker)
                        return int(known["epoch"])
                    break
            epoch = int(state["next"])
            state["next"] = epoch + 1
            _append(state, {"seed": base_seed, "of": n_workers, "epoch": epoch, "workers": [worker]})
            return epoch

    def report(
        self, base_seed: int, worker: int, n_workers: int, epoch: int, figures: dict[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Say what a DataLoader worker has done of an epoch.

        Parameters
        ----------
        base_seed, worker, n_workers
            As for `join`.
        epoch
            What `join` returned.
        figures
            Plain numbers and strings.

        Returns
        -------
        list of dict or None
            What all workers of the pass have said, if this was the last of them.
        """
        with self._locked() as state:
            for known in reversed(state["passes"]):
                if (known["seed"], known["of"], known["epoch"]) == (base_seed, n_workers, epoch):
                    reports: dict[str, dict[str, Any]] = known.setdefault("reports", {})
                    reports[str(worker)] = figures
                    return list(reports.values()) if len(reports) == n_workers else None
        return None

    def reports(self) -> list[dict[str, Any]] | None:
        """Return what DataLoader workers have said of the epoch begun last; None if none of them began it."""
        with self._locked() as state:
            return list(state["passes"][-1].get("reports", {}).values()) if state["by_workers"] else None

    def unfinished(self) -> int | None:
        """Return the epoch begun last, if DataLoader workers read it and not all have come to its end."""
        with self._locked() as state:
            if not state["by_workers"]:
                return None
            last = state["passes"][-1]
            return None if len(last.get("reports", {})) == last["of"] else int(last["epoch"])


def _append(state: dict[str, Any], one_pass: dict[str, Any]) -> None:
    state["passes"].append(one_pass)
    del state["passes"][:-_REMEMBERED_PASSES]


def _remove(path: str, pid: int) -> None:
    # A forked child inherits the finaliser, but not the file.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)

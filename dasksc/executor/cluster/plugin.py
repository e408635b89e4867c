"""What runs on the workers, and on the scheduler, of a distributed cluster."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import cloudpickle
import distributed
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from dasksc._compat.distributed import carrier_of, take_back_plugin, worker_plugin_names
from dasksc.errors import StorageError
from dasksc.executor import metrics
from dasksc.executor.cluster import file_visibility
from dasksc.executor.cluster import transport as transport  # registers how results travel, here and on the workers
from dasksc.executor.local import Timed
from dasksc.executor.memory_admission import Headroom
from dasksc.storage.buffers import Recycling

__all__ = ["Carrier", "Envelope", "Janitor", "Stray", "carriers", "parcel", "run_fetch", "token_prefix"]


class Carrier(WorkerPlugin):
    """Carries a window's task to every worker, also to one that joins later.

    A future that holds the task would do the same, but tasks that depend on a future are sent to the
    workers that hold it, and a scattered one is lost with its worker.
    """

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._n_running = 0

    def setup(self, worker: object) -> None:
        """Show at the worker's ``/metrics`` what its fetches do."""
        metrics.export()

    def run(self, argument: Any) -> Timed:
        """Run one fetch."""
        with self._lock:
            self._n_running += 1
        try:
            start = perf_counter()
            result = self._fetch(argument)
            return perf_counter() - start, result
        finally:
            with self._lock:
                self._n_running -= 1

    def _fetch(self, argument: Any) -> Any:
        return self._task(argument)

    async def teardown(self, worker: object) -> None:
        """Wait for the fetches that are running; Dask calls this when the window closes."""
        while self._n_running:
            await asyncio.sleep(0.005)


class Envelope:
    """A task on its way, which arrives as a `RemoteCarrier`."""

    def __init__(self, pickled: bytes, files: tuple[file_visibility.Fingerprint, ...]) -> None:
        self._pickled = pickled
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteCarrier, (self._pickled, self._files)


class RemoteCarrier(Carrier):
    """Carries a task in another process, where a result is made into what travels."""

    def __init__(self, pickled: bytes, files: tuple[file_visibility.Fingerprint, ...]) -> None:
        super().__init__(cloudpickle.loads(pickled))
        self._pickled = pickled
        self._files = files
        self._asked = False
        self._closed = False
        self._largest: int | None = None  # of the results, in bytes
        self._recycling = Recycling()

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteCarrier, (self._pickled, self._files)

    def _fetch(self, argument: Any) -> Any:
        if not self._asked:  # a worker that has joined since the window began
            said = file_visibility.complaint(self._files)
            if said is not None:
                raise StorageError(f"The Dask worker at {distributed.get_worker().address} {said}.")
            self._asked = True
        has_begun = False

        def fetch() -> Any:
            nonlocal has_begun
            has_begun = True
            return self._compact(argument)

        room = Headroom.of(distributed.get_worker())
        result = room.run(fetch, size=self._largest, is_wanted=lambda: not self._closed)
        if not has_begun:  # None is what it returns then, but a task may return that, too
            return Stray()
        n_bytes = _n_bytes(result)
        if n_bytes is not None:
            self._largest = max(self._largest or 0, n_bytes)
        return result

    async def teardown(self, worker: object) -> None:
        """Have fetches that wait for room end, too; see `Carrier.teardown`."""
        self._closed = True
        await super().teardown(worker)

    def _compact(self, argument: Any) -> Any:
        result = self._task(argument)
        # In the task, on a thread of its own: the event loop that sends it has others to serve, and what is
        # mapped would weigh nothing in the worker's accounts.
        compact = getattr(result, "compact", None)
        return result if compact is None else compact()


def _n_bytes(result: Any) -> int | None:
    """Return what a result takes; None if it does not tell, so that only one such fetch runs at a time."""
    # What a task returns that leaves its result in a file, such as a conversion's, waits for no room.
    if result is None or isinstance(result, int):
        return 0
    n_bytes = getattr(result, "nbytes", None)
    return None if n_bytes is None else int(n_bytes)


def parcel(inside: bytes) -> WorkerPlugin:
    """Return what holds a pickled task on every worker that can import dasksc; to others it does no harm."""

    # Made in a function it travels as a whole: workers with other work to do may have no dasksc, and a plugin that
    # they cannot read would keep them from starting.
    class Parcel(WorkerPlugin):
        """Opened where it arrives."""

        def __init__(self) -> None:
            self.inside = inside
            self.carrier: Any = None

        def __getstate__(self) -> dict[str, Any]:
            return {"inside": self.inside, "carrier": None}

        def setup(self, worker: Any) -> None:
            """Unpack the task."""
            try:
                self.carrier = pickle.loads(self.inside)
            except ImportError:
                return  # whoever sends a fetch here is told
            self.carrier.setup(worker)

        async def teardown(self, worker: Any) -> None:
            """Wait for the fetches that are running."""
            if self.carrier is not None:
                await self.carrier.teardown(worker)

    return Parcel()


class Janitor(SchedulerPlugin):
    """Takes the tasks of a Client back from the workers when it goes, be it that its process was killed."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._tidying: list[asyncio.Future[Any]] = []

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Take back what the Client left."""
        if client != self._client_id:
            return
        prefix = token_prefix(client)
        for name in [name for name in worker_plugin_names(scheduler) if name.startswith(prefix)]:
            self._tidying.append(take_back_plugin(scheduler, name))
        scheduler.remove_plugin(name=prefix)


def token_prefix(client_id: str) -> str:
    """Return what the names of the tasks of a Client begin with."""
    return f"dasksc-{client_id}-"


# Carriers of the windows whose cluster lives in this process: nothing is pickled.
carriers: dict[str, Carrier] = {}


class Stray:
    """The result of a fetch whose window was closed before it began: of no use to anyone."""


def run_fetch(token: str, argument: Any) -> Timed:
    """Run one fetch on a worker."""
    carrier = carriers.get(token)
    if carrier is None:
        carrier = carrier_of(distributed.get_worker(), token)
    return (0.0, Stray()) if carrier is None else carrier.run(argument)

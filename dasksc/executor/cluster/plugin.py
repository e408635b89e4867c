"""Code that runs on the workers and on the scheduler of a distributed cluster."""

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

from dasksc._compat.distributed import task_plugin_of, unregister_plugin, worker_plugin_names
from dasksc.errors import StorageError
from dasksc.executor.cluster import file_visibility
from dasksc.executor.cluster import transport as transport  # registers the serializers of results
from dasksc.executor.local import Timed
from dasksc.executor.memory_admission import MemoryAdmission
from dasksc.storage.buffers import Recycling

__all__ = [
    "TaskPlugin",
    "TaskPayload",
    "CleanupPlugin",
    "CancelledFetch",
    "task_plugins",
    "portable_plugin",
    "run_fetch",
    "token_prefix",
]


class TaskPlugin(WorkerPlugin):
    """Worker plugin that holds the task of a `Window` on every Dask worker, including workers that join later.

    Scattering the task and passing its future to the fetches would not work: Dask would send the fetches only to
    workers that hold the task, and the task would be lost with those workers.
    """

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._n_running = 0

    def run(self, argument: Any) -> Timed:
        """Run one fetch; return its duration in seconds and its result."""
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
        """Wait for the running fetches. Dask calls this when the window closes."""
        while self._n_running:
            await asyncio.sleep(0.005)


class TaskPayload:
    """Pickled task that unpickles as a `RemoteTaskPlugin`."""

    def __init__(self, pickled: bytes, files: tuple[file_visibility.Fingerprint, ...]) -> None:
        self._pickled = pickled
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTaskPlugin, (self._pickled, self._files)


class RemoteTaskPlugin(TaskPlugin):
    """TaskPlugin that runs in another process and compacts results before they are sent."""

    def __init__(self, pickled: bytes, files: tuple[file_visibility.Fingerprint, ...]) -> None:
        super().__init__(cloudpickle.loads(pickled))
        self._pickled = pickled
        self._files = files
        self._are_files_checked = False
        self._closed = False
        self._largest: int | None = None  # Size of the largest result, in bytes.
        self._recycling = Recycling()

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTaskPlugin, (self._pickled, self._files)

    def _fetch(self, argument: Any) -> Any:
        if not self._are_files_checked:  # This worker may have joined after the window checked the files.
            mismatch = file_visibility.describe_mismatch(self._files)
            if mismatch is not None:
                raise StorageError(
                    f"The Dask worker at {distributed.get_worker().address} {mismatch}. Open a path that is the same "
                    "file on every machine."
                )
            self._are_files_checked = True
        has_begun = False

        def fetch() -> Any:
            nonlocal has_begun
            has_begun = True
            return self._compact(argument)

        admission = MemoryAdmission.of(distributed.get_worker())
        result = admission.run(fetch, size=self._largest, is_wanted=lambda: not self._closed)
        if not has_begun:  # `result` alone does not show this, because a task may also return None.
            return CancelledFetch()
        n_bytes = _n_bytes(result)
        if n_bytes is not None:
            self._largest = max(self._largest or 0, n_bytes)
        return result

    async def teardown(self, worker: object) -> None:
        """End the fetches that wait for memory, and wait for the running fetches."""
        self._closed = True
        await super().teardown(worker)

    def _compact(self, argument: Any) -> Any:
        result = self._task(argument)
        # The thread of the task makes the copy, because the worker's event loop, which sends the result, must stay
        # responsive. The worker does not count memory-mapped data, so a compact copy also makes its memory accounting
        # correct.
        compact = getattr(result, "compact", None)
        return result if compact is None else compact()


def _n_bytes(result: Any) -> int | None:
    """Return the size of a result in bytes, or None if it is unknown. Fetches of unknown size run one at a time."""
    # Tasks that write their result to a file, such as those of a conversion, return a number or None, which takes no
    # memory worth counting.
    if result is None or isinstance(result, int):
        return 0
    n_bytes = getattr(result, "nbytes", None)
    return None if n_bytes is None else int(n_bytes)


def portable_plugin(pickled: bytes) -> WorkerPlugin:
    """Return a plugin that loads a pickled task on workers that can import dasksc and does nothing on others."""

    # A class defined in a function is pickled by value. Workers that serve other programs may lack
    # dasksc, and a plugin that they cannot unpickle would keep them from starting.
    class PortablePlugin(WorkerPlugin):
        """Plugin that unpickles its content on the worker."""

        def __init__(self) -> None:
            self.pickled = pickled
            self.task_plugin: Any = None

        def __getstate__(self) -> dict[str, Any]:
            return {"pickled": self.pickled, "task_plugin": None}

        def setup(self, worker: Any) -> None:
            """Unpickle the task plugin and set it up."""
            try:
                self.task_plugin = pickle.loads(self.pickled)
            except ImportError:
                return  # A fetch sent to this worker raises the error.
            self.task_plugin.setup(worker)

        async def teardown(self, worker: Any) -> None:
            """Wait for the running fetches."""
            if self.task_plugin is not None:
                await self.task_plugin.teardown(worker)

    return PortablePlugin()


class CleanupPlugin(SchedulerPlugin):
    """Scheduler plugin that removes a Client's tasks from the workers when the Client disconnects or is killed."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._removals: list[asyncio.Future[Any]] = []

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Remove the tasks that the Client left on the workers."""
        if client != self._client_id:
            return
        prefix = token_prefix(client)
        for name in [name for name in worker_plugin_names(scheduler) if name.startswith(prefix)]:
            self._removals.append(unregister_plugin(scheduler, name))
        scheduler.remove_plugin(name=prefix)


def token_prefix(client_id: str) -> str:
    """Return the prefix of the names of a Client's tasks."""
    return f"dasksc-{client_id}-"


# Plugins of windows whose cluster runs in this process, by token; these are never pickled.
task_plugins: dict[str, TaskPlugin] = {}


class CancelledFetch:
    """Result of a fetch whose window was closed before the fetch began; it is discarded."""


def run_fetch(token: str, argument: Any) -> Timed:
    """Run one fetch on a worker."""
    task_plugin = task_plugins.get(token)
    if task_plugin is None:
        task_plugin = task_plugin_of(distributed.get_worker(), token)
    return (0.0, CancelledFetch()) if task_plugin is None else task_plugin.run(argument)

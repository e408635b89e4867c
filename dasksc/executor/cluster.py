"""Execution of fetches on the workers of a Dask cluster.

Each fetch is one Dask task. Dask schedules it, runs it again if its worker is lost, and forgets it when the Client
releases it or disconnects. As soon as a fetch has finished, the event loop of the Client transfers the result from the
worker to this process, even while the consumer is busy, and releases it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import cloudpickle
import dask
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from dasksc.errors import FetchError, StorageError
from dasksc.executor.schedulers import address_of
from dasksc.pushdown import DaskMatrix
from dasksc.storage.buffers import Recycling
from dasksc.storage.files import FileIdentity

logger = logging.getLogger("dasksc.window.cluster")

_RETRIES = 2  # Number of times that Dask repeats a failed fetch, possibly on another worker.
_CHECK_S = 30.0  # Maximum wait for the workers to check the files, and to receive the task.


class ClusterRunner:
    """Runner of fetches through a Client."""

    def __init__(
        self, name: str, task: Callable[[Any], Any], argument: Callable[[int], Any] | None, *, client: Any
    ) -> None:
        self._client = client
        self._argument = argument
        self._address = address_of(client)
        self._in_process = self._address.startswith("inproc://")
        # Windows may share a name, and must not receive each other's results.
        self._name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._futures: dict[int, Any] = {}
        self._n_submitted = 0
        self.transfer_s = 0.0
        try:
            self._task = client.sync(self._send_task, task)
        except (FutureCancelledError, CommClosedError) as error:
            raise FetchError(self._lost()) from error

    async def _send_task(self, task: Callable[[Any], Any]) -> Any:
        """Send the task to all workers, once, and return its future."""
        if self._in_process:
            return await self._client.scatter(task, broadcast=True, hash=False)
        pickled, files = pickle_with_files(_SentTask(task))
        has_workers = await self._check_workers(files)
        # Dask loses scattered data with the last worker that holds them, but repeats a task that unpickles the data.
        # Workers that join later receive the result from others.
        key = ("dasksc-task", self._name)
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": 2**62}):
            future = self._client.submit(cloudpickle.loads, pickled, key=key, pure=False, priority=1)
        if has_workers:  # An attempt, because Dask copies the result to any worker that needs it.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._client.replicate(future), _CHECK_S)
        return future

    async def _check_workers(self, files: Sequence[FileIdentity]) -> bool:
        """Raise an error if workers cannot import dasksc or do not see `files`; return False if there are none."""
        try:
            request = self._client.run(describe_mismatch, files, on_error="return")
            answers: dict[str, Any] = await asyncio.wait_for(request, _CHECK_S)
        except TimeoutError:
            logger.warning("A Dask worker has not answered for %.0f s, so its files are not checked.", _CHECK_S)
            return False
        for worker, answer in answers.items():
            if isinstance(answer, BaseException) and "No module named 'dasksc" in str(answer):
                raise FetchError(
                    f"The worker at {worker} of the Dask scheduler at {self._address} cannot import dasksc ({answer}). "
                    "Install the same version on every worker, or use another cluster for the fetches."
                )
        # Any other exception means that the worker has just left.
        failed = [f"the worker at {worker} {answer}" for worker, answer in answers.items() if isinstance(answer, str)]
        if failed:
            raise StorageError(
                f"{len(failed)} of {len(answers)} workers of the Dask scheduler at {self._address} cannot read the "
                f"files that were opened here: {'; '.join(failed)}. Open a path that is the same file on every machine."
            )
        return bool(answers)

    def submit(self, k: int) -> Future[Any]:
        """Send fetch `k`, and return a promise of its result in this process."""
        argument = k if self._argument is None else self._argument(k)
        future = self._futures[k] = self._client.submit(
            run_fetch,
            self._task,
            argument,
            key=(self._name, k),
            pure=False,
            retries=_RETRIES,
            priority=-self._n_submitted,  # earlier fetches first
        )
        self._n_submitted += 1
        return asyncio.run_coroutine_threadsafe(self._receive(k, future), self._client.loop.asyncio_loop)

    async def _receive(self, k: int, future: Any) -> Any:
        try:
            if self._in_process:
                _wait_for_this_process(asyncio.current_task())
            await future.exception()
            start = perf_counter()
            # Results bypass the scheduler, unless the Client was created with direct_to_workers=False.
            timed = await self._client.gather(future, direct=self._client.direct_to_workers is not False)
            self.transfer_s += perf_counter() - start
            return timed
        except (FutureCancelledError, CommClosedError) as error:
            raise ConnectionError(self._lost()) from error
        finally:
            if (sent := self._futures.pop(k, None)) is not None:
                sent.release()

    def _lost(self) -> str:
        return (
            f"The Dask scheduler at {self._address} no longer has the fetches: the connection was lost or closed, "
            "client.restart() was called, or they were cancelled. Create the data set again, with a new Client if this "
            "one is closed, and resume it with load_state_dict."
        )

    def close(self, *, is_waiting: bool) -> None:
        """Release every future, so that the scheduler forgets the fetches and the task."""
        # A transfer in progress is not cancelled, because the Client may have merged it with those of other windows.
        while self._futures:
            self._futures.popitem()[1].release()
        self._task.release()


# Receiving tasks that wait for workers in this process
_waiting: set[Any] = set()
_is_exiting = False


def _wait_for_this_process(task: Any) -> None:
    _waiting.add(task)
    task.add_done_callback(_waiting.discard)
    if _is_exiting:
        raise RuntimeError("the workers in this process have ended with its main thread")


def _end_waiting() -> None:
    # Python starts no threads any more when it exits, so workers in this process run no more fetches. Without this,
    # another thread that iterates would wait for them, and the interpreter for that thread.
    global _is_exiting
    _is_exiting = True
    for task in list(_waiting):
        task.get_loop().call_soon_threadsafe(task.cancel)


# Functions registered with `atexit` run after the interpreter has joined the threads.
getattr(threading, "_register_atexit", atexit.register)(_end_waiting)


def run_fetch(task: Callable[[Any], Any], argument: Any) -> tuple[float, Any]:
    """Run one fetch on a worker; return its duration in seconds and its result."""
    start = perf_counter()
    result = task(argument)
    return perf_counter() - start, result


class _SentTask:
    """Task on a worker of another process, whose results are compact."""

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task = task
        self._recycling = Recycling()

    def __reduce__(self) -> tuple[Any, ...]:
        return _SentTask, (self._task,)

    def __call__(self, argument: Any) -> Any:
        result = self._task(argument)
        compact = getattr(result, "compact", None)
        # Mapped rows cannot be sent, and Dask would not count them as memory of the worker.
        return result if compact is None else compact()


def describe_mismatch(files: Sequence[FileIdentity]) -> str | None:
    """Describe the first file that differs on this machine; return None if all are the same."""
    for file in files:
        try:
            here = FileIdentity.of(file.path)
        except OSError as error:
            return f"does not see {file.path} ({error.strerror or error})"
        if here != file:
            what = f"{here.size} bytes, not {file.size}" if here.size != file.size else "another modification time"
            return f"sees a different file at {file.path} ({what}; to copy a file with its time, use cp -p or rsync -t)"
    return None


def pickle_with_files(task: Any) -> tuple[bytes, tuple[FileIdentity, ...]]:
    """Pickle a task; return the pickle and the local files that the task has opened and will read on a worker."""
    buffer = io.BytesIO()
    pickler = _FileRecordingPickler(buffer)
    pickler.dump(task)
    return buffer.getvalue(), tuple(sorted(pickler.files, key=lambda file: file.path))


class _FileRecordingPickler(cloudpickle.Pickler):
    """Pickler that records the files of the pickled objects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.files: set[FileIdentity] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FileIdentity) and os.path.isfile(obj.path):
            self.files.add(obj)
        elif isinstance(obj, DaskMatrix):
            # A `DaskMatrix` pickles itself to bytes, which hide the objects inside.
            inner = _FileRecordingPickler(io.BytesIO())
            inner.dump(obj.array)
            self.files |= inner.files
        return super().reducer_override(obj)

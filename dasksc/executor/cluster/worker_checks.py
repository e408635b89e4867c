"""Checks of workers before their first task: visibility of the files, and location of the workers."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from typing import Any

import distributed

from dasksc._compat.distributed import workers_of
from dasksc.errors import FetchError, StorageError
from dasksc.executor.cluster import file_visibility

__all__ = ["check_workers"]

logger = logging.getLogger("dasksc.window.cluster")

# Addresses of schedulers for which the advice to use threads was logged.
_advised: set[str] = set()

# For each Client, the pairs of worker address and files that have been checked. Each pair is checked once.
_checked: weakref.WeakKeyDictionary[distributed.Client, set[tuple[str, tuple[file_visibility.Fingerprint, ...]]]] = (
    weakref.WeakKeyDictionary()
)


async def check_workers(client: Any, files: tuple[file_visibility.Fingerprint, ...]) -> None:
    """Raise an error if workers cannot import dasksc or do not see `files`.

    If all workers are other processes on this machine, log a warning, once per scheduler, because threads would be
    faster.
    """
    checked = _checked.setdefault(client, set())
    workers = await workers_of(client)
    new = [address for address in workers if (address, files) not in checked]
    if not new:
        return
    results = await client.run(_worker_report, files, workers=new, on_error="return")
    for address, result in results.items():
        if isinstance(result, BaseException) and "No module named 'dasksc" in str(result):
            raise FetchError(
                f"The worker at {address} of the Dask scheduler at {client.scheduler.address} cannot import dasksc "
                f"({result}). Install the same version on every worker, or use another cluster for the fetches."
            )
    # Any other exception means that the worker has just left.
    answers = {address: result for address, result in results.items() if not isinstance(result, BaseException)}
    failed = {address: answer[2] for address, answer in answers.items() if answer[2] is not None}
    if failed:
        complaints = "; ".join(f"the worker at {address} {complaint}" for address, complaint in failed.items())
        raise StorageError(
            f"{len(failed)} of {len(workers)} workers of the Dask scheduler at {client.scheduler.address} cannot read "
            f"the files that were opened here: {complaints}. Open a path that is the same file on every machine."
        )
    checked.update((address, files) for address in answers)
    here = _host_and_pid()
    if client.scheduler.address in _advised or len(answers) < len(workers):
        return
    _advised.add(client.scheduler.address)
    if all(host == here[0] and pid != here[1] for host, pid, _ in answers.values()):
        logger.warning(
            "The Dask workers at %s are other processes on this machine, so every result is copied "
            "through a socket. scheduler='threads', or LocalCluster(processes=False), is faster.",
            client.scheduler.address,
        )


def _worker_report(files: tuple[file_visibility.Fingerprint, ...]) -> tuple[str, int, str | None]:
    return *_host_and_pid(), file_visibility.describe_mismatch(files)


def _host_and_pid() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()

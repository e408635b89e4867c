"""What is asked of workers before they get the first task: whether they see its files, and where they are."""

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

__all__ = ["ask_workers"]

logger = logging.getLogger("dasksc.window.cluster")

# Schedulers of whose workers it was said that threads are faster.
_advised: set[str] = set()

# What workers have answered, by Client: they are asked once.
_asked: weakref.WeakKeyDictionary[distributed.Client, set[tuple[str, tuple[file_visibility.Fingerprint, ...]]]] = (
    weakref.WeakKeyDictionary()
)


async def ask_workers(client: Any, files: tuple[file_visibility.Fingerprint, ...]) -> None:
    """Refuse workers that do not see the files; say, once, that threads beat processes on this machine."""
    asked = _asked.setdefault(client, set())
    workers = await workers_of(client)
    new = [address for address in workers if (address, files) not in asked]
    if not new:
        return
    results = await client.run(_answer, files, workers=new, on_error="return")
    for address, result in results.items():
        if isinstance(result, BaseException) and "No module named 'dasksc" in str(result):
            raise FetchError(
                f"The worker at {address} of the Dask scheduler at {client.scheduler.address} cannot import dasksc "
                f"({result}). Install the same version on every worker, or give the fetches a cluster of their own."
            )
    # Others have left just then.
    answers = {address: result for address, result in results.items() if not isinstance(result, BaseException)}
    said = {address: answer[2] for address, answer in answers.items() if answer[2] is not None}
    if said:
        complaints = "; ".join(f"the worker at {address} {complaint}" for address, complaint in said.items())
        raise StorageError(
            f"{len(said)} of {len(workers)} workers of the Dask scheduler at {client.scheduler.address} cannot read "
            f"what was opened here: {complaints}. Open a path that is the same file on every machine."
        )
    asked.update((address, files) for address in answers)
    here = _where()
    if client.scheduler.address in _advised or len(answers) < len(workers):
        return
    _advised.add(client.scheduler.address)
    if all(host == here[0] and pid != here[1] for host, pid, _ in answers.values()):
        logger.warning(
            "The Dask workers at %s are other processes on this very machine: every result is copied "
            "through a socket. scheduler='threads', or LocalCluster(processes=False), is faster.",
            client.scheduler.address,
        )


def _answer(files: tuple[file_visibility.Fingerprint, ...]) -> tuple[str, int, str | None]:
    return *_where(), file_visibility.complaint(files)


def _where() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()

"""Requests of a forked process, made for it by a new one.

``DataLoader(dataset, num_workers=2)`` forks its workers on Linux before Python 3.14, after the process has read from
the store to open the atlas. obstore's threads do not survive a fork: a request of the worker would wait for them for
ever, without a word (measured with obstore 0.12.1). So the worker starts a process of its own, in about two seconds,
which makes its requests: a socket for each thread, questions and answers pickled. It ends with the child, whose sockets
close.

Ranges of 4 MiB come through at 0.8 GB/s. A `multiprocessing.managers.BaseManager` in its place saves 50 lines, and
brings three quarters of that: its connections copy once more.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from dasksc import config
from dasksc.errors import StorageError
from dasksc.platforms import after_fork
from dasksc.storage.remote.client import WHOLE_BYTES, ObjectIdentity, shown

__all__ = ["OrphanClient", "received", "send"]

_SIZE = struct.Struct("<Q")


class OrphanClient:
    """A store, asked by another process; see `dasksc.storage.remote.client.Client`.

    Parameters
    ----------
    root, options
        As for `dasksc.storage.remote.connecting.client_of`.
    """

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root = root
        self._options = dict(options)

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object; see `Client.stat`."""
        identity: ObjectIdentity = self._ask("stat", key)
        return identity

    def get(
        self,
        key: str,
        start: int = 0,
        stop: int | None = None,
        *,
        expected: ObjectIdentity | None = None,
        longest: int = WHOLE_BYTES,
    ) -> tuple[memoryview, ObjectIdentity]:
        """Return bytes of an object; see `Client.get`."""
        data, identity = self._ask("get", key, start, stop, expected=expected, longest=longest)
        return memoryview(data), identity

    def listed(self, prefix: str) -> list[str]:
        """Return keys below a prefix; see `Client.listed`."""
        keys: list[str] = self._ask("listed", prefix)
        return keys

    def children(self, prefix: str) -> list[str]:
        """Return names below a prefix; see `Client.children`."""
        names: list[str] = self._ask("children", prefix)
        return names

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            connection = _connection()
            send(connection, (self._root, self._options, method, args, kwargs))
            answer = received(connection)
        except (OSError, EOFError) as error:
            raise StorageError(
                f"{shown(self._root)}: the process that makes requests for this forked one has ended ({error!r}). "
                "Start DataLoader workers with multiprocessing_context='spawn', or use num_workers=0."
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Helper:
    """The process that makes requests for this one, and the socket by which threads get one each."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dasksc.storage.remote.fork_proxy_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "DASK_DASKSC__RETRY_TIMEOUT": str(config.get("retry-timeout")),
                },
            )

    def connection(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [b"c"], [theirs.fileno()])
        return ours


_helper: _Helper | None = None
_starting = threading.Lock()
_mine = threading.local()


def _connection() -> socket.socket:
    """Return this thread's socket."""
    global _helper
    pid, held = getattr(_mine, "held", (None, None))
    if pid != os.getpid() or held is None:
        with _starting:
            if _helper is None or _helper.pid != os.getpid():
                _helper = _Helper()
        held = _helper.connection()
        _mine.held = os.getpid(), held
    return held


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread of the parent may have held the old one


after_fork(_after_fork)


def send(connection: socket.socket, value: Any) -> None:
    """Send a value, pickled."""
    data = pickle.dumps(value)
    connection.sendall(_SIZE.pack(len(data)))
    connection.sendall(data)


def received(connection: socket.socket) -> Any:
    """Wait for a value and return it."""
    (size,) = _SIZE.unpack(_exactly(connection, _SIZE.size))
    return pickle.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    view, done = memoryview(data), 0
    while done < n_bytes:
        n = connection.recv_into(view[done:])
        if n == 0:
            raise EOFError("the other end is gone")
        done += n
    return data

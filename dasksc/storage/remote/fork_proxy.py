"""Helper process that makes the requests of a forked process.

Before Python 3.14, ``DataLoader(dataset, num_workers=2)`` forks its workers on Linux, after the parent process has read
from the store to open the atlas. The threads of obstore do not survive a fork: a request of the worker would wait for
them forever, without an error (observed with obstore 0.12.1). The worker therefore starts a helper process, which takes
about two seconds. Each thread has a socket; requests and responses are pickled. When the worker ends, its sockets
close, and the helper process ends.

Ranges of 4 MiB arrive at 0.8 GB/s. A `multiprocessing.managers.BaseManager` would save 50 lines, but reach only three
quarters of that rate, since its connections copy the data once more.
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
from dasksc.storage.remote.client import WHOLE_BYTES, ObjectIdentity, redact_url

__all__ = ["ForkProxyClient", "receive", "send"]

_SIZE = struct.Struct("<Q")


class ForkProxyClient:
    """Client of a store that makes requests in a helper process; see `dasksc.storage.remote.client.Client`."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root = root
        self._options = dict(options)

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object; see `Client.stat`."""
        identity: ObjectIdentity = self._request("stat", key)
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
        data, identity = self._request("get", key, start, stop, expected=expected, longest=longest)
        return memoryview(data), identity

    def listed(self, prefix: str) -> dict[str, ObjectIdentity]:
        """Return the objects below a prefix; see `Client.listed`."""
        objects: dict[str, ObjectIdentity] = self._request("listed", prefix)
        return objects

    def children(self, prefix: str) -> list[str]:
        """Return names below a prefix; see `Client.children`."""
        names: list[str] = self._request("children", prefix)
        return names

    def _request(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            connection = _connection()
            send(connection, (self._root, self._options, method, args, kwargs))
            answer = receive(connection)
        except (OSError, EOFError) as error:
            raise StorageError(
                f"{redact_url(self._root)}: the helper process that makes requests for this forked process has ended "
                f"({error!r}). "
                "Start DataLoader workers with multiprocessing_context='spawn', or use num_workers=0."
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


class _HelperProcess:
    """Helper process that makes the requests of the current process."""

    # It receives one socket per thread through a control socket.

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


_helper_process: _HelperProcess | None = None
_starting = threading.Lock()
_thread_local = threading.local()


def _connection() -> socket.socket:
    """Return the socket of this thread."""
    global _helper_process
    pid, held = getattr(_thread_local, "held", (None, None))
    if pid != os.getpid() or held is None:
        with _starting:
            if _helper_process is None or _helper_process.pid != os.getpid():
                _helper_process = _HelperProcess()
        held = _helper_process.connection()
        _thread_local.held = os.getpid(), held
    return held


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread may have held the old one at the time of the fork


after_fork(_after_fork)


def send(connection: socket.socket, value: Any) -> None:
    """Pickle a value and send it."""
    data = pickle.dumps(value)
    connection.sendall(_SIZE.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """Wait for a pickled value, and return it."""
    (size,) = _SIZE.unpack(_exactly(connection, _SIZE.size))
    return pickle.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    view, done = memoryview(data), 0
    while done < n_bytes:
        n = connection.recv_into(view[done:])
        if n == 0:
            raise EOFError("the other process closed the socket")
        done += n
    return data

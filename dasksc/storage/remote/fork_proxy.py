"""Requests of a forked process, made for it by a new one.

``DataLoader(dataset, num_workers=2)`` forks its workers on Linux before Python 3.14. The process has opened the atlas
by then, and obstore's threads do not survive a fork: a request of the worker would wait for them for ever, without a
word (measured with obstore 0.12.1). So the worker starts a process of its own, in about two seconds, which makes its
requests and ends with it; 4 MiB ranges come through at 0.7 GB/s, more than most links have.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.managers import BaseManager
from typing import Any

from dasksc import config
from dasksc.errors import DaskscError, StorageError
from dasksc.platforms import after_fork
from dasksc.storage.remote.client import WHOLE_BYTES, ObjectIdentity, shown

__all__ = ["OrphanClient"]


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
        self._store: Any = None

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
            if self._store is None:  # threads that race here ask for two, which is harmless
                self._store = _helper().store(self._root, self._options)
            # Each thread has a connection of its own.
            return getattr(self._store, method)(*args, **kwargs)
        except DaskscError:
            raise
        except (OSError, EOFError) as error:
            raise StorageError(
                f"{shown(self._root)}: the process that makes requests for this forked one has ended ({error!r}). "
                "Start DataLoader workers with multiprocessing_context='spawn', or use num_workers=0."
            ) from error


class _Store:
    """A store in the process that makes the requests."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        from dasksc.storage.remote.connecting import client_of

        client = client_of(root, options)
        self.stat, self.listed, self.children, self._get = client.stat, client.listed, client.children, client.get

    def get(self, *args: Any, **kwargs: Any) -> tuple[bytes, ObjectIdentity]:
        data, identity = self._get(*args, **kwargs)
        return bytes(data), identity


class _Stores(BaseManager):
    """Makes stores in another process."""


_Stores.register("store", _Store, exposed=("stat", "get", "listed", "children"))

_running: tuple[int, Any, subprocess.Popen[bytes]] | None = None
_starting = threading.Lock()


def _helper() -> Any:
    """Return the manager of the process that makes requests for this one."""
    global _running
    with _starting:
        if _running is None or _running[0] != os.getpid():
            name, key = f"dasksc-{secrets.token_hex(16)}", secrets.token_bytes(32)
            # Linux has sockets without a file.
            address = f"\0{name}" if sys.platform == "linux" else os.path.join(tempfile.gettempdir(), name)
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({address!r})"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "DASK_DASKSC__RETRY_TIMEOUT": str(config.get("retry-timeout")),
                },
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(key)
            process.stdin.flush()
            process.stdout.readline()  # when it listens
            manager = _Stores(address, key)
            manager.connect()
            _running = os.getpid(), manager, process
    return _running[1]


def serve(address: str) -> None:
    """Make requests for the process that started this one, until that ends; the key comes through stdin."""
    server = _Stores(address, sys.stdin.buffer.read(32)).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    if not address.startswith("\0"):
        os.unlink(address)
    # At once: threads may be waiting for a server.
    os._exit(0)


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread of the parent may have held the old one


after_fork(_after_fork)

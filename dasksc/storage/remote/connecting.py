"""The client of each store: one in each process, whatever number of arrays, tasks and threads read from it.

obstore makes the requests; what it does not know is asked through fsspec (`dasksc.storage.remote.fsspec_client`).
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from dasksc import config
from dasksc.errors import InputError
from dasksc.platforms import after_fork
from dasksc.storage.remote.client import SCHEMES, Client

__all__ = ["client_of", "split_url"]


def split_url(url: str) -> tuple[str, str]:
    """Return the root of the store that a URL is in, and the key in that store."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        from dasksc.storage.remote import fsspec_client

        return fsspec_client.split_url(url)
    if parts.scheme in ("http", "https"):
        # What follows the path, a token for example, belongs to every request.
        return urlunsplit((parts.scheme, parts.netloc, "/", parts.query, "")), unquote(parts.path).strip("/")
    if parts.scheme == "file":
        return "file:///", unquote(url.partition("://")[2].partition("/")[2]).strip("/")
    # Object stores take keys as they are.
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")


_clients: dict[tuple[Any, ...], Client] = {}
# obstore's threads do not survive a fork, and requests of a child would wait for them for ever.
_is_orphaned = False


def _after_fork() -> None:
    global _is_orphaned
    _is_orphaned = _is_orphaned or "obstore" in sys.modules


after_fork(_after_fork)


def client_of(root: str, options: Mapping[str, Any]) -> Client:
    """Return this process's client of the store at `root`.

    Raises
    ------
    InputError
        If obstore is not installed, or does not know an option.
    """
    try:
        key = (os.getpid(), root, pickle.dumps(sorted(options.items())), config.get_seconds("retry-timeout"))
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"storage_options must be plain values that pickle: {error}") from error
    client = _clients.get(key)
    if client is None:
        # Threads that race here make two, of which one is kept.
        client = _clients.setdefault(key, _made(root, options))
    return client


def _made(root: str, options: Mapping[str, Any]) -> Client:
    if urlsplit(root).scheme not in SCHEMES:
        from dasksc.storage.remote.fsspec_client import FsspecClient

        return FsspecClient(root, options)
    if not _is_orphaned:
        from dasksc.storage.remote.obstore_client import ObstoreClient

        return ObstoreClient(root, options)
    from dasksc.storage.remote.fork_proxy import OrphanClient

    return OrphanClient(root, options)

"""Clients of remote stores, one per store and process, shared by all arrays, tasks and threads.

obstore makes the requests. Schemes that it does not support use fsspec (`dasksc.storage.remote.fsspec_client`).
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
    """Split a URL into the root of its store and the key in the store."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        from dasksc.storage.remote import fsspec_client

        return fsspec_client.split_fsspec_url(url)
    if parts.scheme in ("http", "https"):
        # Every request includes the query, which may be a token.
        return urlunsplit((parts.scheme, parts.netloc, "/", parts.query, "")), unquote(parts.path).strip("/")
    if parts.scheme == "file":
        return "file:///", unquote(url.partition("://")[2].partition("/")[2]).strip("/")
    # URLs of object stores contain the key as it is, without percent-encoding.
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key.strip("/")


_clients: dict[tuple[Any, ...], Client] = {}
# True in a forked child if the parent had loaded obstore. The threads of obstore do not survive a fork, so requests
# would wait forever.
_is_orphaned = False


def _after_fork() -> None:
    global _is_orphaned
    _is_orphaned = _is_orphaned or "obstore" in sys.modules


after_fork(_after_fork)


def client_of(root: str, options: Mapping[str, Any]) -> Client:
    """Return the client of this process for the store at `root`."""
    try:
        key = (os.getpid(), root, pickle.dumps(sorted(options.items())), config.get_seconds("retry-timeout"))
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"storage_options must be plain values that can be pickled: {error}") from error
    client = _clients.get(key)
    if client is None:
        # If threads race, each makes a client, and the first one is kept.
        client = _clients.setdefault(key, _make_client(root, options))
    return client


def _make_client(root: str, options: Mapping[str, Any]) -> Client:
    if urlsplit(root).scheme not in SCHEMES:
        from dasksc.storage.remote.fsspec_client import FsspecClient

        return FsspecClient(root, options)
    if not _is_orphaned:
        from dasksc.storage.remote.obstore_client import ObstoreClient

        return ObstoreClient(root, options)
    from dasksc.storage.remote.fork_proxy import ForkProxyClient

    return ForkProxyClient(root, options)

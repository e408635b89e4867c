"""Requests to object stores and web servers, through obstore; what they raise names the place, never a credential.

obstore retries what a server throttles, fails or cuts short, with growing pauses. Each process has one client for
each store, whatever number of arrays, tasks and threads read from it.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from dasksc import config
from dasksc.errors import CorruptDataError, InputError, MissingPathError, StorageError

__all__ = ["Client", "ObjectIdentity", "client_of", "shown", "split_url"]

# A body that breaks off is asked for again, from where it broke off, by obstore; where it cannot, by us.
_ATTEMPTS = 3
# What is read whole, of unknown size, is metadata: consolidated ones of thousands of arrays have a few MB.
WHOLE_BYTES = 2**28
_SECRET = re.compile(r"key|secret|token|password|sas|credential|signature", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectIdentity:
    """An object as it was when first seen: where it is, its size in bytes, its ETag and its time of change.

    `path` is for people: a URL without credentials. Servers that give no ETag are trusted by size and time.
    """

    path: str
    size: int
    etag: str | None
    modified: str

    def compare(self, now: ObjectIdentity) -> None:
        """Refuse `now` if it is another identity than this one."""
        same = self.etag == now.etag if self.etag and now.etag else self.modified == now.modified
        if not same or self.size != now.size:
            raise replaced(self.path)


def replaced(path: str) -> CorruptDataError:
    """Return the error for an object that is no longer the one that was opened."""
    return CorruptDataError(
        f"{path} was replaced or changed since it was opened. Open it again, and do not write to it while it is "
        "being read."
    )


class Client(Protocol):
    """One store, as the readers see it. Its methods may be called from several threads at once.

    Keys are relative to the root of the store. All raise `MissingPathError` where there is no such object, and
    `StorageError` where the store does not answer or refuses.
    """

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object."""

    def get(
        self,
        key: str,
        start: int = 0,
        stop: int | None = None,
        *,
        expected: ObjectIdentity | None = None,
        longest: int = WHOLE_BYTES,
    ) -> tuple[memoryview, ObjectIdentity]:
        """Return bytes [start, stop) of an object, and what it is.

        Refuse it if it is not `expected`, or if all of it is asked for and it is longer than `longest`.
        """

    def listed(self, prefix: str) -> list[str]:
        """Return the keys of all objects below a prefix, ascending."""

    def children(self, prefix: str) -> list[str]:
        """Return the names of what is directly below a prefix, ascending."""


def shown(url: str) -> str:
    """Return a URL as people may see it: without user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def split_url(url: str) -> tuple[str, str]:
    """Return the root of the store that a URL is in, and the key in that store."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        # What follows the path, a token for example, belongs to every request.
        return urlunsplit((parts.scheme, parts.netloc, "/", parts.query, "")), unquote(parts.path).strip("/")
    if parts.scheme == "file":
        return "file:///", unquote(parts.path).strip("/")
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def client_of(root: str, options: Mapping[str, Any]) -> Client:
    """Return this process's client of the store at `root`.

    Raises
    ------
    InputError
        If obstore is not installed, or does not know an option.
    """
    try:
        key = (os.getpid(), root, pickle.dumps(sorted(options.items())), config.get_seconds("retry-timeout"))
    except Exception as error:
        raise InputError(f"storage_options must be plain values that pickle: {error}") from error
    client = _clients.get(key)
    if client is None:
        # Threads that race here make two, of which one is kept.
        client = _clients.setdefault(key, _made(root, options))
    return client


def _made(root: str, options: Mapping[str, Any]) -> Client:
    if not _is_orphaned:
        return ObstoreClient(root, options)
    from dasksc.storage.orphan import OrphanClient

    return OrphanClient(root, options)


class ObstoreClient:
    """A store through obstore; see `Client`.

    Parameters
    ----------
    root
        The URL of the store.
    options
        As `obstore.store.from_url` takes them; `client_options` and `retry_config` are completed by defaults.
    """

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        try:
            import obstore
        except ImportError as error:
            raise InputError(
                f"{shown(root)} is read through obstore, which is not installed: pip install 'dasksc[remote]'"
            ) from error
        self._shown = shown(root)
        self._secrets = _secrets(root, options)
        self._library = obstore
        try:
            self._store = _store(root, options)
        except Exception as error:
            # Without the original error, whose text holds what was given.
            raise InputError(
                f"{self._shown} cannot be opened with these storage_options: {self._cleaned(error)}. They are those "
                "of obstore's stores: region, endpoint, skip_signature, client_options, ..."
            ) from None

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object; see `Client.stat`."""
        try:
            return self._identity(key, self._library.head(self._store, key))
        except Exception as error:
            raise self._translated(error, key, "") from None

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
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        # A weak ETag matches nothing.
        if expected is not None and expected.etag and not expected.etag.startswith("W/"):
            options["if_match"] = expected.etag
        for attempt in range(_ATTEMPTS):
            result = None
            try:
                result = self._library.get(self._store, key, options=options)
                identity = self._identity(key, result.meta)
                if expected is not None:
                    expected.compare(identity)
                if stop is None and identity.size > longest:
                    raise CorruptDataError(
                        f"{self._path(key)} has {identity.size} bytes, where at most {longest} belong. It is not read."
                    )
                data = memoryview(result.bytes())
                break
            except CorruptDataError:
                raise
            except self._library.exceptions.PreconditionError:
                raise replaced(self._path(key)) from None
            except Exception as error:
                # Without a result obstore has tried again itself.
                if attempt == _ATTEMPTS - 1 or result is None:
                    raise self._translated(error, key, _span(start, stop)) from None
        wanted = (identity.size if stop is None else stop) - start
        if len(data) != wanted:
            raise CorruptDataError(
                f"{self._path(key)} has {identity.size} bytes, and of {_span(start, stop) or 'all'} {len(data)} came. "
                "It is truncated, or was replaced: upload it again, or open it again."
            )
        return data, identity

    def listed(self, prefix: str) -> list[str]:
        """Return keys below a prefix; see `Client.listed`."""
        self._refuse_listing(prefix)
        try:
            pages = self._library.list(self._store, prefix or None)
            return sorted(item["path"] for page in pages for item in page)
        except Exception as error:
            raise self._translated(error, prefix, "") from None

    def children(self, prefix: str) -> list[str]:
        """Return names below a prefix; see `Client.children`."""
        self._refuse_listing(prefix)
        try:
            result = self._library.list_with_delimiter(self._store, prefix or None)
        except Exception as error:
            raise self._translated(error, prefix, "") from None
        paths = [*result["common_prefixes"], *(item["path"] for item in result["objects"])]
        return sorted(path.rpartition("/")[2] for path in paths)

    def _path(self, key: str) -> str:
        return f"{self._shown.removeprefix('file://').rstrip('/')}/{key}"

    def _identity(self, key: str, meta: Mapping[str, Any]) -> ObjectIdentity:
        return ObjectIdentity(
            path=self._path(key), size=meta["size"], etag=meta["e_tag"], modified=meta["last_modified"].isoformat()
        )

    def _refuse_listing(self, prefix: str) -> None:
        if self._shown.startswith("http"):
            raise StorageError(
                f"{self._path(prefix)} is on a web server, which does not tell what is there. A Zarr store needs "
                "consolidated metadata: zarr.consolidate_metadata(path), before it is uploaded."
            )

    def _translated(self, error: Exception, key: str, span: str) -> StorageError:
        path, reason = self._path(key), self._cleaned(error)
        exceptions = self._library.exceptions
        if isinstance(error, FileNotFoundError):
            return MissingPathError(f"there is nothing at {path}")
        if isinstance(error, exceptions.NotSupportedError):
            return StorageError(f"{path} cannot be read: {reason}. The server must serve byte ranges (Accept-Ranges).")
        what = f"{path}{', ' + span if span else ''} cannot be read: {reason}."
        # Where no credentials are given, clouds are asked for those of this machine, at an address of their own.
        is_denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if is_denied or "169.254.169.254" in reason or "metadata.google.internal" in reason:
            return StorageError(
                f"{what} Check the credentials (storage_options, or the environment: AWS_ACCESS_KEY_ID, "
                "GOOGLE_APPLICATION_CREDENTIALS, ...) and the region. A public bucket is read without any: "
                "storage_options={'skip_signature': True}."
            )
        return StorageError(f"{what} Check that the endpoint and the region are right and that it can be reached.")

    def _cleaned(self, error: Exception) -> str:
        """Return what obstore says, without what it quotes of requests and answers."""
        text = str(error)
        code = re.search(r"<Code>(\w+)</Code>", text)
        line = text.partition("\n")[0].partition(": <")[0]
        line = re.sub(r"(://)[^/@\s]*@", r"\1", line)
        line = re.sub(r"\?\S*", "", line).strip(" :.")
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return f"{line} ({code[1]})" if code else line


def _span(start: int, stop: int | None) -> str:
    return "" if stop is None else f"bytes {start} to {stop}"


def _secrets(root: str, options: Mapping[str, Any]) -> list[str]:
    """Return what must not be shown, the longest first."""

    def of(values: Mapping[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from of(value)
            elif isinstance(value, str) and (_SECRET.search(name) or name in ("authorization", "Authorization")):
                yield value

    found = [*of(options), *(part for part in (urlsplit(root).query, urlsplit(root).password) if part)]
    return sorted((one for one in found if len(one) > 3), key=len, reverse=True)


def _store(root: str, options: Mapping[str, Any]) -> Any:
    """Return obstore's store, with timeouts and retries that suit long transfers."""
    from obstore.store import HTTPStore, from_url

    options = dict(options)
    retry_s = config.get_seconds("retry-timeout") or 0.0
    # Retries end by the clock, not by count.
    retries: dict[str, Any] = {
        "max_retries": 1000 if retry_s else 0,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    retries |= options.pop("retry_config", None) or {}
    # A request that transfers nothing is given up, one that is merely slow is not.
    client: dict[str, Any] = {"timeout": "1h", "read_timeout": "30s", "connect_timeout": "10s"}
    parts = urlsplit(root)
    if parts.scheme == "file":
        from obstore.store import LocalStore

        return LocalStore("/")
    endpoint = str(options.get("endpoint") or options.get("aws_endpoint_url") or os.environ.get("AWS_ENDPOINT_URL", ""))
    if parts.scheme == "http" or endpoint.startswith("http://"):
        client["allow_http"] = True
    if parts.scheme in ("http", "https"):
        host = parts.netloc.rpartition("@")[2]
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            client["default_headers"] = {"authorization": f"Basic {base64.b64encode(pair).decode()}"}
        client |= options.pop("client_options", None) or {}
        url = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        return HTTPStore(url, client_options=client, retry_config=retries, **options)
    client |= options.pop("client_options", None) or {}
    return from_url(root, client_options=client, retry_config=retries, **options)

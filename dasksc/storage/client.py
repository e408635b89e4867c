"""Requests to object stores and web servers, through obstore; what they raise names the place, never a credential.

What obstore does not know is asked through fsspec (`dasksc.storage.fsspec_client`).

obstore retries what a server throttles, fails or cuts short, with growing pauses. Each process has one client for
each store, whatever number of arrays, tasks and threads read from it.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from dasksc import config
from dasksc.errors import CorruptDataError, DaskscError, InputError, MissingPathError, StorageError
from dasksc.platforms import after_fork
from dasksc.storage.arrays import is_of_content

__all__ = [
    "SCHEMES",
    "Client",
    "ObjectIdentity",
    "cleaned",
    "client_of",
    "longer",
    "patiently",
    "replaced",
    "secrets_of",
    "shortened",
    "shown",
    "span_of",
    "split_url",
    "url_of",
]

T = TypeVar("T")

# What is asked through obstore.
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file")

# obstore asks again itself, but not where an answer breaks off that is no object, or of which it knows no version.
_BROKEN_OFF = "body error"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
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


def longer(path: str, size: int, longest: int) -> CorruptDataError:
    """Return the error for an object that is longer than what belongs there can be."""
    return CorruptDataError(f"{path} has {size} bytes, where at most {longest} belong. It is not read.")


def shortened(path: str, size: int, span: str, n_bytes: int) -> CorruptDataError:
    """Return the error for an object of which fewer bytes came than were asked for."""
    return CorruptDataError(
        f"{path} has {size} bytes, and of {span or 'all'} {n_bytes} came. It is truncated, or was replaced: upload it "
        "again, or open it again."
    )


def shown(url: str) -> str:
    """Return a URL as people may see it: without user, password and query."""
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def url_of(root: str, key: str) -> str:
    """Return the URL of a key of a store; of what is on a web server, as it is shown."""
    return f"{root}{'' if root.endswith('/') else '/'}{key}"


def split_url(url: str) -> tuple[str, str]:
    """Return the root of the store that a URL is in, and the key in that store."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        from dasksc.storage import fsspec_client

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
        from dasksc.storage.fsspec_client import FsspecClient

        return FsspecClient(root, options)
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
        self._secrets = secrets_of(root, options)
        self._library = obstore
        try:
            self._store = _store(root, options)
        except Exception as error:
            if not is_of_content(error):
                raise
            # Without the original error, whose text holds what was given.
            raise InputError(
                f"{self._shown} cannot be opened with these storage_options: {cleaned(error, self._secrets)}. They are "
                "those of obstore's stores: region, endpoint, skip_signature, client_options, ..."
            ) from None

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object; see `Client.stat`."""
        return self._asked(lambda: self._identity(key, self._library.head(self._store, key)), key)

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

        def ask() -> tuple[memoryview, ObjectIdentity]:
            result = self._library.get(self._store, key, options=options)
            identity = self._identity(key, result.meta)
            if expected is not None:
                expected.compare(identity)
            if stop is None and identity.size > longest:
                raise longer(self._path(key), identity.size, longest)
            return memoryview(result.bytes()), identity

        data, identity = self._asked(ask, key, span_of(start, stop))
        wanted = (identity.size if stop is None else stop) - start
        if len(data) != wanted:
            raise shortened(self._path(key), identity.size, span_of(start, stop), len(data))
        return data, identity

    def listed(self, prefix: str) -> list[str]:
        """Return keys below a prefix; see `Client.listed`."""
        self._refuse_listing(prefix)

        def ask() -> list[str]:
            pages = self._library.list(self._store, prefix or None)
            return sorted(item["path"] for page in pages for item in page if item["path"] != prefix)

        return self._asked(ask, prefix)

    def children(self, prefix: str) -> list[str]:
        """Return names below a prefix; see `Client.children`."""
        self._refuse_listing(prefix)
        result = self._asked(lambda: self._library.list_with_delimiter(self._store, prefix or None), prefix)
        paths = [*result["common_prefixes"], *(item["path"] for item in result["objects"])]
        # Some programs make an object that stands for the folder.
        return sorted(path.rpartition("/")[2] for path in paths if path != prefix)

    def _asked(self, ask: Callable[[], T], key: str, span: str = "") -> T:
        try:
            return patiently(ask, lambda error: _BROKEN_OFF not in str(error))
        except CorruptDataError:
            raise
        except self._library.exceptions.PreconditionError:
            raise replaced(self._path(key)) from None
        except Exception as error:
            if not is_of_content(error):
                raise
            raise self._translated(error, key, span) from None

    def _path(self, key: str) -> str:
        return url_of(self._shown.removeprefix("file://"), key)

    def _identity(self, key: str, meta: Mapping[str, Any]) -> ObjectIdentity:
        return ObjectIdentity(
            path=self._path(key), size=meta["size"], etag=meta["e_tag"], modified=meta["last_modified"].isoformat()
        )

    def _refuse_listing(self, prefix: str) -> None:
        if self._shown.startswith("http"):
            raise StorageError(
                f"{self._path(prefix)} is on a web server, which does not tell what is there. Give the URLs of several "
                "atlases as a list. A Zarr store needs consolidated metadata: zarr.consolidate_metadata(path), before "
                "it is uploaded."
            )

    def _translated(self, error: Exception, key: str, span: str) -> StorageError:
        path, reason = self._path(key), cleaned(error, self._secrets)
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


def patiently(ask: Callable[[], T], is_final: Callable[[Exception], bool]) -> T:
    """Return what a call returns, called again with growing pauses, for up to ``retry-timeout``.

    Parameters
    ----------
    ask
        What it raises last is raised; errors of this package, and those of a program, at once,
    is_final
        and errors of which this is true.
    """
    deadline = time.monotonic() + (config.get_seconds("retry-timeout") or 0.0)
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except DaskscError:
            raise
        except Exception as error:
            if is_final(error) or not is_of_content(error) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def cleaned(error: Exception, secrets: Sequence[str]) -> str:
    """Return what a library says, without what it quotes of requests and answers, and without secrets."""
    text = str(error) or type(error).__name__
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = text.partition("\n")[0].partition(": <")[0]
    line = re.sub(r"(://)[^/@\s]*@", r"\1", line)
    line = re.sub(r"\?\S*", "", line).strip(" :.")
    for secret in secrets:
        line = line.replace(secret, "***")
    return f"{line} ({code[1]})" if code else line


def span_of(start: int, stop: int | None) -> str:
    """Return what bytes [start, stop) are called in errors; nothing where all are meant."""
    return "" if stop is None else f"bytes {start} to {stop}"


def secrets_of(root: str, options: Mapping[str, Any]) -> list[str]:
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

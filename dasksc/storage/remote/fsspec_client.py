"""Requests through fsspec to stores that obstore does not support: ``hf://``, ``ftp://``, ``sftp://``, ``memory://``.

The implementations of fsspec give different guarantees. Each thread has its own file system object, since many
implementations hold a single connection. Failed requests are retried with growing pauses. A read cannot request a
version of an object, so a check of the object's identity follows it.
"""

from __future__ import annotations

import ftplib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dasksc._compat.fsspec import options_in_url, parent_of, path_in, range_of
from dasksc.errors import DaskscError, InputError, MissingPathError, StorageError
from dasksc.storage.arrays import caused_by_data
from dasksc.storage.remote.client import (
    SCHEMES,
    WHOLE_BYTES,
    ObjectIdentity,
    redact_error,
    redact_url,
    retry,
    secrets_of,
    short_response_error,
    span_of,
    too_long_error,
    url_of,
)

__all__ = ["FsspecClient", "split_fsspec_url"]

T = TypeVar("T")

# Names that implementations use for the version of an object and for its modification time.
_TAGS = ("ETag", "etag", "sha", "blob_id", "md5Hash", "content_md5", "checksum", "hex")
_TIMES = ("mtime", "LastModified", "last_modified", "modify", "modified", "modificationTime", "updated", "created")
# Time for which the check of an object stays valid. Frequent checks would be costly: some servers can only list the
# whole folder of an object, and others limit the request rate.
_RECHECK_S = 1.0
# Number of recent checks to remember, more than a process makes within that time.
_MAX_CHECKS = 1024
# Placeholder for an unknown modification time. It cannot distinguish versions, so the cache skips such objects.
_UNKNOWN_TIME = "1970-01-01"
# Packages whose names differ from those of their modules.
_PACKAGES = {"smbclient": "smbprotocol", "libarchive": "libarchive-c"}
# Errors that a retry would raise again.
_FINAL = (
    ftplib.error_perm,
    AttributeError,
    FileNotFoundError,
    ImportError,
    IsADirectoryError,
    KeyError,
    NotADirectoryError,
    NotImplementedError,
    PermissionError,
    TypeError,
    ValueError,
)


def _class_of(url: str) -> Any:
    """Return the file system class of fsspec for a URL."""
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    scheme = urlsplit(url).scheme
    if "::" in url:
        raise InputError(
            f"{redact_url(url)!r} is a chain of URLs, which is not supported. Give the URL of an atlas, and settings "
            "of its file system as storage_options"
        )
    known_schemes = {*known_implementations, *registry}
    if scheme not in known_schemes:
        others = sorted(known_schemes.difference(SCHEMES))
        raise InputError(
            f"{redact_url(url)!r} begins with {scheme}://; supported are {', '.join(SCHEMES)}, and through fsspec "
            f"{', '.join(others)}"
        )
    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None)
        hint = f": pip install {_PACKAGES.get(missing, missing.replace('_', '-'))}" if missing else ""
        raise InputError(
            f"{scheme}:// is read through fsspec, which lacks a package for it{hint}. fsspec says: {error}"
        ) from error


def split_fsspec_url(url: str) -> tuple[str, str]:
    """Split a URL into the root of its file system and the path in the file system; their concatenation is the URL."""
    path = path_in(_class_of(url), url).strip("/")
    url = url.rstrip("/") if path else url
    if not url.endswith(path):
        raise InputError(f"{redact_url(url)!r} is not the URL of a file or directory")
    return url[: len(url) - len(path)], path


class FsspecClient:
    """Client of a file system of fsspec; see `dasksc.storage.remote.client.Client`."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root = root
        self._class = _class_of(root)
        self._options = {**options_in_url(self._class, root), **options}
        self._secrets = secrets_of(root, self._options)
        self._thread_local = threading.local()
        # Time of the last check of each object, in order of the checks.
        self._checked_at: dict[str, float] = {}

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object; see `Client.stat`."""

        def query(system: Any, path: str) -> ObjectIdentity:
            system.invalidate_cache(parent_of(system, path))
            return self._identity(key, system.info(path), system)

        now = time.monotonic()
        identity = self._request(query, key)
        self._checked_at.pop(key, None)
        self._checked_at[key] = now
        for oldest in list(self._checked_at)[:-_MAX_CHECKS]:
            self._checked_at.pop(oldest, None)
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
        identity = expected or self.stat(key)
        if stop is None and identity.size > longest:
            raise too_long_error(identity.path, identity.size, longest)
        end = identity.size if stop is None else stop
        span = span_of(start, stop)
        data = (
            self._request(lambda system, path: self._read(system, path, start, end, identity), key, span)
            if end > start
            else b""
        )
        if expected is not None and time.monotonic() - self._checked_at.get(key, float("-inf")) >= _RECHECK_S:
            expected.compare(self.stat(key))
        if len(data) != end - start:
            raise short_response_error(identity.path, identity.size, span, len(data))
        return memoryview(data), identity

    def listed(self, prefix: str) -> dict[str, ObjectIdentity]:
        """Return the objects below a prefix; see `Client.listed`."""
        base = len(self._path(prefix).strip("/"))

        def query(system: Any, path: str) -> list[tuple[str, ObjectIdentity]]:
            system.invalidate_cache(path)
            names = (
                (str(name).strip("/")[base:].strip("/"), info) for name, info in system.find(path, detail=True).items()
            )
            keys = ((f"{prefix}/{name}".strip("/"), info) for name, info in names if name)
            return [(key, self._identity(key, info, system)) for key, info in keys]

        return dict(sorted(self._listed(query, prefix)))

    def children(self, prefix: str) -> list[str]:
        """Return names below a prefix; see `Client.children`."""

        def query(system: Any, path: str) -> list[str]:
            system.invalidate_cache(path)
            return [str(name) for name in system.ls(path, detail=False)]

        itself = self._path(prefix).strip("/")
        paths = (path.strip("/") for path in self._listed(query, prefix))
        return sorted({path.rpartition("/")[2] for path in paths if path != itself})

    def _path(self, key: str) -> str:
        return path_in(self._class, url_of(self._root, key))

    def _public_url(self, key: str) -> str:
        return url_of(redact_url(self._root), key)

    def _listed(self, query: Callable[[Any, str], list[T]], prefix: str) -> list[T]:
        """Return a listing; as in object stores, it is empty for a missing folder."""
        try:
            return self._request(query, prefix)
        except MissingPathError:
            return []

    def _identity(self, key: str, info: Mapping[str, Any], system: Any) -> ObjectIdentity:
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        if info.get("size") is None:
            raise StorageError(
                f"{self._public_url(key)} has an unknown size, so it cannot be read by byte ranges. Copy it to a local "
                "disk first."
            )
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), None)
        modified = next((str(info[name]) for name in _TIMES if info.get(name)), _UNKNOWN_TIME)
        if tag is None and modified == _UNKNOWN_TIME and _is_own(system, "ukey"):
            tag = str(system.ukey(self._path(key)))
        return ObjectIdentity(path=self._public_url(key), size=int(info["size"]), etag=tag, modified=modified)

    def _request(self, request: Callable[[Any, str], T], key: str, span: str = "") -> T:
        """Run a request on the file system of this thread, with retries, and translate its errors."""

        def attempt() -> T:
            try:
                return request(self._system(), self._path(key))
            except FileNotFoundError:
                raise
            except Exception:  # implementations raise errors of their own
                self._thread_local.system = self._thread_local.file = None  # the connection may be broken
                raise

        try:
            return retry(attempt, _is_final)
        except DaskscError:
            raise
        except Exception as error:
            if not caused_by_data(error):
                raise
            raise self._translated(error, key, span) from None

    def _read(self, system: Any, path: str, start: int, stop: int, identity: ObjectIdentity) -> bytes:
        from fsspec.spec import AbstractBufferedFile

        if _is_own(system, "cat_file"):
            return bytes(system.cat_file(path, start, stop))
        held, file = getattr(self._thread_local, "file", None) or (None, None)
        if file is not None and held == identity:
            return range_of(file, start, stop)
        file = system.open(path, "rb")
        if isinstance(file, AbstractBufferedFile):
            # The file's buffer would read megabytes ahead, so it is bypassed. The file object, which holds no
            # connection, is kept, since opening it again would cost a request for the size.
            self._thread_local.file = identity, file
            return range_of(file, start, stop)
        with file:
            file.seek(start)
            return bytes(file.read(stop - start))

    def _system(self) -> Any:
        """Return the file system of this thread."""
        if getattr(self._thread_local, "system", None) is None:
            try:
                self._thread_local.system = self._class(**self._options, skip_instance_cache=True)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"{redact_url(self._root)} cannot be opened with these storage_options: "
                    f"{redact_error(error, self._secrets)}. Valid options are those of fsspec's "
                    f"{self._class.__name__}."
                ) from None
        return self._thread_local.system

    def _translated(self, error: Exception, key: str, span: str) -> StorageError:
        path = self._public_url(key)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return MissingPathError(f"there is nothing at {path}")
        what = f"{path}{', ' + span if span else ''} cannot be read: {redact_error(error, self._secrets)}."
        return StorageError(
            f"{what} Check that the server can be reached, and check the storage_options, which are those of "
            f"{self._class.__name__}."
        )


def _is_own(system: Any, method: str) -> bool:
    """Return True if an implementation overrides a method of the base class."""
    from fsspec import AbstractFileSystem

    # Asynchronous implementations set the methods as attributes of the instance.
    return method in vars(system) or getattr(type(system), method) is not getattr(AbstractFileSystem, method)


def _is_final(error: Exception) -> bool:
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(error, _FINAL)

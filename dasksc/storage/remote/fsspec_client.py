"""Requests through fsspec to stores that obstore does not support: ``hf://``, ``ftp://``, ``sftp://``, ``memory://``.

Each thread has a file system object of its own, since many implementations hold a single connection. A read cannot
request a version of an object, so a check of its identity follows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from ftplib import error_perm
from typing import Any, TypeVar
from urllib.parse import urlsplit

from zarr.abc.store import Store

from dasksc._compat import options_in_url, path_in
from dasksc.errors import InputError, MissingPathError, StorageError
from dasksc.storage.remote.client import SCHEMES, ObjectIdentity, redact_error, redact_url, retry, secrets_of

T = TypeVar("T")

# Names that implementations use for the version of an object and for its modification time.
_TAGS = ("ETag", "etag", "sha", "blob_id", "md5Hash", "content_md5", "checksum", "hex")
_TIMES = ("mtime", "LastModified", "last_modified", "modify", "modified", "modificationTime", "updated", "created")
# Time for which the check of an object stays valid. Some servers can only list the whole folder of an object, and
# others limit the request rate.
_RECHECK_S = 1.0
# Placeholder for an unknown modification time. It cannot distinguish versions, so the cache skips such objects.
_UNKNOWN_TIME = "1970-01-01"
# Errors that a retry would raise again.
_FINAL = (error_perm, FileNotFoundError, NotADirectoryError, PermissionError, LookupError, TypeError, ValueError)


def _class_of(url: str) -> Any:
    """Return the file system class of fsspec for a URL."""
    from fsspec.registry import get_filesystem_class

    if "::" in url:
        raise InputError(
            f"{redact_url(url)!r} is a chain of URLs, which is not supported. Give the URL of an atlas, and settings "
            "of its file system as storage_options"
        )
    try:
        return get_filesystem_class(urlsplit(url).scheme)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{redact_url(url)!r} is read by neither obstore, which reads {', '.join(SCHEMES)}, nor fsspec: {error}"
        ) from error


def split_fsspec_url(url: str) -> tuple[str, str]:
    """Split a URL into the root of its file system and the path in the file system; their concatenation is the URL."""
    path = path_in(_class_of(url), url).strip("/")
    url = url.rstrip("/") if path else url
    if not url.endswith(path):
        raise InputError(f"{redact_url(url)!r} is not the URL of a file or directory")
    return url[: len(url) - len(path)], path


class FsspecClient:
    """Client of a file system of fsspec, with the methods and errors of `ObstoreClient`."""

    zarr_requests = 1  # the file system may hold a single connection

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root = root
        self._class = _class_of(root)
        self._options = {**options_in_url(self._class, root), **options}
        self._secrets = secrets_of(root, self._options)
        self._of_thread = threading.local()
        self._checked_at: dict[str, float] = {}  # time of the last check of each object

    def stat(self, key: str) -> ObjectIdentity:
        def query(system: Any, path: str) -> ObjectIdentity:
            system.invalidate_cache()
            return self._identity(key, system.info(path))

        now = time.monotonic()
        identity = self._request(query, key)
        if len(self._checked_at) > 1024:
            self._checked_at.clear()
        self._checked_at[key] = now
        return identity

    def get(
        self,
        key: str,
        start: int = 0,
        stop: int | None = None,
        *,
        expected: ObjectIdentity | None = None,
        longest: int | None = None,
    ) -> tuple[memoryview, ObjectIdentity]:
        identity = expected or self.stat(key)
        identity.check_size(longest)
        end = identity.size if stop is None else stop

        def read(system: Any, path: str) -> bytes:
            with system.open(path, "rb", cache_type="none") as file:  # other caches read megabytes ahead
                file.seek(start)
                return bytes(file.read(end - start))

        data = self._request(read, key, f"bytes {start} to {end}") if end > start else b""
        if expected is not None and time.monotonic() - self._checked_at.get(key, float("-inf")) >= _RECHECK_S:
            expected.compare(self.stat(key))
        identity.check_answer(start, stop, len(data))
        return memoryview(data), identity

    def children(self, prefix: str) -> list[str]:
        def query(system: Any, path: str) -> list[str]:
            system.invalidate_cache()
            return [str(name).strip("/") for name in system.ls(path, detail=False)]

        itself = self._path(prefix).strip("/")
        try:
            return sorted({path.rpartition("/")[2] for path in self._request(query, prefix) if path != itself})
        except MissingPathError:
            return []

    def zarr_store(self, prefix: str) -> tuple[Store, str]:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
        from zarr.storage import FsspecStore

        system = AsyncFileSystemWrapper(self._new_system(), asynchronous=True)
        return FsspecStore(system, read_only=True, path=self._path(prefix)), ""

    def is_final(self, error: Exception) -> bool:
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return 400 <= status < 500 and status not in (408, 429)
        return isinstance(error, _FINAL)

    def translated(self, error: Exception, key: str, span: str = "") -> StorageError:
        path = f"{redact_url(self._root)}{key}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return MissingPathError(f"there is nothing at {path}")
        return StorageError(
            f"{path}{', ' + span if span else ''} cannot be read: {redact_error(error, self._secrets)}. Check that the "
            f"server can be reached, and check the storage_options, which are those of {self._class.__name__}."
        )

    def _path(self, key: str) -> str:
        return path_in(self._class, self._root + key)

    def _identity(self, key: str, info: Mapping[str, Any]) -> ObjectIdentity:
        path = f"{redact_url(self._root)}{key}"
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        if info.get("size") is None:
            raise StorageError(
                f"{path} has an unknown size, so it cannot be read by byte ranges. Copy it to a local disk first."
            )
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), None)
        modified = next((str(info[name]) for name in _TIMES if info.get(name)), _UNKNOWN_TIME)
        return ObjectIdentity(path=path, size=int(info["size"]), etag=tag, modified=modified)

    def _request(self, request: Callable[[Any, str], T], key: str, span: str = "") -> T:
        """Run a request on the file system of this thread, with retries, and translate its errors."""

        def attempt() -> T:
            system = getattr(self._of_thread, "system", None) or self._new_system()
            self._of_thread.system = None  # after an error, the connection may be broken
            result = request(system, self._path(key))
            self._of_thread.system = system
            return result

        return retry(self, attempt, key, span)

    def _new_system(self) -> Any:
        try:
            return self._class(**self._options, skip_instance_cache=True)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{redact_url(self._root)} cannot be opened with these storage_options: "
                f"{redact_error(error, self._secrets)}. Valid options are those of fsspec's {self._class.__name__}."
            ) from None

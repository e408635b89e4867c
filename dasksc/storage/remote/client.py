"""Requests to object stores and web servers through obstore, and what all clients of remote stores share.

They share versions of objects, retries, and errors without credentials. obstore retries requests, with growing pauses,
if a server throttles them, fails or breaks off the response.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from zarr.abc.store import Store
from zarr.storage import ObjectStore

from dasksc import config
from dasksc.errors import CorruptDataError, DaskscError, InputError, MissingPathError, StorageError
from dasksc.storage.arrays import caused_by_data

T = TypeVar("T")

# URL schemes served by obstore.
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SECRET = re.compile(r"key|secret|token|pass|pwd|sas|credential|signature|auth|cookie|connection", re.IGNORECASE)

# Text of the error for a response that breaks off. obstore retries such a request only if it knows the version of the
# object.
_BROKEN_OFF = "body error"
# Beginning of the message of a failed request. It is removed, since the message of this package already has the URL.
_FAILED = re.compile(
    r"^Generic \w+ error: Error performing [A-Z]+ \S+ in ([\d.]+)(\w+)"
    r"(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?\s+- (.+)$"
)
_EMPTY = "status code: 416"
_COMPRESSIONS = frozenset({"br", "compress", "deflate", "gzip", "x-gzip", "zstd"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectIdentity:
    """Version of an object: its ETag or, if there is none, its modification time; and its size in bytes."""

    path: str  # URL without credentials, for display
    size: int
    etag: str | None
    modified: str

    def compare(self, now: ObjectIdentity) -> None:
        """Raise `CorruptDataError` if `now` differs from this identity."""
        same = self.etag == now.etag if self.etag and now.etag else self.modified == now.modified
        if not same or self.size != now.size:
            raise replaced_error(self.path)

    def check_size(self, longest: int | None) -> None:
        """Raise `CorruptDataError` if the object has more than `longest` bytes."""
        if longest is not None and self.size > longest:
            raise CorruptDataError(
                f"{self.path} has {self.size} bytes, but at most {longest} are expected, so it is not read. The object "
                "is corrupt or was replaced: upload it again, or open it again."
            )

    def check_answer(self, start: int, stop: int | None, n_bytes: int) -> None:
        """Raise `CorruptDataError` if a request for bytes [start, stop) returned another number of bytes."""
        if n_bytes != (self.size if stop is None else stop) - start:
            raise CorruptDataError(
                f"{self.path} has {self.size} bytes, but a request for bytes {start} to {stop or self.size} returned "
                f"{n_bytes}. The object is truncated or was replaced: upload it again, or open it again."
            )


def replaced_error(path: str) -> CorruptDataError:
    """Return the error for an object that has changed since it was opened."""
    return CorruptDataError(
        f"{path} was replaced or changed since it was opened. Open it again, and do not write to it while it is "
        "being read."
    )


def redact_url(url: str) -> str:
    """Return a URL without user, password and query, for display; a path unchanged."""
    if "://" not in url:
        return url
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each retry, until ``retry-timeout`` has passed."""
    deadline = time.monotonic() + (config.get_seconds("retry-timeout") or 0.0)
    pause = _FIRST_PAUSE_S
    while time.monotonic() + pause <= deadline:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def retry(client: Any, request: Callable[[], T], key: str, span: str = "") -> T:
    """Return the result of a request; repeat it after errors that are not final, and translate the last error."""
    waits = pauses()
    while True:
        try:
            return request()
        except Exception as error:
            if isinstance(error, DaskscError) or not caused_by_data(error):
                raise
            pause = next(waits, None)
            if pause is None or client.is_final(error):
                raise client.translated(error, key, span) from None
        time.sleep(pause)


def redact_error(error: Exception, secrets: Sequence[str]) -> str:
    """Return the message of a library's error, without quoted requests, quoted responses and secrets."""
    text = str(error) or type(error).__name__
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = text.partition("\n")[0].partition(": <")[0]
    line = re.sub(r"(://)[^/@\s]*@", r"\1", line)
    line = re.sub(r"\?\S*", "", line).strip(" :.")
    for secret in secrets:
        line = line.replace(secret, "***")
    return f"{line} ({code[1]})" if code else line


def secrets_of(root: str, options: Mapping[str, Any]) -> list[str]:
    """Return the secrets in a URL and in options, longest first."""

    def of(values: Mapping[str, Any]) -> Iterator[Any]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from of(value)
            elif _SECRET.search(name):
                texts = value if isinstance(value, tuple | list) else [value]
                yield from (one.decode(errors="ignore") if isinstance(one, bytes) else one for one in texts)

    url = urlsplit(root)
    found = [*of(options), *(part for part in (url.query, unquote(url.query), url.password) if part)]
    return sorted((one for one in found if isinstance(one, str) and len(one) > 3), key=len, reverse=True)


class ObstoreClient:
    """Client of a store through obstore, for several threads at once; keys are relative to the root of the store."""

    # All methods raise `MissingPathError` if an object does not exist, and `StorageError` for any other failure.

    zarr_requests = 32  # number of requests that a store of zarr-python may have in flight

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        try:
            import obstore
        except ImportError as error:
            raise InputError(
                f"{redact_url(root)} is read through obstore, which is not installed: pip install 'dasksc[remote]'"
            ) from error
        self._public_root = redact_url(root)
        self._secrets = secrets_of(root, options)
        self._library = obstore
        self._is_on_web = root.startswith("http")
        try:
            self._store = _store(root, options)
        except Exception as error:
            if not caused_by_data(error):
                raise
            # The original error is suppressed, since its text contains the options.
            raise InputError(
                f"{self._public_root} cannot be opened with these storage_options: "
                f"{redact_error(error, self._secrets)}. Valid options are those of obstore's stores: region, endpoint, "
                "skip_signature, client_options, ..."
            ) from None

    def stat(self, key: str) -> ObjectIdentity:
        """Return the identity of an object."""
        # Some web servers, and presigned URLs, allow GET requests only.
        head = self._head_by_get if self._is_on_web else lambda key: self._library.head(self._store, key)
        return retry(self, lambda: self._identity(key, head(key)), key)

    def _head_by_get(self, key: str) -> Mapping[str, Any]:
        """Return the headers of a GET request for one byte, or for an object that is empty or without byte ranges."""
        try:
            result = self._library.get(self._store, key, options={"range": (0, 1)})
            result.bytes()  # so that the connection can be used again
        except Exception as error:
            if not isinstance(error, self._library.exceptions.NotSupportedError) and _EMPTY not in str(error):
                raise
            result = self._library.get(self._store, key)
        meta: Mapping[str, Any] = result.meta
        return meta

    def get(
        self,
        key: str,
        start: int = 0,
        stop: int | None = None,
        *,
        expected: ObjectIdentity | None = None,
        longest: int | None = None,
    ) -> tuple[memoryview, ObjectIdentity]:
        """Return bytes [start, stop) of an object of at most `longest` bytes, and its identity."""
        options: dict[str, Any] = {} if stop is None else {"range": (start, stop)}
        # If-Match never matches a weak ETag.
        if expected is not None and expected.etag and not expected.etag.startswith("W/"):
            options["if_match"] = expected.etag

        def request() -> tuple[memoryview, ObjectIdentity]:
            result = self._library.get(self._store, key, options=options)
            encoding = str(result.attributes.get("Content-Encoding", "")).lower()
            if encoding in _COMPRESSIONS:
                raise StorageError(
                    f"{self._path(key)} is sent compressed (Content-Encoding: {encoding}), so its byte ranges are not "
                    "those of the file. Serve or upload it without a Content-Encoding, or download and decompress it."
                )
            identity = self._identity(key, result.meta)
            if expected is not None:
                expected.compare(identity)
            identity.check_size(longest)
            return memoryview(result.bytes()), identity

        data, identity = retry(self, request, key, "" if stop is None else f"bytes {start} to {stop}")
        identity.check_answer(start, stop, len(data))
        return data, identity

    def objects(self, prefix: str) -> dict[str, ObjectIdentity]:
        """Return the identities of the objects directly below a prefix, by their keys."""
        return {item["path"]: self._identity(item["path"], item) for item in self._entries(prefix)["objects"]}

    def _entries(self, prefix: str) -> Any:
        return retry(self, lambda: self._library.list_with_delimiter(self._store, prefix or None), prefix)

    def children(self, prefix: str) -> list[str]:
        """Return the names of the entries directly below a prefix, in ascending order."""
        result = self._entries(prefix)
        paths = [*result["common_prefixes"], *(item["path"] for item in result["objects"])]
        # Some programs create an object that represents the folder.
        return sorted(path.rpartition("/")[2] for path in paths if path != prefix)

    def zarr_store(self, prefix: str) -> tuple[Store, str]:
        """Return a store of zarr-python, and what precedes the keys below `prefix` in it."""
        return ObjectStore(self._store, read_only=True), f"{prefix}/"

    def is_final(self, error: Exception) -> bool:
        """Return True for an error that a retry would raise again."""
        return _BROKEN_OFF not in str(error)

    def translated(self, error: Exception, key: str, span: str = "") -> StorageError:
        """Return the error, without credentials, for an error of obstore."""
        path, reason = self._path(key), redact_error(error, self._secrets)
        if failed := _FAILED.match(reason):
            reason = failed[4] + (f" (retried for {float(failed[1]):.0f} {failed[2]})" if failed[3] else "")
        exceptions = self._library.exceptions
        if isinstance(error, FileNotFoundError):
            return MissingPathError(f"there is nothing at {path}")
        if isinstance(error, exceptions.PreconditionError):
            return replaced_error(path)
        if isinstance(error, exceptions.NotSupportedError):
            return StorageError(f"{path} cannot be read: {reason}. The server must serve byte ranges (Accept-Ranges).")
        what = f"{path}{', ' + span if span else ''} cannot be read: {reason}."
        # If no credentials are given, obstore requests credentials from the cloud's metadata service.
        is_denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if is_denied or "169.254.169.254" in reason or "metadata.google.internal" in reason:
            return StorageError(
                f"{what} Check the credentials (storage_options, or the environment: AWS_ACCESS_KEY_ID, "
                "GOOGLE_APPLICATION_CREDENTIALS, ...) and the region. A public bucket needs no credentials: "
                "storage_options={'skip_signature': True}."
            )
        place = "address is" if self._is_on_web else "endpoint and the region are"
        return StorageError(f"{what} Check that the {place} right and that the server responds.")

    def _path(self, key: str) -> str:
        root = self._public_root.removeprefix("file://")
        return f"{root}{'' if root.endswith('/') else '/'}{key}"

    def _identity(self, key: str, meta: Mapping[str, Any]) -> ObjectIdentity:
        etag = meta["e_tag"]
        if etag and not etag.endswith('"'):  # listings of Azure have no quotes
            etag = f'"{etag}"'
        return ObjectIdentity(
            path=self._path(key), size=meta["size"], etag=etag, modified=meta["last_modified"].isoformat()
        )


def _store(root: str, options: Mapping[str, Any]) -> Any:
    """Return an obstore store with timeouts and retries for long transfers."""
    from obstore.store import HTTPStore, LocalStore, from_url

    options = dict(options)
    retry_s = config.get_seconds("retry-timeout") or 0.0
    # Retries are limited by time, not by number.
    retries: dict[str, Any] = {
        "max_retries": 1000 if retry_s else 0,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    retries |= options.pop("retry_config", None) or {}
    # A request that transfers nothing times out; a slow one does not.
    client: dict[str, Any] = {"timeout": "1h", "read_timeout": "30s", "connect_timeout": "10s"}
    parts = urlsplit(root)
    if parts.scheme == "file":
        return LocalStore("/")
    endpoint = str(options.get("endpoint") or options.get("aws_endpoint_url") or os.environ.get("AWS_ENDPOINT_URL", ""))
    if parts.scheme == "http" or endpoint.startswith("http://"):
        client["allow_http"] = True
    if parts.scheme in ("http", "https"):
        client["default_headers"] = {"accept-encoding": "identity"}
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            client["default_headers"]["authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        root = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
    client |= options.pop("client_options", None) or {}
    make = HTTPStore if parts.scheme in ("http", "https") else from_url
    return make(root, client_options=client, retry_config=retries, **options)

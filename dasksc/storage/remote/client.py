"""Protocol of the clients of remote stores, with retries, and error messages without credentials."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from dasksc import config
from dasksc.errors import CorruptDataError, DaskscError
from dasksc.storage.arrays import caused_by_data

__all__ = [
    "SCHEMES",
    "Client",
    "ObjectIdentity",
    "redact_error",
    "too_long_error",
    "retry",
    "replaced_error",
    "secrets_of",
    "short_response_error",
    "redact_url",
    "span_of",
    "url_of",
]

T = TypeVar("T")

# URL schemes served by obstore.
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
# Maximum size of an object that is requested as a whole, before its size is known. Only metadata are read in this way;
# consolidated metadata of thousands of arrays take a few MB.
WHOLE_BYTES = 2**28
_SECRET = re.compile(r"key|secret|token|password|sas|credential|signature", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectIdentity:
    """Identity of an object when it was first seen: path, size in bytes, ETag and modification time."""

    # `path` is a URL without credentials, for display. If there is no ETag, the size and the modification time identify
    # a version.

    path: str
    size: int
    etag: str | None
    modified: str

    def compare(self, now: ObjectIdentity) -> None:
        """Raise `CorruptDataError` if `now` differs from this identity."""
        same = self.etag == now.etag if self.etag and now.etag else self.modified == now.modified
        if not same or self.size != now.size:
            raise replaced_error(self.path)


def replaced_error(path: str) -> CorruptDataError:
    """Return the error for an object that has changed since it was opened."""
    return CorruptDataError(
        f"{path} was replaced or changed since it was opened. Open it again, and do not write to it while it is "
        "being read."
    )


class Client(Protocol):
    """Client of one store. Its methods are safe from several threads at once."""

    # Keys are relative to the root of the store. All methods raise `MissingPathError` if an object does not exist, and
    # `StorageError` if the store does not respond or denies access.

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
        """Return bytes [start, stop) of an object, and its identity."""

    def listed(self, prefix: str) -> dict[str, ObjectIdentity]:
        """Return the identities of all objects below a prefix, by their keys, in ascending order."""

    def children(self, prefix: str) -> list[str]:
        """Return the names of the entries directly below a prefix, in ascending order."""


def too_long_error(path: str, size: int, longest: int) -> CorruptDataError:
    """Return the error for an object that exceeds its maximum size."""
    return CorruptDataError(
        f"{path} has {size} bytes, but at most {longest} are expected, so it is not read. The object is corrupt or was "
        "replaced: upload it again, or open it again."
    )


def short_response_error(path: str, size: int, span: str, n_bytes: int) -> CorruptDataError:
    """Return the error for a response with fewer bytes than requested."""
    return CorruptDataError(
        f"{path} has {size} bytes, but a request for {span or 'all of them'} returned {n_bytes}. The object is "
        "truncated or was replaced: upload it again, or open it again."
    )


def redact_url(url: str) -> str:
    """Return a URL without user, password and query, for display."""
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def url_of(root: str, key: str) -> str:
    """Return the URL of a key in a store; for a web server, `root` must be a URL without a query."""
    return f"{root}{'' if root.endswith('/') else '/'}{key}"


def retry(request: Callable[[], T], is_final: Callable[[Exception], bool]) -> T:
    """Call a function; after an error, retry with growing pauses for up to ``retry-timeout``."""
    # The last error is raised. Errors of this package and programming errors are raised at once.
    deadline = time.monotonic() + (config.get_seconds("retry-timeout") or 0.0)
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return request()
        except DaskscError:
            raise
        except Exception as error:
            if is_final(error) or not caused_by_data(error) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


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


def span_of(start: int, stop: int | None) -> str:
    """Describe bytes [start, stop) for error messages; return an empty string for the whole object."""
    return "" if stop is None else f"bytes {start} to {stop}"


def secrets_of(root: str, options: Mapping[str, Any]) -> list[str]:
    """Return the secrets in a URL and in options, longest first."""

    def of(values: Mapping[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from of(value)
            elif isinstance(value, str) and (_SECRET.search(name) or name in ("authorization", "Authorization")):
                yield value

    found = [*of(options), *(part for part in (urlsplit(root).query, urlsplit(root).password) if part)]
    return sorted((one for one in found if len(one) > 3), key=len, reverse=True)

"""What the clients of remote stores share: versions of objects, retries, and errors without credentials."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from dasksc import config
from dasksc.errors import CorruptDataError, DaskscError
from dasksc.storage.arrays import caused_by_data

T = TypeVar("T")

# URL schemes served by obstore.
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SECRET = re.compile(r"key|secret|token|pass|pwd|sas|credential|signature|auth|cookie|connection", re.IGNORECASE)


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

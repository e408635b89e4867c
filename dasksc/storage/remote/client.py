"""What every client of a store offers, and what those clients share: retries, and errors that show no credential."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from dasksc import config
from dasksc.errors import CorruptDataError, DaskscError
from dasksc.storage.arrays import is_of_content

__all__ = [
    "SCHEMES",
    "Client",
    "ObjectIdentity",
    "cleaned",
    "longer",
    "patiently",
    "replaced",
    "secrets_of",
    "shortened",
    "shown",
    "span_of",
    "url_of",
]

T = TypeVar("T")

# What is asked through obstore.
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file")

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

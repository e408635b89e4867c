"""Blocks of remote objects, kept in a folder of this machine: bounded, shared by processes, checked when read.

A block is a file named by what it is a block of: the object's URL, size, ETag and time of change. So nothing is ever
changed in place, and another version of an object has other names. Files come by renaming, whole or not at all, and go
when the folder has grown to its limit, the longest unused first. No lock is held by anybody.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from dasksc import config
from dasksc.errors import InputError
from dasksc.storage.client import ObjectIdentity
from dasksc.storage.files import read_at

__all__ = ["BLOCK_BYTES", "Cache"]

logger = logging.getLogger("dasksc.storage")

# What is asked for at once where something is lacking.
BLOCK_BYTES = 2**22
# Each of these has a checksum of its own, so that a few rows do not cost the reading of a block.
_PAGE_BYTES = 2**16
_MAGIC = b"dasksc1\n"
_DEFAULT_LIMIT = "100GiB"
# A process measures the folder whenever it has written this share of the limit; found fuller than the second, it is
# emptied to the third. So four processes that write at once stay below the limit, and n below 15/16 + n/64 of it.
_MEASURED, _FULL, _LEFT = 1 / 64, 15 / 16, 7 / 8
# A file used within this time is not marked as used again.
_FRESH_S = 60.0
# After this time a half-written file is one that a killed process left.
_STALE_S = 3600.0

# Bytes that this process has written to each folder since it measured it.
_written: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder with blocks of remote objects.

    Parameters
    ----------
    folder
        Where it is; made when the first block is kept.
    limit
        Bytes that it may hold; while more than four processes write to it, a 64th more for each further one.
    """

    folder: str
    limit: int

    @classmethod
    def of(cls, given: Any) -> Cache | None:
        """Return the cache that a user asked for: a folder, a mapping with ``path`` and ``limit``, or None.

        Raises
        ------
        InputError
            If it is anything else.
        """
        if given is None:
            return None
        values = dict(given) if isinstance(given, Mapping) else {"path": given}
        try:
            folder = os.path.abspath(os.path.expanduser(os.fspath(values.pop("path"))))
            limit = config.as_bytes(values.pop("limit", _DEFAULT_LIMIT))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"cache={given!r} is neither a folder nor {{'path': ..., 'limit': '100GiB'}}") from error
        if values or limit < 4 * BLOCK_BYTES:
            raise InputError(
                f"cache={given!r}: give 'path' and 'limit' only, and a limit of at least {4 * BLOCK_BYTES} bytes"
            )
        return cls(folder=folder, limit=limit)

    def read(
        self, identity: ObjectIdentity, start: int, stop: int, *, request: Callable[[int, int], memoryview]
    ) -> memoryview:
        """Return bytes [start, stop) of an object; blocks that are not here are requested, and kept.

        Parameters
        ----------
        identity
            The object.
        start, stop
            Within its size.
        request
            Returns bytes [start, stop) of it from where it is.
        """
        if identity.etag is None and identity.modified.startswith("1970-01-01"):
            return request(start, stop)  # nothing would tell another version from this one
        pieces = []
        for base in range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES):
            end = min(base + BLOCK_BYTES, identity.size)
            low, high = max(start, base) - base, min(stop, end) - base
            path = self._path(identity, base)
            piece = self._kept(path, end - base, low, high)
            if piece is None:
                whole = request(base, end)
                self._keep(path, whole)
                piece = whole[low:high]
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _path(self, identity: ObjectIdentity, base: int) -> str:
        words = (identity.path, str(identity.size), identity.etag or "", identity.modified, str(base))
        name = hashlib.blake2b("\n".join(words).encode(), digest_size=20).hexdigest()
        return os.path.join(self.folder, name[:2], name)

    def _kept(self, path: str, n_bytes: int, low: int, high: int) -> memoryview | None:
        """Return bytes [low, high) of a block; None if it is not here, or damaged, in which case it goes."""
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            piece = _checked(number, n_bytes, low, high)
            if time.time() - os.fstat(number).st_mtime > _FRESH_S:
                with contextlib.suppress(OSError):
                    os.utime(path)
            return piece
        except (OSError, ValueError) as error:
            logger.warning("%s in the cache is damaged (%s); what it holds is fetched again", path, error)
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        finally:
            os.close(number)

    def _keep(self, path: str, block: memoryview) -> None:
        """Write a block; what cannot be written is told, and not kept."""
        temporary = os.path.join(self.folder, f"new-{os.getpid()}-{secrets.token_hex(8)}")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with open(temporary, "xb") as file:
                    file.write(block)
                    file.write(_trailer(block))
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            logger.warning("a block cannot be kept in the cache %s: %s", self.folder, error)
            return
        # What was there before this process came may be too much already.
        written = _written.get(self.folder, float("inf")) + len(block)
        _written[self.folder] = written
        if written > self.limit * _MEASURED:
            _written[self.folder] = 0.0
            self._shrink()

    def _shrink(self) -> None:
        """Remove the longest unused files if all together are near the limit, and what killed processes left."""
        files = []
        now = time.time()
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # another process may remove it
                    status = os.stat(path)
                    if name.startswith("new-") and now - status.st_mtime > _STALE_S:
                        os.unlink(path)
                    else:
                        files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.limit * _FULL:
            return
        for _, size, path in sorted(files):
            if total <= self.limit * _LEFT:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def _trailer(block: memoryview) -> bytes:
    """Return what follows a block in its file: a checksum for each page, and what says that they are whole."""
    sums: Any = np.array(
        [_checksum(block[at : at + _PAGE_BYTES]) for at in range(0, len(block), _PAGE_BYTES)], dtype="<u4"
    )
    end = len(block).to_bytes(8, "little") + _checksum(memoryview(sums).cast("B")).to_bytes(4, "little")
    return bytes(sums.tobytes()) + end + _MAGIC


def _checked(number: int, n_bytes: int, low: int, high: int) -> memoryview:
    """Return bytes [low, high) of the block in an open file; a ValueError says what is wrong with it."""
    n_pages = -(-n_bytes // _PAGE_BYTES)
    trailer = _read(number, n_bytes, 4 * n_pages + 12 + len(_MAGIC))
    sums, end = trailer[: 4 * n_pages], trailer[4 * n_pages :]
    expected = n_bytes.to_bytes(8, "little") + _checksum(sums).to_bytes(4, "little") + _MAGIC
    if end != expected or os.fstat(number).st_size != n_bytes + len(trailer):
        raise ValueError("it is not whole")
    first = low - low % _PAGE_BYTES
    data = _read(number, first, min(-(-high // _PAGE_BYTES) * _PAGE_BYTES, n_bytes) - first)
    wanted = np.frombuffer(sums, dtype="<u4")[first // _PAGE_BYTES :].tolist()
    for at in range(0, len(data), _PAGE_BYTES):
        if _checksum(data[at : at + _PAGE_BYTES]) != wanted[at // _PAGE_BYTES]:
            raise ValueError("a checksum does not match")
    return data[low - first : high - first]


def _read(number: int, offset: int, n_bytes: int) -> memoryview:
    data = memoryview(bytearray(n_bytes))
    if read_at(number, offset, data) < n_bytes:
        raise ValueError("it is cut short")
    return data


def _checksum(data: memoryview) -> int:
    return int(google_crc32c.value(bytes(data)))

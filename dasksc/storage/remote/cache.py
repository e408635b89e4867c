"""Local cache of blocks of remote objects: bounded, and shared by the processes of one user.

Each block is a file named by the URL, version and size of its object and by its offset, so files are never modified in
place. A file has a temporary name until it is complete. There are no locks. When the folder reaches its limit, the
least recently used files are removed. A folder that others can access is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dasksc import config
from dasksc.errors import InputError
from dasksc.storage.remote.client import ObjectIdentity

logger = logging.getLogger("dasksc.storage")

# Size of a block, the unit of requests for missing data.
BLOCK_BYTES = 2**22
# Shares of the limit: each time a process wrote the first, it reduces a folder above the second to the third.
_MEASURED, _FULL, _LEFT = 1 / 64, 15 / 16, 7 / 8

# Bytes that this process has written to each folder since it last measured the folder.
_written: dict[str, float] = {}
# Folders that this process cannot use, with the reason; each pair is logged once.
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Folder with blocks of remote objects, created for this user alone, and its maximum size in bytes."""

    folder: str
    limit: int

    @classmethod
    def of(cls, given: Any) -> Cache | None:
        """Return the cache for an argument: a folder, a mapping with ``path`` and ``limit``, or None."""
        if given is None:
            return None
        values = dict(given) if isinstance(given, Mapping) else {"path": given}
        try:
            folder = os.path.abspath(os.path.expanduser(values.pop("path")))
            limit = config.as_bytes(values.pop("limit", "100GiB"))
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
        """Return bytes [start, stop) of an object, after requesting and caching missing blocks."""
        if (identity.etag is None and identity.modified.startswith("1970-01-01")) or not self._is_usable():
            return request(start, stop)  # versions of an object without ETag and time could not be distinguished
        pieces = []
        for base in range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES):
            end = min(base + BLOCK_BYTES, identity.size)
            low, high = max(start, base) - base, min(stop, end) - base
            name = hashlib.blake2b(repr((identity, base)).encode(), digest_size=20).hexdigest()
            path = os.path.join(self.folder, name[:2], name)
            piece = _kept(path, end - base, low, high)
            if piece is None:
                whole = request(base, end)
                self._keep(path, whole)
                piece = whole[low:high]
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _is_usable(self) -> bool:
        """Create the folder if it is missing; return False, and log why, if it is not this user's alone."""
        # Every call checks the folder, since users with write access to its parent could replace it.
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            status = os.stat(self.folder)
            mode = stat.S_IMODE(status.st_mode)
            if hasattr(os, "geteuid") and (status.st_uid not in (0, os.geteuid()) or mode & 0o077):
                raise PermissionError(
                    f"other users have access to it (owner {status.st_uid}, mode {mode:03o}). Run chmod 700 "
                    f"{self.folder}, or give a folder that does not exist yet"
                )
        except OSError as error:
            if (self.folder, str(error)) not in _warned:
                _warned.add((self.folder, str(error)))
                logger.warning("blocks cannot be kept in the cache %s: %s", self.folder, error)
            return False
        return True

    def _keep(self, path: str, content: memoryview) -> None:
        """Write a block to the folder; log a warning if that fails."""
        temporary = os.path.join(self.folder, f"new-{os.getpid()}-{secrets.token_hex(8)}")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("a block cannot be kept in the cache %s: %s", self.folder, error)
            return
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        _written[self.folder] = _written.get(self.folder, float("inf")) + len(content)
        if _written[self.folder] > self.limit * _MEASURED:
            _written[self.folder] = 0.0
            self._shrink()

    def _shrink(self) -> None:
        """Remove the least recently used files if the limit is near."""
        files = []
        for folder, _, names in os.walk(self.folder):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):  # another process may remove it
                    status = os.stat(path)
                    files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total > self.limit * _FULL:
            for _, size, path in sorted(files):
                if total > self.limit * _LEFT:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                    total -= size


def _kept(path: str, n_bytes: int, low: int, high: int) -> memoryview | None:
    """Return bytes [low, high) of a block of `n_bytes`; None if its file is missing or incomplete."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if time.time() - status.st_mtime > 60:
                os.utime(path)
            file.seek(low)
            data = file.read(high - low)
            return memoryview(data) if status.st_size == n_bytes and len(data) == high - low else None
    except OSError:
        return None

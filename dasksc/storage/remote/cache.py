"""Local cache of blocks of remote objects: bounded, shared by processes, and verified on every read.

Each block is a file. Its name is derived from the URL, size, ETag and modification time of the object and from the
offset of the block. Files are therefore never modified in place: the blocks of another version of the object have other
names. A file has a temporary name until it is complete. When the folder reaches its limit, the least recently used
files are removed. There are no locks.

The folder belongs to one user, with mode 0700; a folder that others can access is not used. The folder contains a
random key with mode 0600. A block consists of pages, each with a tag (a keyed digest) that every read verifies. The
names of blocks and the tags also depend on the key. Without the key, nobody can therefore test for the presence of a
block or forge a block, even if the folder was accessible before.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from dasksc import config
from dasksc.errors import InputError
from dasksc.storage.files import READ_FLAGS, read_at
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.safety.permissions import exposure

__all__ = ["BLOCK_BYTES", "Cache"]

logger = logging.getLogger("dasksc.storage")

# Size of a block, the unit of requests for missing data.
BLOCK_BYTES = 2**22
# Size of a page. Each page has a tag of its own, so that reading a few rows does not require reading a whole block.
_PAGE_BYTES = 2**16
_TAG_BYTES = 16
_KEY_BYTES = 32
_KEY_NAME = "key"
_DEFAULT_LIMIT = "100GiB"
# Shares of the limit. A process measures the size of the folder each time it has written another 1/64 of the limit. A
# folder of more than 15/16 of the limit is reduced to 7/8. With n concurrent writers, the size is therefore at most
# (15/16 + n/64) times the limit, plus one block per writer. For four writers, the factor is 1.
_MEASURED, _FULL, _LEFT = 1 / 64, 15 / 16, 7 / 8
# The time of last use of a file is updated only if it is older than this.
_FRESH_S = 60.0
# A partial file older than this was left by a killed process.
_STALE_S = 3600.0

# Bytes that this process has written to each folder since the last measurement.
_written: dict[str, float] = {}
# Device and inode of each folder that this process uses, and the key read from it.
_keys: dict[str, tuple[tuple[int, int], bytes]] = {}
# Folders that this process cannot use, with the reason; each pair is logged once.
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Folder with blocks of remote objects."""

    folder: str  # Path of the folder. It is created for this user alone when the first block is read.
    # Maximum size in bytes. Concurrent writers may exceed it by one block each and, from the fifth writer on, by
    # another 1/64 of the limit each.
    limit: int

    @classmethod
    def of(cls, given: Any) -> Cache | None:
        """Return the cache for an argument: a folder, a mapping with ``path`` and ``limit``, or None."""
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
        """Return bytes [start, stop) of an object, after requesting and caching missing blocks."""
        if identity.etag is None and identity.modified.startswith("1970-01-01"):
            return request(start, stop)  # versions of the object could not be distinguished
        key = self._key()
        if key is None:
            return request(start, stop)
        pieces = []
        for base in range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES):
            end = min(base + BLOCK_BYTES, identity.size)
            low, high = max(start, base) - base, min(stop, end) - base
            block = self._block(key, identity, base)
            piece = block.kept(end - base, low, high)
            if piece is None:
                whole = request(base, end)
                self._keep(block, whole)
                piece = whole[low:high]
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _key(self) -> bytes | None:
        """Return the key of the folder, after creating it if it is missing."""
        # If the folder cannot be used, the reason is logged once, and the result is None.
        # Every call checks the folder, since users with write access to its parent could replace it.
        try:
            try:
                status = os.stat(self.folder)
            except FileNotFoundError:
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                status = os.stat(self.folder)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError("it is not a folder")
            _refuse_exposed(status, f"chmod 700 {self.folder}")
            place = status.st_dev, status.st_ino
            entry = _keys.get(self.folder)
            if entry is None or entry[0] != place:
                entry = _keys[self.folder] = place, _key_in(self.folder)
        except OSError as error:
            if (self.folder, str(error)) not in _warned:
                _warned.add((self.folder, str(error)))
                logger.warning("blocks cannot be kept in the cache %s: %s", self.folder, error)
            return None
        return entry[1]

    def _block(self, key: bytes, identity: ObjectIdentity, base: int) -> _BlockFile:
        words = (identity.path, str(identity.size), identity.etag or "", identity.modified, str(base))
        digest = hashlib.blake2b("\n".join(words).encode(), key=key).digest()
        name = digest[:20].hex()
        return _BlockFile(path=os.path.join(self.folder, name[:2], name), key=digest[32:])

    def _keep(self, block: _BlockFile, content: memoryview) -> None:
        """Write a block to the folder; log a warning if that fails."""
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(block.path), mode=0o700)
            with _new_file(self.folder) as (temporary, file):
                file.write(content)
                file.write(block.tags(content, 0))
                file.close()
                os.replace(temporary, block.path)
        except OSError as error:
            logger.warning("a block cannot be kept in the cache %s: %s", self.folder, error)
            return
        # The folder may already exceed its limit at the first write of this process, so it is measured then.
        written = _written.get(self.folder, float("inf")) + len(content)
        _written[self.folder] = written
        if written > self.limit * _MEASURED:
            _written[self.folder] = 0.0
            self._shrink()

    def _shrink(self) -> None:
        """Remove partial files of killed processes, and the least recently used blocks if the limit is near."""
        files = []
        now = time.time()
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # another process may remove it
                    status = os.stat(path)
                    if name.startswith("new-") and now - status.st_mtime > _STALE_S:
                        os.unlink(path)
                    elif name != _KEY_NAME:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockFile:
    """File of a block, which may not exist yet: the bytes of the block, followed by the tag of each page."""

    path: str  # Path of the file
    key: bytes  # Key of the tags, unique to this block

    def kept(self, n_bytes: int, low: int, high: int) -> memoryview | None:
        """Return bytes [low, high) of the block; None if it is missing, or damaged and therefore removed."""
        try:
            number = os.open(self.path, READ_FLAGS)
        except OSError:
            return None
        try:
            piece = self._checked(number, n_bytes, low, high)
            if time.time() - os.fstat(number).st_mtime > _FRESH_S:
                with contextlib.suppress(OSError):
                    os.utime(self.path)
            return piece
        except (OSError, ValueError) as error:
            logger.warning("%s in the cache is damaged (%s); the block is fetched again", self.path, error)
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            return None
        finally:
            os.close(number)

    def _checked(self, number: int, n_bytes: int, low: int, high: int) -> memoryview:
        """Return bytes [low, high) of the block in an open file; raise `ValueError` if it is damaged."""
        n_pages = -(-n_bytes // _PAGE_BYTES)
        if os.fstat(number).st_size != n_bytes + n_pages * _TAG_BYTES:
            raise ValueError("it is incomplete")
        first, after = low // _PAGE_BYTES, -(-high // _PAGE_BYTES)
        start = first * _PAGE_BYTES
        data = _read(number, start, min(after * _PAGE_BYTES, n_bytes) - start)
        tags = _read(number, n_bytes + first * _TAG_BYTES, (after - first) * _TAG_BYTES)
        if self.tags(data, first) != tags:
            raise ValueError("its content differs from the data that were stored")
        return data[low - start : high - start]

    def tags(self, content: memoryview, first: int) -> bytes:
        """Return the tags of consecutive pages, starting with page number `first`."""
        pages = (content[at : at + _PAGE_BYTES] for at in range(0, len(content), _PAGE_BYTES))
        # Processors have instructions for SHA-256, which make it twice as fast as BLAKE2.
        return b"".join(
            hmac.new(self.key + number.to_bytes(8, "little"), page, "sha256").digest()[:_TAG_BYTES]
            for number, page in enumerate(pages, first)
        )


def _read(number: int, offset: int, n_bytes: int) -> memoryview:
    data = memoryview(bytearray(n_bytes))
    if read_at(number, offset, data) < n_bytes:
        raise ValueError("it is truncated")
    return data


@contextlib.contextmanager
def _new_file(folder: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Create a file with mode 0600, yield its path and the open file, and finally remove it unless it was renamed."""
    path = os.path.join(folder, f"new-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            yield path, file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _key_in(folder: str) -> bytes:
    """Return the key of a folder, after creating it if it is missing."""
    path = os.path.join(folder, _KEY_NAME)
    if not os.path.lexists(path):
        with _new_file(folder) as (temporary, file):
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
            file.close()
            try:
                with contextlib.suppress(FileExistsError):  # if processes race, the first key is kept
                    os.link(temporary, path)
            except OSError:  # a file system without hard links
                os.replace(temporary, path)
    number = os.open(path, READ_FLAGS)
    try:
        _refuse_exposed(os.fstat(number), f"rm -r {folder}")
        key = os.read(number, _KEY_BYTES + 1)
    finally:
        os.close(number)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged. Remove the folder; its blocks are then fetched again")
    return key


def _refuse_exposed(status: os.stat_result, remedy: str) -> None:
    """Raise `PermissionError` if other users have access; the message includes `remedy`, a command that fixes it."""
    complaint = exposure(status)
    if complaint is not None:
        raise PermissionError(
            f"{complaint}; they could read or replace private data there. Run {remedy}, or give a folder that does not "
            "exist yet: it is then created for this user alone"
        )

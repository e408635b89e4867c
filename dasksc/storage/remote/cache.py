"""Blocks of remote objects, kept in a folder of this machine: bounded, shared by processes, checked when read.

A block is a file named by what it is a block of: the object's URL, size, ETag and time of change. So nothing is ever
changed in place, and another version of an object has other names. Files come by renaming, whole or not at all, and go
when the folder has grown to its limit, the longest unused first. No lock is held by anybody.

The folder is of one user, mode 0700; one to which others have access is not used. A random key in it, mode 0600,
enters the name of each block and the tag of each page: whoever does not know it can neither ask what the folder holds
nor make a file that is taken for a block, whatever access the folder gave before.
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

# What is asked for at once where something is lacking.
BLOCK_BYTES = 2**22
# Each of these has a tag of its own, so that a few rows do not cost the reading of a block.
_PAGE_BYTES = 2**16
_TAG_BYTES = 16
_KEY_BYTES = 32
_KEY_NAME = "key"
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
# Device and inode of each folder that this process uses, and the key that was in it.
_keys: dict[str, tuple[tuple[int, int], bytes]] = {}
# Folders that this process cannot use, and why: each is said once.
_said: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder with blocks of remote objects.

    Parameters
    ----------
    folder
        Where it is; made, for this user alone, when the first block is read.
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
        """Return the key of the folder, made if there is none; None if the folder cannot be used, and say why, once."""
        # Looked at each time: who may write to the folder above can put another one in its place.
        try:
            try:
                status = os.stat(self.folder)
            except FileNotFoundError:
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                status = os.stat(self.folder)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError("it is no folder")
            _refuse_exposed(status, f"chmod 700 {self.folder}")
            place = status.st_dev, status.st_ino
            known = _keys.get(self.folder)
            if known is None or known[0] != place:
                known = _keys[self.folder] = place, _key_in(self.folder)
        except OSError as error:
            if (self.folder, str(error)) not in _said:
                _said.add((self.folder, str(error)))
                logger.warning("blocks cannot be kept in the cache %s: %s", self.folder, error)
            return None
        return known[1]

    def _block(self, key: bytes, identity: ObjectIdentity, base: int) -> _Block:
        words = (identity.path, str(identity.size), identity.etag or "", identity.modified, str(base))
        digest = hashlib.blake2b("\n".join(words).encode(), key=key).digest()
        name = digest[:20].hex()
        return _Block(path=os.path.join(self.folder, name[:2], name), key=digest[32:])

    def _keep(self, block: _Block, content: memoryview) -> None:
        """Write a block; what cannot be written is told, and not kept."""
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
        # What was there before this process came may be too much already.
        written = _written.get(self.folder, float("inf")) + len(content)
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
class _Block:
    """A file that holds a block, or will: its bytes, then the tag of each page.

    Parameters
    ----------
    path
        Where the file is.
    key
        What its tags are made with; no other block has it.
    """

    path: str
    key: bytes

    def kept(self, n_bytes: int, low: int, high: int) -> memoryview | None:
        """Return bytes [low, high) of it; None if it is not here, or damaged, in which case it goes."""
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
            logger.warning("%s in the cache is damaged (%s); what it holds is fetched again", self.path, error)
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            return None
        finally:
            os.close(number)

    def _checked(self, number: int, n_bytes: int, low: int, high: int) -> memoryview:
        """Return bytes [low, high) of the block in an open file; a ValueError says what is wrong with it."""
        n_pages = -(-n_bytes // _PAGE_BYTES)
        if os.fstat(number).st_size != n_bytes + n_pages * _TAG_BYTES:
            raise ValueError("it is not whole")
        first, after = low // _PAGE_BYTES, -(-high // _PAGE_BYTES)
        start = first * _PAGE_BYTES
        data = _read(number, start, min(after * _PAGE_BYTES, n_bytes) - start)
        tags = _read(number, n_bytes + first * _TAG_BYTES, (after - first) * _TAG_BYTES)
        if self.tags(data, first) != tags:
            raise ValueError("its content is not what was kept")
        return data[low - start : high - start]

    def tags(self, content: memoryview, first: int) -> bytes:
        """Return the tags of pages, the first of which has this number."""
        pages = (content[at : at + _PAGE_BYTES] for at in range(0, len(content), _PAGE_BYTES))
        # SHA-256, for which processors have instructions: twice as fast as BLAKE2 without them.
        return b"".join(
            hmac.new(self.key + number.to_bytes(8, "little"), page, "sha256").digest()[:_TAG_BYTES]
            for number, page in enumerate(pages, first)
        )


def _read(number: int, offset: int, n_bytes: int) -> memoryview:
    data = memoryview(bytearray(n_bytes))
    if read_at(number, offset, data) < n_bytes:
        raise ValueError("it is cut short")
    return data


@contextlib.contextmanager
def _new_file(folder: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Give a file that only this user may read, and its path; it goes unless it is renamed."""
    path = os.path.join(folder, f"new-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            yield path, file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _key_in(folder: str) -> bytes:
    """Return the key of a folder, made if there is none."""
    path = os.path.join(folder, _KEY_NAME)
    if not os.path.lexists(path):
        with _new_file(folder) as (temporary, file):
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
            file.close()
            try:
                with contextlib.suppress(FileExistsError):  # the key of the process that is first stays
                    os.link(temporary, path)
            except OSError:  # a file system without links
                os.replace(temporary, path)
    number = os.open(path, READ_FLAGS)
    try:
        _refuse_exposed(os.fstat(number), f"rm -r {folder}")
        key = os.read(number, _KEY_BYTES + 1)
    finally:
        os.close(number)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is damaged. Remove the folder: what it holds is fetched again")
    return key


def _refuse_exposed(status: os.stat_result, remedy: str) -> None:
    """Refuse what other users have access to; the message names what puts it right."""
    complaint = exposure(status)
    if complaint is not None:
        raise PermissionError(
            f"{complaint}, who could read private data there, or plant other. Run {remedy}, or give a folder that does "
            "not exist yet: it is made for this user alone"
        )

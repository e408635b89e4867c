"""Identity of a file, for detecting changes after it was opened."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dasksc.errors import CorruptDataError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """Identity of a file when it was opened: path, size in bytes, and modification time in nanoseconds."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> FileIdentity:
        """Return the current identity of the file at `path`."""
        return cls._from(path, os.stat(path))

    @classmethod
    def of_open(cls, path: str, descriptor: int) -> FileIdentity:
        """Return the identity of an open file, even if another file is at `path` now."""
        return cls._from(path, os.fstat(descriptor))

    @classmethod
    def _from(cls, path: str, status: os.stat_result) -> FileIdentity:
        return cls(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns)

    def require_unchanged(self) -> None:
        """Check that the file has not been replaced, changed or removed."""
        try:
            now = FileIdentity.of(self.path)
        except OSError as error:
            raise CorruptDataError(f"{self.path} was removed since it was opened ({error})") from error
        self.compare(now)

    def compare(self, now: FileIdentity) -> None:
        """Raise `CorruptDataError` if `now` differs from this identity."""
        if now != self:
            raise CorruptDataError(
                f"{self.path} was replaced or changed since it was opened ({now.size} bytes now, {self.size} bytes "
                "then). Open it again, and do not write to it while it is being read."
            )

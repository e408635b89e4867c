"""Verification that the workers of a cluster see the files that a rank has opened.

A rank computes fingerprints of the files behind a task while it pickles the task. Each worker compares them with
the files at the same paths on its machine.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from dasksc.pushdown import DaskMatrix
from dasksc.storage.file_identity import FileIdentity

__all__ = ["Fingerprint", "describe_mismatch", "pickle_with_files"]

_SAMPLE_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fingerprint of a file as seen by a process.

    Parameters
    ----------
    identity
        Path, size and modification time.
    digest
        Digest of the first and last bytes; None if the file cannot be read.
    """

    identity: FileIdentity
    digest: str | None

    @classmethod
    def of(cls, path: str) -> Fingerprint:
        """Compute the fingerprint of the file at `path`."""
        identity = FileIdentity.of(path)
        digest = hashlib.blake2b(digest_size=16)
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, identity.size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
        return cls(identity=identity, digest=digest.hexdigest())

    def describe_mismatch(self) -> str | None:
        """Describe how the file at this path differs on this machine; return None if it is the same."""
        path = self.identity.path
        try:
            here = Fingerprint.of(path)
        except OSError as error:
            return f"does not see {path} ({error.strerror or error})"
        if here == self:
            return None
        if (here.identity.size, here.digest) == (self.identity.size, self.digest):
            return (
                f"sees {path} with a different modification time, so the file there is probably a copy. Preserve the "
                "time when copying (cp -p, rsync -t)"
            )
        return f"sees a different file at {path} ({here.identity.size} bytes, not {self.identity.size})"


def describe_mismatch(fingerprints: Sequence[Fingerprint]) -> str | None:
    """Describe the first file that differs on this machine; return None if all files are the same."""
    return next((mismatch for fingerprint in fingerprints if (mismatch := fingerprint.describe_mismatch())), None)


def pickle_with_files(task: Callable[[Any], Any]) -> tuple[bytes, tuple[Fingerprint, ...]]:
    """Pickle `task` once; return the pickle and the fingerprints of the files that it will read."""
    buffer = io.BytesIO()
    pickler = _FileRecordingPickler(buffer)
    pickler.dump(task)
    return buffer.getvalue(), tuple(Fingerprint.of(path) for path in sorted(pickler.paths))


class _FileRecordingPickler(cloudpickle.Pickler):
    """Pickler that records the files opened by the pickled objects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.paths: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FileIdentity) and os.path.isfile(obj.path):
            self.paths.add(obj.path)
        elif isinstance(obj, DaskMatrix):
            # A `DaskMatrix` pickles itself to bytes, which hide the objects inside.
            inner = _FileRecordingPickler(io.BytesIO())
            inner.dump(obj.array)
            self.paths |= inner.paths
        return super().reducer_override(obj)

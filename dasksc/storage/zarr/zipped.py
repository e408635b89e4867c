"""Zarr stores in zip files, which zarr-python reads."""

from __future__ import annotations

import os
import struct
import zipfile

from zarr.storage import ZipStore

from dasksc.errors import CorruptDataError


def is_zip(path: str) -> bool:
    """Return True if a local path is that of a file with the ending ``.zip``."""
    return path.endswith(".zip") and os.path.isfile(path)


def members_of(path: str) -> list[zipfile.ZipInfo]:
    """Return the members of a zip file; raise `CorruptDataError` if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    # zipfile raises several types of errors if the directory is damaged.
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError) as error:
        raise CorruptDataError(
            f"{path} ({os.path.getsize(path)} bytes) is not a zip file, or is truncated: {error}. Copy or download it "
            "again."
        ) from error


class ZippedStore(ZipStore):
    """Store of zarr-python whose sizes come from the directory of the archive."""

    async def getsize_prefix(self, prefix: str) -> int:
        inside = f"{prefix.strip('/')}/"
        return sum(one.compress_size for one in members_of(str(self.path)) if one.filename.startswith(inside))

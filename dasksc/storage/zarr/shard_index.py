"""Index of a shard: offsets and sizes of its chunks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dasksc.errors import CorruptDataError
from dasksc.storage.codecs import Crc32c
from dasksc.storage.file_identity import FileIdentity
from dasksc.storage.remote.client import ObjectIdentity
from dasksc.storage.zarr.layout import ZarrLayout

__all__ = ["index_bytes", "chunk_ranges"]

# Value that a shard's index holds as both offset and size of a chunk that was never written.
_NEVER = 2**64 - 1


def index_bytes(layout: ZarrLayout, identity: FileIdentity | ObjectIdentity) -> tuple[int, int]:
    """Return the byte range [start, stop) of the index in a shard."""
    n_bytes = 16 * math.prod(layout.per_shard) + 4 * layout.index_checksum
    if identity.size < n_bytes:
        raise CorruptDataError(
            f"{identity.path} is truncated: it has no room for the index of its chunks. Copy or download it again."
        )
    return (0, n_bytes) if layout.index_first else (identity.size - n_bytes, identity.size)


def chunk_ranges(
    layout: ZarrLayout, identity: FileIdentity | ObjectIdentity, data: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offset (-1 if never written) and size of each chunk of a shard in bytes, from its index."""
    if layout.index_checksum:
        try:
            data = Crc32c().decode(data, len(data))
        except ValueError as error:
            raise CorruptDataError(
                f"{identity.path}: the index of its chunks is corrupt: {error}. Copy or download it again."
            ) from error
    table = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
    # Offsets beyond int64 are clipped to an offset beyond the end of this file; reading there raises an error.
    ranges = np.minimum(table, identity.size + 1).astype(np.int64)
    ranges[table[:, 0] == _NEVER] = -1, 0
    return ranges[:, 0].copy(), ranges[:, 1].copy()

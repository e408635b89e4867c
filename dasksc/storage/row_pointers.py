"""Memory addresses of the requested runs of an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPointers:
    """Addresses of runs of an array, each contiguous in memory."""

    # Use `RowPointers.inside`, which checks the bounds of every address; the kernels do not check them.

    at: NDArray[np.uint64]  # Address of the first element of each run, shape (n_runs,), uint64
    dtype: np.dtype[Any]  # Data type of the elements in memory, in native byte order
    held_bytes: int  # Anonymous memory that these runs keep alive, in bytes
    owners: tuple[Any, ...]  # Objects that keep the memory at `at` alive

    @classmethod
    def inside(
        cls,
        buffers: Sequence[NDArray[Any]],
        *,
        dtype: np.dtype[Any],
        which: NDArray[np.int64] | int,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        held_bytes: int,
    ) -> RowPointers:
        """Return the addresses of runs inside `buffers`."""
        begins = np.array([buffer.ctypes.data for buffer in buffers], dtype=np.uint64)
        lengths = np.array([buffer.nbytes for buffer in buffers], dtype=np.int64)
        if ((sizes > 0) & ((offsets < 0) | (offsets + sizes > lengths[which]))).any():
            raise ValueError("a run lies outside its buffer")
        return cls(
            at=begins[which] + offsets.astype(np.uint64),
            dtype=dtype,
            held_bytes=held_bytes,
            owners=tuple(buffers),
        )

    @classmethod
    def joined(cls, parts: Sequence[RowPointers]) -> RowPointers:
        """Concatenate the runs of several objects with the same data type."""
        return cls(
            at=np.concatenate([part.at for part in parts]),
            dtype=parts[0].dtype,
            held_bytes=sum(part.held_bytes for part in parts),
            owners=tuple(owner for part in parts for owner in part.owners),
        )

    def ordered(self, order: NDArray[np.int64]) -> RowPointers:
        """Return the same runs in another order."""
        return replace(self, at=self.at[order])

    @property
    def like(self) -> NDArray[Any]:
        """Empty array that shows the data type of the elements to the kernels."""
        return np.empty(0, dtype=self.dtype)

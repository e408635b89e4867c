"""Where in memory the wanted pieces of an array lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Reached"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reached:
    """Runs of an array, each contiguous somewhere in memory.

    Build it with `Reached.inside`, which bounds every address; the kernels trust them.

    Parameters
    ----------
    at
        Address of the first element of each run, shape (n_runs,), uint64.
    dtype
        Type of the elements in memory, native byte order.
    held_bytes
        Anonymous memory that these runs keep alive.
    owners
        What keeps the memory at `at` alive.
    """

    at: NDArray[np.uint64]
    dtype: np.dtype[Any]
    held_bytes: int
    owners: tuple[Any, ...]

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
    ) -> Reached:
        """Address runs inside `buffers`.

        Parameters
        ----------
        buffers
            C-contiguous arrays of any type; at least one.
        dtype
            Type of the elements.
        which
            Which buffer each run lies in.
        offsets, sizes
            Where in it each run starts, and how long it is, in bytes, shape (n_runs,).
        held_bytes
            Anonymous memory behind the buffers.

        Raises
        ------
        ValueError
            If a run leaves its buffer: a mistake of the reader, caught before anything is read.
        """
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
    def joined(cls, parts: Sequence[Reached]) -> Reached:
        """Return the runs of several, one after the other; they are of one type."""
        return cls(
            at=np.concatenate([part.at for part in parts]),
            dtype=parts[0].dtype,
            held_bytes=sum(part.held_bytes for part in parts),
            owners=tuple(owner for part in parts for owner in part.owners),
        )

    def ordered(self, order: NDArray[np.int64]) -> Reached:
        """Return the same runs in another order."""
        return replace(self, at=self.at[order])

    @property
    def like(self) -> NDArray[Any]:
        """An empty array of the elements' type, for the kernels."""
        return np.empty(0, dtype=self.dtype)

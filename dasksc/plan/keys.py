"""Keys of random numbers, of which every random value is a pure function with a position, and digests."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Purpose(enum.IntEnum):
    """Purpose of a key; keys of different purposes are independent."""

    BLOCKS = 0
    FETCHES = 1
    DEAL = 2
    DRAW = 3
    USER = 4
    TOKENS = 5
    SPLIT = 6
    SETS = 7
    DOWNSAMPLE = 8
    MASK_GENES = 9


def epoch_keys(seed: int, epoch: int, purpose: Purpose, *more: int, n: int = 1) -> NDArray[np.uint64]:
    """Derive `n` independent 64-bit keys for one purpose of one epoch."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, int(purpose), *more))
    return sequence.generate_state(n, np.uint64).astype(np.uint64, copy=False)


def digest_of(*parts: Any) -> str:
    """Return a hex digest of arrays by content, of dataclasses by their compared fields, of the rest by repr."""
    state = hashlib.blake2b(digest_size=16)
    for part in _flat(parts):
        if isinstance(part, np.ndarray):
            state.update(f"{part.dtype.str}{part.shape}".encode())
            state.update(np.ascontiguousarray(part).data)
        else:
            state.update(repr(part).encode())
        state.update(b"|")
    return state.hexdigest()


def _flat(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, tuple):
            yield len(part)
            yield from _flat(part)
        elif dataclasses.is_dataclass(part):
            yield type(part).__name__
            yield from _flat(getattr(part, field.name) for field in dataclasses.fields(part) if field.compare)
        else:
            yield part

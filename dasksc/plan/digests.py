"""Digests of the parameters of a draw."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

__all__ = ["digest_of"]


def digest_of(*parts: Any) -> str:
    """Return a hex digest of `parts`: arrays are hashed by content, everything else by repr."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            state.update(f"{part.dtype.str}{part.shape}".encode())
            state.update(np.ascontiguousarray(part).data)
        else:
            state.update(repr(part).encode())
        state.update(b"|")
    return state.hexdigest()

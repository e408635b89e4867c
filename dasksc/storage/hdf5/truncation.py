"""Error for truncated HDF5 files."""

from __future__ import annotations

import re

from dasksc.errors import CorruptDataError

__all__ = ["truncation_error"]

# Matches the part of HDF5's error message that gives the file size stored in the header.
_STATED = re.compile(r"stored_eof = (\d+)")


def truncation_error(path: str, n_bytes: int, error: OSError) -> CorruptDataError | None:
    """Return the error for a truncated file, given the `error` raised on opening it; None if it has another cause."""
    text = str(error)
    if "truncated" not in text:
        return None
    stated = _STATED.search(text)
    size = f"{n_bytes:,} of {int(stated[1]):,} bytes" if stated else f"only {n_bytes:,} bytes"
    return CorruptDataError(f"{path} is truncated: it has {size}. Copy or download it again.")

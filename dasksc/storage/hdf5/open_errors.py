"""Errors for HDF5 files that cannot be opened."""

from __future__ import annotations

import os
import re

import h5py

from dasksc.errors import CorruptDataError, StorageError

__all__ = ["open_error", "open_local"]

# Matches the part of HDF5's error message that gives the file size stored in the header.
_STATED = re.compile(r"stored_eof = (\d+)")


def open_local(path: str) -> h5py.File:
    """Open a local file for reading."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise open_error(path, os.path.getsize(path), error) from error


def open_error(path: str, n_bytes: int, error: OSError) -> StorageError:
    """Return the error that explains the `error` raised on opening a file of `n_bytes` bytes."""
    text = str(error)
    if "truncated" in text:
        stated = _STATED.search(text)
        size = f"{n_bytes:,} of {int(stated[1]):,} bytes" if stated else f"only {n_bytes:,} bytes"
        return CorruptDataError(f"{path} is truncated: it has {size}. Copy or download it again.")
    if "unable to lock file" in text:
        return StorageError(
            f"{path} is locked: another program has it open for writing, such as a notebook with backed='r+'. Close "
            "it there, then open it again. On a file system that has no locks, set HDF5_USE_FILE_LOCKING=FALSE in the "
            f"environment ({error})"
        )
    return StorageError(f"{path} cannot be opened as HDF5: {error}")

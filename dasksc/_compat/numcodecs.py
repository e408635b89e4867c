"""Parts of numcodecs that are not public."""

from __future__ import annotations

import ctypes

import numcodecs.blosc  # type: ignore[import-untyped]

__all__ = ["blosc_getitem_address"]


def blosc_getitem_address() -> int | None:
    """Return the address of C-Blosc's ``blosc_getitem``, which decodes a range of items of a chunk; None if missing."""
    # numcodecs does not wrap the function, but its wheels for Linux and macOS export it, and other builds link to a C
    # library that exports it. The function of C-Blosc2 (3.3.5) cannot replace it: it returns wrong bytes for a range
    # that is as long as a block but spans two blocks.
    try:
        function = ctypes.CDLL(numcodecs.blosc.__file__).blosc_getitem
    except (OSError, AttributeError):  # built in or in a zip file; a build that does not export the function
        return None
    return ctypes.cast(function, ctypes.c_void_p).value

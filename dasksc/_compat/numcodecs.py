"""Parts of numcodecs that are not public."""

from __future__ import annotations

import ctypes
import sys

import numcodecs.blosc  # type: ignore[import-untyped]

from dasksc._compat.unsupported import UnsupportedVersionError, warn_once

__all__ = ["blosc_getitem_address"]


def blosc_getitem_address() -> int | None:
    """Return the address of C-Blosc's ``blosc_getitem``, which decodes a range of items of a chunk; for speed only."""
    # numcodecs does not wrap the function, but its wheels for Linux and macOS export it, and other builds link to a C
    # library that exports it. The function of C-Blosc2 (3.3.5) cannot replace it: it returns wrong bytes for a range
    # that is as long as a block but spans two blocks. On Windows, a missing function is not reported.
    try:
        library = ctypes.CDLL(numcodecs.blosc.__file__)
    except OSError:  # numcodecs is in a zip file, or built in
        return None
    try:
        function = library.blosc_getitem
    except AttributeError:  # raised by ctypes for a missing function
        if sys.platform != "win32":
            missing = UnsupportedVersionError("numcodecs", "function blosc_getitem in numcodecs.blosc")
            warn_once(missing, without="Blosc chunks are decoded whole")
        return None
    return ctypes.cast(function, ctypes.c_void_p).value

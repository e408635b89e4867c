"""What is not public in numcodecs."""

from __future__ import annotations

import ctypes
import sys

import numcodecs.blosc  # type: ignore[import-untyped]

from dasksc._compat.unsupported import UnsupportedVersionError, say_once

__all__ = ["blosc_getitem_address"]


def blosc_getitem_address() -> int | None:
    """Return the address of C-Blosc's ``blosc_getitem``, which decodes some items of a chunk; None without it.

    numcodecs does not wrap that function, but its wheels for Linux and macOS export it, and elsewhere the C library
    that it is linked to. That of C-Blosc2 (3.3.5) returns wrong bytes where the items fill a block but lie in two.
    Speed only; it is not missed on Windows.
    """
    try:
        library = ctypes.CDLL(numcodecs.blosc.__file__)
    except OSError:  # in a zip file, or built in
        return None
    try:
        function = library.blosc_getitem
    except AttributeError:  # how ctypes says that a library lacks a function
        if sys.platform != "win32":
            missing = UnsupportedVersionError("numcodecs", "function blosc_getitem in numcodecs.blosc")
            say_once(missing, without="Blosc chunks are decoded whole")
        return None
    return ctypes.cast(function, ctypes.c_void_p).value

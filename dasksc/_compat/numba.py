"""What is private in numba: how compiled functions are kept on disk. Where it is missing, they are not."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, optional, say_once

__all__ = ["FunctionCache", "cache_place", "can_cache", "set_cache"]

_WITHOUT = "kernels are compiled anew in every process"
_found = optional("numba", "numba.core.caching", "FunctionCache", without=_WITHOUT)

FunctionCache: Any = object if _found is None else _found
"""What keeps compiled functions (``numba.core.caching``)."""


def can_cache() -> bool:
    """Whether `FunctionCache` is there."""
    return _found is not None


def cache_place(cache: Any) -> tuple[str, str]:
    """Return the folder in which a `FunctionCache` keeps its files, and what their names begin with.

    By its attributes ``_cache_path`` and ``_impl.filename_base``.

    Raises
    ------
    UnsupportedVersionError
        If it has none.
    """
    folder = attribute(cache, "_cache_path", library="numba")
    locator = attribute(cache, "_impl", library="numba")
    return str(folder), str(attribute(locator, "filename_base", library="numba"))


def set_cache(dispatcher: Any, make: Any) -> None:
    """Have a dispatcher use another cache than its own (``_cache``): what `make` returns."""
    try:
        attribute(dispatcher, "_cache", library="numba")
        dispatcher._cache = make()
    except UnsupportedVersionError as error:
        say_once(error, without=_WITHOUT)

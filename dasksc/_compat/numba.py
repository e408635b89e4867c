"""Private parts of numba's on-disk cache of compiled functions. If a part is missing, the cache is disabled."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute, optional, warn_once

__all__ = ["FunctionCache", "cache_location", "can_cache", "set_cache"]

_WITHOUT = "kernels are compiled again in every process"
_found = optional("numba", "numba.core.caching", "FunctionCache", without=_WITHOUT)

FunctionCache: Any = object if _found is None else _found
"""Cache of compiled functions (``numba.core.caching``)."""


def can_cache() -> bool:
    """Return True if `FunctionCache` is available."""
    return _found is not None


def cache_location(cache: Any) -> tuple[str, str]:
    """Return the folder of a `FunctionCache` and the prefix of its file names."""
    # Uses the attributes ``_cache_path`` and ``_impl.filename_base``.
    folder = attribute(cache, "_cache_path", library="numba")
    locator = attribute(cache, "_impl", library="numba")
    return str(folder), str(attribute(locator, "filename_base", library="numba"))


def set_cache(dispatcher: Any, make: Any) -> None:
    """Replace the cache of a numba dispatcher (``_cache``) with the return value of `make`."""
    try:
        attribute(dispatcher, "_cache", library="numba")
        dispatcher._cache = make()
    except UnsupportedVersionError as error:
        warn_once(error, without=_WITHOUT)

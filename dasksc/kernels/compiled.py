"""How kernels are compiled, and kept compiled between runs.

Compiling takes seconds, so compiled kernels are kept on disk. Numba's own cache is not safe when
several processes start at once, as ranks do: its index can name a file that another process has
filled with the code of other types. Here there is no index: a file's name is a digest of everything
its code depends on, files appear in one step, and what is found is what was asked for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import config, njit

from dasksc._compat.numba import FunctionCache, cache_place, can_cache, set_cache

__all__ = ["kernel"]

logger = logging.getLogger(__name__)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function for each set of argument types it meets: serial, nogil, kept on disk."""
    dispatcher: Any = njit(nogil=True)(function)
    if config.DISABLE_JIT or not can_cache():
        return dispatcher
    try:
        set_cache(dispatcher, lambda: _Cache(function))
    except RuntimeError as error:  # nowhere to write, neither beside the source nor in the user's cache folder
        logger.info("kernels are compiled anew in every process: %s", error)
    return dispatcher


@functools.cache
def _source_digest() -> str:
    """Digest of every kernel's source: kernels call each other across files."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _CacheFiles(*cache_place(self))


class _CacheFiles:
    """Stands in for numba's index and data files."""

    def __init__(self, folder: str, stem: str) -> None:
        self._folder = folder
        self._stem = stem

    def _path(self, key: Any) -> str:
        signature, target, code = key
        depends_on = (
            str(signature),
            repr(target),
            repr(code),
            numba.__version__,
            _source_digest(),
            # Options that change the code and are no part of numba's key.
            config.BOUNDSCHECK,
            str(config.OPT),
            config.DEBUGINFO_DEFAULT,
        )
        digest = hashlib.blake2b(repr(depends_on).encode(), digest_size=16).hexdigest()
        return os.path.join(self._folder, f"{self._stem}.{digest}.nbc")

    def load(self, key: Any) -> Any:
        """Return what was saved under `key`, or None."""
        try:
            with open(self._path(key), "rb") as file:
                return pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, key: Any, data: Any) -> None:
        """Keep `data` under `key`; processes that save the same key save the same code."""
        path = self._path(key)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(temporary, "wb") as file:
                pickle.dump(data, file)
            os.replace(temporary, path)
        except OSError as error:
            logger.info("a compiled kernel could not be kept in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def flush(self) -> None:
        """Forget nothing: names change with the code, and others may be using the files."""

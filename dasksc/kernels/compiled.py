"""Compilation of kernels, and their cache on disk.

Compilation takes seconds, so compiled kernels are cached on disk. Numba's own cache is not safe if
several processes start at once, as ranks do: its index can name a file that another process has written
for other argument types. This cache has no index. The name of a file is a digest of everything that its
code depends on, and files are created atomically, so a file always holds the requested code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
from numba import config, njit
from numba.core import event
from numba.core.caching import FunctionCache  # private, as its attributes and that of a dispatcher below

from dasksc.errors import InputError

if config.DISABLE_JIT:
    # Kernels read memory at addresses and use vectors, which only compiled code can do.
    raise InputError(
        "numba does not compile functions, since NUMBA_DISABLE_JIT=1 is set, but dasksc works only with compiled "
        "kernels. Unset this variable. To debug a compiled function of your own, call its attribute py_func"
    )

logger = logging.getLogger(__name__)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function to serial code that releases the GIL, and cache it on disk.

    One version is compiled for each combination of argument types.
    """
    dispatcher: Any = njit(nogil=True)(function)
    try:
        cache: Any = FunctionCache(function)
        cache._cache_file = _CacheFiles(str(cache._cache_path), str(cache._impl.filename_base))
        dispatcher._cache = cache
    except RuntimeError as error:  # neither the source folder nor the user's cache folder is writable
        logger.info("kernels are compiled again in every process: %s", error)
    return dispatcher


class _Compilations(event.Listener):
    """Time spent compiling; kernels that call others are compiled within each other, under numba's lock."""

    def __init__(self) -> None:
        self._depth = 0
        self._start = 0.0
        self._total_s = 0.0
        self.calls: list[Callable[[], object]] = []

    def on_start(self, event: Any) -> None:
        if not self._depth:
            self._start = perf_counter()
            for call in self.calls:
                call()
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._total_s += perf_counter() - self._start

    @property
    def total_s(self) -> float:
        return self._total_s + (perf_counter() - self._start if self._depth else 0.0)


_compilations = _Compilations()
event.register("numba:compile", _compilations)


def seconds_compiling() -> float:
    """Return the seconds that this process has spent compiling kernels so far."""
    return _compilations.total_s


@contextlib.contextmanager
def compiling(call: Callable[[], object]) -> Iterator[None]:
    """Call `call` whenever a kernel begins to be compiled within the ``with`` block."""
    _compilations.calls.append(call)
    try:
        yield
    finally:
        _compilations.calls.remove(call)


@functools.cache
def _source_digest() -> str:
    """Return a digest of the source of all kernels, since kernels call each other across files."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


class _CacheFiles:
    """Replacement for numba's index and data files."""

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
            # Options that change the code but are not part of numba's key.
            config.BOUNDSCHECK,
            str(config.OPT),
            config.DEBUGINFO_DEFAULT,
        )
        digest = hashlib.blake2b(repr(depends_on).encode(), digest_size=16).hexdigest()
        return os.path.join(self._folder, f"{self._stem}.{digest}.nbc")

    def load(self, key: Any) -> Any:
        """Return the data saved under `key`, or None."""
        try:
            with open(self._path(key), "rb") as file:
                return pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, key: Any, data: Any) -> None:
        """Save `data` under `key`; processes that save the same key save the same code."""
        path = self._path(key)
        temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(temporary, "wb") as file:
                pickle.dump(data, file)
            os.replace(temporary, path)
        except OSError as error:
            logger.info("a compiled kernel could not be cached in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def flush(self) -> None:
        """Do nothing: file names change with the code, and other processes may be using the files."""

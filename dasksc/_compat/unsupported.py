"""Handling of library versions that lack a private part that dasksc uses.

If safety or correctness requires the part, an `UnsupportedVersionError` names the version. If the part serves only
speed or an optional statistic, the feature is disabled with one warning.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dasksc.errors import DaskscError

__all__ = ["UnsupportedVersionError", "attribute", "late_names", "needed", "optional", "warn_once"]

logger = logging.getLogger("dasksc.compat")

_warned: set[str] = set()


class UnsupportedVersionError(DaskscError, RuntimeError):
    """Error for a library version that lacks a private part that dasksc uses; the message names both."""

    def __init__(self, library: str, what: str) -> None:
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        super().__init__(f"{library} {version} has no {what}, which dasksc needs. Install another version of {library}")


def attribute(owner: Any, name: str, *, library: str) -> Any:
    """Return an attribute of an object of a library."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if error.obj is not owner or error.name != name:
            raise
        raise UnsupportedVersionError(library, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}") from error


@contextlib.contextmanager
def needed(library: str) -> Iterator[None]:
    """Convert a failed import from an installed library to an `UnsupportedVersionError`."""
    try:
        yield
    except ImportError as error:
        if not f"{error.name}.".startswith(f"{library}.") or (
            isinstance(error, ModuleNotFoundError) and error.name == library
        ):
            raise  # the library itself, or another one, is not installed
        raise UnsupportedVersionError(library, f"module or function of the expected name ({error})") from error


def late_names(library: str, module: str, sources: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` that imports names on first use."""

    def __getattr__(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        source, original = sources[name]
        with needed(library):
            found = importlib.import_module(source)
        return attribute(found, original, library=library)

    return __getattr__


def optional(library: str, module: str, name: str, *, without: str) -> Any:
    """Return an object of a module by name, or None if it is missing."""
    # If it is missing, log a warning once, which names the consequence (`without`).
    try:
        with needed(library):
            found = importlib.import_module(module)
        return attribute(found, name, library=library)
    except UnsupportedVersionError as error:
        warn_once(error, without=without)
        return None


def warn_once(error: UnsupportedVersionError, *, without: str) -> None:
    """Log a warning about a missing part and its consequence, once per process."""
    if str(error) not in _warned:
        _warned.add(str(error))
        logger.warning("%s. Until then, %s.", error, without)

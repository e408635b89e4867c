"""What happens where a version of a library lacks something private that is used here.

What safety or correctness needs raises an `UnsupportedVersionError`, which names the version. Speed and figures that
can be done without are turned off, with one warning for each.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dasksc.errors import DaskscError

__all__ = ["UnsupportedVersionError", "attribute", "late_names", "needed", "optional", "say_once"]

logger = logging.getLogger("dasksc.compat")

_said: set[str] = set()


class UnsupportedVersionError(DaskscError, RuntimeError):
    """A version of a library that lacks something private that is used here; the message names both."""

    def __init__(self, library: str, what: str) -> None:
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        super().__init__(f"{library} {version} has no {what}, which dasksc needs. Install another version of {library}")


def attribute(owner: Any, name: str, *, library: str) -> Any:
    """Return an attribute of an object of a library.

    Raises
    ------
    UnsupportedVersionError
        If the object has none of that name. Errors inside a property are raised as they are.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if error.obj is not owner or error.name != name:
            raise
        raise UnsupportedVersionError(library, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}") from error


@contextlib.contextmanager
def needed(library: str) -> Iterator[None]:
    """Raise an `UnsupportedVersionError` for a module or name of a library that cannot be imported inside."""
    try:
        yield
    except ImportError as error:
        if not f"{error.name}.".startswith(f"{library}.") or (
            isinstance(error, ModuleNotFoundError) and error.name == library
        ):
            raise  # another library, or this one altogether, is not installed
        raise UnsupportedVersionError(library, f"such name: {error}") from error


def late_names(library: str, module: str, sources: Mapping[str, tuple[str, str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose names are imported when they are asked for.

    Parameters
    ----------
    library
        What they are of.
    module
        Whose names they become.
    sources
        Module and name there, by name here.
    """

    def __getattr__(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        source, original = sources[name]
        with needed(library):
            found = importlib.import_module(source)
        return attribute(found, original, library=library)

    return __getattr__


def optional(library: str, module: str, name: str, *, without: str) -> Any:
    """Return a name of a module; None where it is missing, with one warning that says how it goes on without."""
    try:
        with needed(library):
            found = importlib.import_module(module)
        return attribute(found, name, library=library)
    except UnsupportedVersionError as error:
        say_once(error, without=without)
        return None


def say_once(error: UnsupportedVersionError, *, without: str) -> None:
    """Warn, once in each process, how it goes on without what is missing."""
    if str(error) not in _said:
        _said.add(str(error))
        logger.warning("%s. Until then %s.", error, without)

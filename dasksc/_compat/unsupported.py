"""Errors of library versions that lack something that dasksc uses."""

from __future__ import annotations

import importlib.metadata
import logging

from dasksc.errors import DaskscError

__all__ = ["UnsupportedVersionError", "warn_once"]

logger = logging.getLogger("dasksc.compat")

_warned: set[str] = set()


class UnsupportedVersionError(DaskscError, RuntimeError):
    """Error for a library version that lacks something that dasksc uses; the message names both."""

    def __init__(self, library: str, what: str) -> None:
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        super().__init__(f"{library} {version} has no {what}, which dasksc needs. Install another version of {library}")


def warn_once(error: UnsupportedVersionError, *, without: str) -> None:
    """Log a warning about something missing and its consequence, once per process."""
    if str(error) not in _warned:
        _warned.add(str(error))
        logger.warning("%s. Until then, %s.", error, without)

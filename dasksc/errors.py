"""Exceptions of dasksc.

Every error derives from `DaskscError` and from the built-in exception that a caller would expect, so both
``except dasksc.DaskscError`` and ``except ValueError`` work:

.. code-block:: text

    DaskscError
    ├── InputError (ValueError)          invalid argument or combination of arguments
    │   ├── MissingKeyError (KeyError)   column, layer, gene or group that the data do not have
    │   └── WrongTypeError (TypeError)   argument of an unsupported type
    ├── StorageError (OSError)           path or store that cannot be opened, read or written
    │   ├── MissingPathError (FileNotFoundError)
    │   └── CorruptDataError             data that are truncated, replaced since they were opened, or inconsistent
    ├── TrainingError (RuntimeError)     training that cannot continue: its loss is NaN, or another rank failed
    ├── FetchError (RuntimeError)        failed fetch (see its __cause__); the message gives epoch, fetch and rows
    └── RankMismatchError (RuntimeError) ranks that disagree about the data set, seed or epoch

A message states what was given, what was expected and how to fix the problem.
"""

from __future__ import annotations

__all__ = [
    "CorruptDataError",
    "DaskscError",
    "FetchError",
    "InputError",
    "MissingKeyError",
    "MissingPathError",
    "RankMismatchError",
    "StorageError",
    "TrainingError",
    "WrongTypeError",
]


class DaskscError(Exception):
    """Base class of all exceptions that dasksc raises intentionally.

    Examples
    --------
    >>> try:
    ...     dasksc.open("missing.h5ad")
    ... except dasksc.DaskscError as error:
    ...     print(type(error).__name__, isinstance(error, FileNotFoundError))
    MissingPathError True
    """


class InputError(DaskscError, ValueError):
    """Invalid argument or combination of arguments."""


class MissingKeyError(InputError, KeyError):
    """Column, layer, gene or group that the data do not have."""

    def __str__(self) -> str:
        # KeyError prints repr(args[0]), which would quote the message.
        return str(self.args[0]) if self.args else ""


class WrongTypeError(InputError, TypeError):
    """Argument of an unsupported type."""


class StorageError(DaskscError, OSError):
    """Path or store that cannot be opened, read or written."""


class MissingPathError(StorageError, FileNotFoundError):
    """Path that does not exist."""


class CorruptDataError(StorageError):
    """Stored data that are truncated, replaced since they were opened, or inconsistent."""


class TrainingError(DaskscError, RuntimeError):
    """Training that cannot continue, for example because its loss is NaN."""


class FetchError(DaskscError, RuntimeError):
    """Failed fetch; ``__cause__`` is the error of the reader or of the user's hook."""


class RankMismatchError(DaskscError, RuntimeError):
    """Disagreement between ranks about the data set, the seed or the epoch."""

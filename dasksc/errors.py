"""What dasksc raises.

Every error derives from `DaskscError` and from the builtin a caller would expect, so both
``except dasksc.DaskscError`` and ``except ValueError`` work:

.. code-block:: text

    DaskscError
    ├── InputError (ValueError)          an argument or a combination of arguments is not usable
    │   ├── MissingKeyError (KeyError)   a column, layer, gene or group that the data does not have
    │   └── WrongTypeError (TypeError)   an argument of a type that cannot be used
    ├── StorageError (OSError)           a path or store cannot be opened or read
    │   ├── MissingPathError (FileNotFoundError)
    │   └── CorruptDataError             truncated, replaced since it was opened, or self-contradictory
    ├── TrainingError (RuntimeError)     a training cannot go on: its loss is NaN, or another rank failed
    ├── FetchError (RuntimeError)        a fetch failed; names the epoch, fetch and rows, caused by the real error
    ├── StartError (RuntimeError)        the Dask cluster that the ranks share has not started
    └── RankMismatchError (RuntimeError) two ranks disagree about the data set, seed or epoch

A message says what was given, what was expected and how to put it right.
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
    "StartError",
    "StorageError",
    "TrainingError",
    "WrongTypeError",
]


class DaskscError(Exception):
    """Root of everything dasksc raises on purpose."""


class InputError(DaskscError, ValueError):
    """An argument, or a combination of arguments, that cannot be used."""


class MissingKeyError(InputError, KeyError):
    """A column, layer, gene or group that the data does not have."""

    def __str__(self) -> str:
        # KeyError prints repr(args[0]); a sentence should print as a sentence.
        return str(self.args[0]) if self.args else ""


class WrongTypeError(InputError, TypeError):
    """An argument of a type that cannot be used."""


class StorageError(DaskscError, OSError):
    """A path or store that cannot be opened or read."""


class MissingPathError(StorageError, FileNotFoundError):
    """A path at which there is nothing."""


class CorruptDataError(StorageError):
    """Stored data that is truncated, was replaced since it was opened, or contradicts itself."""


class TrainingError(DaskscError, RuntimeError):
    """A training that cannot go on, such as one whose loss is NaN."""


class FetchError(DaskscError, RuntimeError):
    """A fetch that failed; ``__cause__`` is the error of the reader or of the user's hook."""


class StartError(DaskscError, RuntimeError):
    """The Dask cluster that the ranks of a run share, which rank 0 did not start."""


class RankMismatchError(DaskscError, RuntimeError):
    """Two ranks that disagree about the data set, the seed or the epoch."""

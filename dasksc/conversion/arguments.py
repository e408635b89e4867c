"""Arguments of a conversion, validated before any file is written and any connection is made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dasksc.atlas.concat import MERGES, Join, check_fill_value
from dasksc.checks import check_flags, whole_number
from dasksc.conversion.rows import Order
from dasksc.errors import InputError

__all__ = ["Recipe", "check_options", "target_path"]

_ORDERS = ("shuffle", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Arguments of a conversion that affect its output.

    Parameters
    ----------
    order, group_by, seed, filter, join, label, keys, index_unique, merge, fill_value, narrow
        As for `dasksc.convert`.

    Raises
    ------
    InputError
        If an argument has the wrong type or an unknown value. Arguments are compared with the input only when it is
        opened.
    """

    order: Order
    group_by: str | Sequence[str] | None
    seed: int
    filter: str | None
    join: Join
    label: str | None
    keys: Any
    index_unique: str | None
    merge: str | None
    fill_value: float | None
    narrow: bool

    def __post_init__(self) -> None:
        check_flags(narrow=self.narrow)
        if self.order not in _ORDERS:
            raise InputError(f"order={self.order!r} is neither 'shuffle' nor 'keep'; to group cells, give group_by=")
        if isinstance(self.group_by, list | tuple):
            for name in self.group_by:
                _check_text("group_by", name, "names of obs columns: group_by=['cell_line', 'gene']")
            if not self.group_by or len(set(self.group_by)) < len(self.group_by):
                raise InputError(f"group_by={list(self.group_by)} must name at least one obs column, each only once")
            object.__setattr__(self, "group_by", self.group_by[0] if len(self.group_by) == 1 else list(self.group_by))
        else:
            _check_text("group_by", self.group_by, "names of obs columns: group_by='cell_type'")
        _check_text("label", self.label, "the name of a new obs column: label='plate'")
        _check_text("index_unique", self.index_unique, "text to put between cell names and keys: index_unique='-'")
        if self.keys is not None and not isinstance(self.keys, Iterable):
            raise InputError(f"keys={self.keys!r} is {_kind(self.keys)}; give a list of names, one for each input")
        # For `merge`, AnnData also accepts a function, which cannot be compared with that of an unfinished conversion.
        if self.merge is not None and self.merge not in MERGES:
            raise InputError(
                f"merge={self.merge!r} is none of {', '.join(map(repr, MERGES))}; without merge=, annotations of "
                "genes are left out"
            )
        check_fill_value(self.fill_value, self.join)
        # The plan is stored as JSON, which does not support NumPy scalars.
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0, 2**64))
        object.__setattr__(self, "narrow", bool(self.narrow))
        if self.fill_value is not None:
            object.__setattr__(self, "fill_value", np.asarray(self.fill_value).item())
        if self.keys is not None and not isinstance(self.keys, str):
            object.__setattr__(self, "keys", list(self.keys))

    @property
    def grouped_by(self) -> list[str]:
        """Names of the obs columns to group by, as a list."""
        return [self.group_by] if isinstance(self.group_by, str) else list(self.group_by or ())

    def as_plan(self, data: Any) -> dict[str, Any]:
        """Return the arguments that distinguish this conversion of `data` from others, as plain JSON types."""
        keys = data if isinstance(data, Mapping) else self.keys
        return asdict(self) | {"keys": None if keys is None else [str(key) for key in keys]}


_FILES = (".h5", ".h5ad", ".h5mu", ".hdf5", ".loom", ".zip")


def target_path(target: Any) -> Path:
    """Return the absolute path of the target.

    Raises
    ------
    InputError
        If `target` is not a local path, is the root of a file system, or has the suffix of a file.
    """
    if not isinstance(target, str | os.PathLike) or not isinstance(os.fspath(target), str):
        raise InputError(f"target={target!r} is {_kind(target)}; give the path of the directory to write: 'atlas.zarr'")
    if "://" in os.fspath(target):
        raise InputError(f"{os.fspath(target)!r} is a URL; a conversion writes to a local directory")
    path = Path(os.path.abspath(target))
    if not path.name:
        raise InputError(
            f"target={target!r} is the root of a file system; give the path of the directory to write: 'atlas.zarr'"
        )
    if path.suffix in _FILES:
        raise InputError(f"target={target!r} is named like a file; a Zarr store is a directory: 'atlas.zarr'")
    return path


def check_options(storage_options: Any) -> None:
    """Check that `storage_options` is a mapping or None.

    Raises
    ------
    InputError
        If it is neither.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        # The value may contain secrets, so the message gives only its type.
        raise InputError(f"storage_options is {_kind(storage_options)}; give a dict: {{'region': 'us-east-1'}}")


def _check_text(name: str, value: Any, expected: str) -> None:
    if value is not None and not isinstance(value, str):
        raise InputError(f"{name}={value!r} is {_kind(value)}; give {expected}")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"

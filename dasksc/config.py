"""Defaults, kept in ``dasksc.yaml`` and read through `dask.config`."""

from __future__ import annotations

import importlib.resources
from typing import Any, TypeGuard

import dask.config
import numpy as np
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dasksc.errors import InputError

__all__ = ["as_bytes", "get", "get_bytes", "get_seconds", "is_whole", "memory_limit", "whole_number"]


_DEFAULTS: dict[str, Any] = yaml.safe_load(importlib.resources.files("dasksc").joinpath("dasksc.yaml").read_text())
# What the environment, files and `dask.config.set` say stays.
dask.config.update_defaults(_DEFAULTS)


def get(key: str) -> Any:
    """Return the value of ``dasksc.<key>``; keys are hyphenated."""
    # Leaving a `dask.config.set` that was entered before this module was imported takes the defaults away again.
    return dask.config.get(f"dasksc.{key}", _DEFAULTS["dasksc"][key])


def as_bytes(value: Any) -> int:
    """Return a size in bytes, from a number or a text such as ``"2GiB"``."""
    return int(parse_bytes(value))


def get_bytes(key: str) -> int:
    """Return the value of ``dasksc.<key>`` in bytes; see `as_bytes`."""
    return as_bytes(get(key))


def memory_limit(given: int | str | None) -> int:
    """Return the ``memory_limit`` that was given in bytes; None: ``dasksc.memory-limit``.

    Raises
    ------
    InputError
        If it is no size, or less than a byte.
    """
    limit = get("memory-limit") if given is None else given
    try:
        if not isinstance(limit, int | float | str):
            raise TypeError(f"a number or a text is needed, not a {type(limit).__name__}")
        n_bytes = as_bytes(limit)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"memory_limit={limit!r} is no number of bytes and no text such as '2GiB'") from error
    if not 0 < n_bytes < 2**63:
        raise InputError(f"memory_limit must be a whole number of at least 1; got {limit!r}")
    return n_bytes


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number: numpy's are, and true is not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole_number(name: str, value: Any, low: int = 1, end: int = 2**63) -> int:
    """Return an argument, which must be a whole number in [low, end).

    Raises
    ------
    InputError
        If it is not; the message calls it `name`.
    """
    if not is_whole(value) or not low <= value < end:
        above = f"2**{end.bit_length() - 1}" if end >= 2**32 else end
        span = f"of at least {low}" if end == 2**63 else f"in [{low}, {above})"
        raise InputError(f"{name} must be a whole number {span}; got {value!r}")
    return int(value)


def get_seconds(key: str) -> float | None:
    """Return the value of ``dasksc.<key>`` in seconds, from a number or a text such as ``"500ms"``; None if it is."""
    value = get(key)
    return None if value is None else float(parse_timedelta(value))

"""Configuration defaults, stored in ``dasksc.yaml`` and read through `dask.config`."""

from __future__ import annotations

import importlib.resources
from numbers import Real
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dasksc.errors import InputError

_DEFAULTS: dict[str, Any] = yaml.safe_load(importlib.resources.files("dasksc").joinpath("dasksc.yaml").read_text())
# Values from the environment, files and `dask.config.set` take precedence.
dask.config.update_defaults(_DEFAULTS)


def get(key: str) -> Any:
    """Return the value of ``dasksc.<key>``; keys are hyphenated."""
    # If this module is imported inside a `dask.config.set` block, the end of the block removes the defaults.
    return dask.config.get(f"dasksc.{key}", _DEFAULTS["dasksc"][key])


def get_bytes(key: str) -> int:
    """Return the value of ``dasksc.<key>`` in bytes, given as a number or as text such as ``"2GiB"``."""
    return int(parse_bytes(get(key)))


def memory_limit(given: int | str | None) -> int:
    """Return `given` in bytes, or the value of ``dasksc.memory-limit`` if it is None."""
    limit: Any = get("memory-limit") if given is None else given
    try:
        is_number = isinstance(limit, Real)
        if not (is_number or isinstance(limit, str)):
            raise TypeError(f"expected a number or a string, not a {type(limit).__name__}")
        n_bytes = int(limit if is_number else parse_bytes(limit))
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"memory_limit={limit!r} is neither a number of bytes nor a string such as '2GiB'") from error
    if not 0 < n_bytes < 2**63:
        raise InputError(f"memory_limit must be a whole number of at least 1; got {limit!r}")
    return n_bytes


def get_seconds(key: str) -> float | None:
    """Return the value of ``dasksc.<key>``, a number of seconds or text such as ``"500ms"``; None if it is None."""
    value = get(key)
    return None if value is None else float(parse_timedelta(value))

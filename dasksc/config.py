"""Defaults, kept in ``dasksc.yaml`` and read through `dask.config`."""

from __future__ import annotations

import importlib.resources
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

__all__ = ["as_bytes", "get", "get_bytes", "get_seconds"]


_DEFAULTS: dict[str, Any] = yaml.safe_load(importlib.resources.files("dasksc").joinpath("dasksc.yaml").read_text())
dask.config.update_defaults(_DEFAULTS)
dask.config.refresh()


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


def get_seconds(key: str) -> float | None:
    """Return the value of ``dasksc.<key>`` in seconds, from a number or a text such as ``"500ms"``; None if it is."""
    value = get(key)
    return None if value is None else float(parse_timedelta(value))

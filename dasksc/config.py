"""Defaults, kept in ``dasksc.yaml`` and read through `dask.config`."""

from __future__ import annotations

import importlib.resources
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes

__all__ = ["get", "get_bytes"]


def _load() -> None:
    text = importlib.resources.files("dasksc").joinpath("dasksc.yaml").read_text()
    defaults = yaml.safe_load(text)
    dask.config.update_defaults(defaults)
    dask.config.refresh()


def get(key: str) -> Any:
    """Return the value of ``dasksc.<key>``; keys are hyphenated."""
    return dask.config.get(f"dasksc.{key}")


def get_bytes(key: str) -> int:
    """Return the value of ``dasksc.<key>`` in bytes, from a number or a text such as ``"2GiB"``."""
    return int(parse_bytes(get(key)))


_load()

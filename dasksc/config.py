"""Defaults, kept in ``dasksc.yaml`` and read through `dask.config`."""

from __future__ import annotations

import importlib.resources
from typing import Any

import dask.config
import yaml

__all__ = ["get"]


_DEFAULTS: dict[str, Any] = yaml.safe_load(importlib.resources.files("dasksc").joinpath("dasksc.yaml").read_text())
dask.config.update_defaults(_DEFAULTS)
dask.config.refresh()


def get(key: str) -> Any:
    """Return the value of ``dasksc.<key>``; keys are hyphenated."""
    # Leaving a `dask.config.set` that was entered before this module was imported takes the defaults away again.
    return dask.config.get(f"dasksc.{key}", _DEFAULTS["dasksc"][key])

"""Training a model on an atlas, from a YAML file: one process, DDP or FSDP.

What ``dasksc train`` does can be called: `Config.load` reads a file, `fit` trains, `load_model` takes what was trained.
Needs ``dasksc[train]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dasksc.train.config import Config
    from dasksc.train.loop import fit
    from dasksc.train.report import Report
    from dasksc.train.saved_models import load_model

# Loaded when first used: to read a configuration, or to start ranks, needs no data set.
_HOMES = {
    "Config": "dasksc.train.config",
    "Report": "dasksc.train.report",
    "fit": "dasksc.train.loop",
    "load_model": "dasksc.train.saved_models",
}

__all__ = ["Config", "Report", "fit", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dasksc.train' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Training of a model on an atlas, configured by a YAML file: one process, DDP or FSDP.

The steps of ``dasksc train`` are also available from Python: `Config.load` reads a file, `fit` trains, and `load_model`
loads a trained model. Requires ``dasksc[train]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dasksc.train.config import Config
    from dasksc.train.loop import fit
    from dasksc.train.saved_models import load_model

# Imported on first use, because checking a configuration needs neither torch nor the modules that read data.
_MODULES = {
    "Config": "dasksc.train.config",
    "fit": "dasksc.train.loop",
    "load_model": "dasksc.train.saved_models",
}

__all__ = ["Config", "fit", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dasksc.train' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

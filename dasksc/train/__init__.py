"""Training a model on an atlas, from a YAML file: one process, DDP or FSDP.

What ``dasksc train`` does can be called: `Config.load` reads a file, `fit` trains, `load_model` takes what was trained.
Needs ``dasksc[train]``.
"""

from __future__ import annotations

from dasksc.train.checkpoint import load_model
from dasksc.train.config import Config
from dasksc.train.loop import fit
from dasksc.train.report import Report

__all__ = ["Config", "Report", "fit", "load_model"]

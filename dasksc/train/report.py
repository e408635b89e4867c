"""What a training was: a table, a plot, and the same for programs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dasksc.train.loggers import text_of

__all__ = ["Report", "plot"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a training was.

    Parameters
    ----------
    strategy, world_size, device
        Where it ran.
    n_parameters
        Trained, over all ranks.
    n_steps, n_epochs
        Of the run, with those before it was resumed.
    n_cells, elapsed_s
        Of this process's part of it: cells of all ranks, seconds of training without validation and checkpoints.
    cells_per_s
        Of all ranks.
    wait_share
        Of the time that was spent waiting for data, on the rank that waited longest.
    figures
        The last of each that was noted: ``loss``, ``validation_loss``, ...
    checkpoint, model
        Paths of the latest checkpoint and of the model for inference.
    """

    strategy: str
    world_size: int
    device: str
    n_parameters: int
    n_steps: int
    n_epochs: int
    n_cells: int
    elapsed_s: float
    cells_per_s: float
    wait_share: float
    figures: dict[str, Any]
    checkpoint: str | None
    model: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as numbers, texts and dicts."""
        return asdict(self)

    def __str__(self) -> str:
        lines = {
            "ranks": f"{self.world_size} x {self.device}, {self.strategy}",
            "parameters": f"{self.n_parameters:,}",
            "steps": f"{self.n_steps:,} in {self.n_epochs} epoch{'s' if self.n_epochs != 1 else ''}",
            "cells": f"{self.n_cells:,} in {self.elapsed_s:.1f} s: {self.cells_per_s:,.0f} a second",
            "waiting for data": f"{self.wait_share:.1%} of the time",
            **{name.replace("_", " "): text_of(name, value) for name, value in self.figures.items()},
            "checkpoint": str(self.checkpoint),
            "model": self.model,
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw losses, speed and waiting over the steps, if Matplotlib is there.

    Parameters
    ----------
    rows
        Figures by step, as they were noted.
    path
        Of the picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no plot was drawn: pip install matplotlib")
        return
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, speed = figure.subplots(2, 1, sharex=True)
    for name, marker in (("loss", ""), ("validation_loss", "o")):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            losses.plot(*zip(*points, strict=True), marker=marker, label=name.replace("_", " "))
    losses.set_ylabel("loss")
    losses.legend()
    paced = [row for row in rows if row.get("cells_per_s") is not None]
    steps = [row["step"] for row in paced]
    speed.plot(steps, [row["cells_per_s"] for row in paced], color="tab:green")
    speed.set_ylabel("cells per second", color="tab:green")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("step")
    waiting = speed.twinx()
    waiting.plot(steps, [row["wait_share"] for row in paced], color="tab:red", linestyle=":")
    waiting.set_ylabel("share of time waiting for data", color="tab:red")
    waiting.set_ylim(0, 1)
    figure.savefig(path, dpi=120)

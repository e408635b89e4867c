"""What a training was: a table, a plot, and the same for programs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dasksc.train.loggers import text_of

__all__ = ["Report", "plot", "shown"]

logger = logging.getLogger(__name__)

_N_MARKED = 40
_N_SHOWN = 40
_TITLES = {
    "loss": "loss",
    "accuracy": "accuracy",
    "lr": "learning rate",
    "cells_per_s": "cells per second, all ranks",
    "wait_share": "share of time waiting for data, slowest rank",
}


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

    @property
    def ranks(self) -> str:
        """How many, on what, and how the model is spread over them."""
        return f"{self.world_size} x {self.device}, {self.strategy}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as numbers, texts and dicts."""
        return asdict(self)

    def __str__(self) -> str:
        lines = {
            "ranks": self.ranks,
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


def shown(table: pd.DataFrame) -> str:
    """Return a table as text, all of its columns and the sums of all rows, without rows beyond forty."""
    whole = table.sum().rename("all").to_frame().T
    return str(pd.concat([table.iloc[:_N_SHOWN], whole]).rename_axis(table.index.name).to_string())


def plot(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """Draw how a training went over its steps, if Matplotlib is there.

    Losses, accuracies (of a model without them the learning rate), speed and waiting.

    Parameters
    ----------
    rows
        Figures by step, as they were noted.
    path
        Of the picture.
    title
        Above it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no plot was drawn: pip install matplotlib")
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    names = ["loss", "cells_per_s", "accuracy", "wait_share"]
    if not any("accuracy" in row for row in rows):
        names[2] = "lr"
    for axes, name in zip(figure.subplots(2, 2, sharex=True).flat, names, strict=True):
        _draw(axes, rows, name)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Draw one figure over the steps, of training and of validation."""
    for key, label in ((name, "training"), (f"validation_{name}", "validation")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            # Of few points, and of one, a line alone shows little.
            marker = "o" if len(points) < _N_MARKED else ""
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2, markersize=4)
    if len(axes.get_lines()) > 1:
        axes.legend(frameon=False)
    axes.set_title(_TITLES[name], fontsize=10, loc="left")
    axes.yaxis.set_major_formatter(lambda value, _: text_of(name, value))
    if axes.dataLim.y0 >= 0:  # a loss may be below
        axes.set_ylim(bottom=0)
    if name == "wait_share":
        axes.set_ylim(top=1)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")

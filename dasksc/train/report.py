"""Summary of a training run as a table, a plot, and a dataclass."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dasksc.train.loggers import text_of

__all__ = ["Report", "can_plot", "plot", "shown"]

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
    """Summary of a training run.

    Parameters
    ----------
    strategy, world_size, device
        Parallelism (``training.strategy``), number of ranks, and type of their devices.
    n_parameters
        Number of trained parameters of the whole model.
    n_steps, n_epochs
        Numbers of steps and epochs of the run, including those before it was resumed.
    n_cells, elapsed_s
        Since the run was started or resumed: number of cells over all ranks, and time of training in seconds, excluding
        validation and checkpoints.
    cells_per_s
        Throughput in cells per second, over all ranks.
    wait_share
        Share of `elapsed_s` spent waiting for data, on the rank that waited longest.
    figures
        Last logged value of each metric: ``loss``, ``validation_loss``, ...
    checkpoint, model
        Paths of the latest checkpoint and of the model for inference.

    Examples
    --------
    >>> from dasksc.train import Config, fit
    >>> raw = {"data": {"path": "atlas.h5ad"}, "model": {"name": "autoencoder"}, "training": {"logger": "csv"}}
    >>> report = fit(Config.of(raw, changes=["training.max_steps=5"]), say=lambda line: None)
    >>> report.n_steps, report.n_cells
    (5, 320)
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
        """Number of ranks, type of their devices, and parallelism, as text."""
        return f"{self.world_size} x {self.device}, {self.strategy}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of numbers, strings and dicts."""
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
    """Format a table as text, with all columns, the first 40 rows, and the column sums if it has several rows."""
    whole = [table.sum().rename("all").to_frame().T] if len(table) > 1 else []
    return str(pd.concat([table.iloc[:_N_SHOWN], *whole]).rename_axis(table.index.name).to_string())


def can_plot() -> bool:
    """Return True if Matplotlib, which `plot` needs, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """Plot the progress of a training run over its steps, if Matplotlib is installed.

    The panels show loss, accuracy (or the learning rate, for models without accuracy), throughput and waiting time.

    Parameters
    ----------
    rows
        Metrics by step, as logged.
    path
        Path of the image file.
    title
        Title of the plot.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no plot was drawn, because matplotlib is not installed: pip install matplotlib")
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
    """Plot one metric over the steps, for training and validation."""
    for key, label in ((name, "training"), (f"validation_{name}", "validation")):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            # A line through few points is hard to see without markers, and a single point is invisible.
            marker = "o" if len(points) < _N_MARKED else ""
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2, markersize=4)
    if len(axes.get_lines()) > 1:
        axes.legend(frameon=False)
    axes.set_title(_TITLES[name], fontsize=10, loc="left")
    axes.yaxis.set_major_formatter(lambda value, _: text_of(name, value))
    if axes.dataLim.y0 >= 0:  # a loss may be negative
        axes.set_ylim(bottom=0)
    if name == "wait_share":
        axes.set_ylim(top=1)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_subplotspec().is_last_row():
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")

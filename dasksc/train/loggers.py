"""Loggers of the metrics of a training run."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dasksc import InputError
from dasksc.train.config import Config

__all__ = ["CSVLog", "Log", "check_loggers", "make_logs"]

# Modules that loggers import from additional packages.
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}

# Metrics that are printed in percent.
_SHARES = ("accuracy", "wait_share")


class Log(Protocol):
    """Logger of metrics."""

    def write(self, figures: Mapping[str, Any]) -> None:
        """Log metrics, which include ``step`` and ``epoch``."""

    def close(self) -> None:
        """Close the logger."""


class _Lines:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def write(self, figures: Mapping[str, Any]) -> None:
        self._say(metrics_line(figures))

    def close(self) -> None:
        pass


def metrics_line(figures: Mapping[str, Any]) -> str:
    """Format metrics as a readable line, which begins with ``training`` or ``validation``."""
    prefix = "validation_"
    kind = "validation" if any(name.startswith(prefix) for name in figures) else "training"
    metrics = (f"{name.removeprefix(prefix)} {text_of(name, value)}" for name, value in figures.items())
    return "  ".join([f"{kind:<10}", *metrics])


def text_of(name: str, value: Any) -> str:
    """Format the value of a metric as readable text."""
    if value is None:
        return "-"
    if name.removeprefix("validation_") in _SHARES:
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


class CSVLog:
    """CSV file of metrics with one row per call; a new metric adds a column.

    Parameters
    ----------
    path
        Path of the file.
    resumed_at
        Keep the rows up to this step; None starts a new file.
    """

    def __init__(self, path: Path, *, resumed_at: int | None = None) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if resumed_at is not None and path.exists():
            with open(path, newline="") as file:
                rows = [{name: _number_of(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
            self.rows = [row for row in rows if row["step"] <= resumed_at]
        self._names = list(dict.fromkeys(name for row in self.rows for name in row))
        self._rewrite()

    def write(self, figures: Mapping[str, Any]) -> None:
        """Append a row."""
        self.rows.append(dict(figures))
        if new := [name for name in figures if name not in self._names]:
            self._names += new
            self._rewrite()
        else:
            with open(self._path, "a", newline="") as file:
                csv.DictWriter(file, self._names).writerow(self.rows[-1])

    def _rewrite(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(self._path.name + ".partial")
        with open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(self.rows)
        partial.rename(self._path)

    def close(self) -> None:
        """Do nothing: the file is not kept open between rows."""


def _number_of(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)  # also inf, the norm of a gradient that overflows float16


def check_loggers(names: Iterable[str]) -> None:
    """Raise an error if the package of a logger cannot be imported.

    Only rank 0 has loggers, but every rank must call this function, so that all ranks raise the error.

    Parameters
    ----------
    names
        Names of the loggers in the configuration.

    Raises
    ------
    InputError
        If a required package is not installed.
    """
    for name in names:
        if name in _MODULES:
            _module_of(name)


def _module_of(name: str) -> Any:
    try:
        return import_module(_MODULES[name])
    except ImportError as error:
        raise InputError(f"training.logger={name} needs the package {name}: pip install {name} ({error})") from error


class _Tensorboard:
    def __init__(self, folder: Path) -> None:
        self._writer: Any = _module_of("tensorboard").SummaryWriter(str(folder))

    def write(self, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if name != "step":
                self._writer.add_scalar(name, value, figures["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, config: Config) -> None:
        self._run: Any = _module_of("wandb").init(project=config.training.wandb_project, config=config.written())

    def write(self, figures: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in figures.items() if name != "step"}, step=figures["step"])

    def close(self) -> None:
        self._run.finish()


def make_logs(config: Config, *, say: Callable[[str], None]) -> list[Log]:
    """Create the loggers that a configuration names, except the CSV file, which every run writes.

    Parameters
    ----------
    config
        Configuration of the training run.
    say
        Function that prints a line.

    Raises
    ------
    InputError
        If a required package is not installed.
    """
    kinds: dict[str, Callable[[], Log]] = {
        "stdout": lambda: _Lines(say),
        "tensorboard": lambda: _Tensorboard(Path(config.training.checkpoint_dir) / "tensorboard"),
        "wandb": lambda: _Wandb(config),
    }
    return [kinds[name]() for name in config.training.loggers if name in kinds]

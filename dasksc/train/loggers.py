"""Where the figures of a training go while it runs."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dasksc import InputError
from dasksc.train.config import Config

__all__ = ["CSVLog", "Log", "check_loggers", "make_logs"]

# What the loggers that need a package import of it.
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}

# Figures that are told in percent, in bytes, and in whole numbers.
_SHARES = ("accuracy", "wait_share")


class Log(Protocol):
    """What is told the figures of some steps."""

    def write(self, figures: Mapping[str, Any]) -> None:
        """Note the figures, among them ``step`` and ``epoch``."""

    def close(self) -> None:
        """Note no more."""


class _Lines:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def write(self, figures: Mapping[str, Any]) -> None:
        self._say(line_of(figures))

    def close(self) -> None:
        pass


def line_of(figures: Mapping[str, Any]) -> str:
    """Return figures as one line to read."""
    return "  ".join(f"{name} {text_of(name, value)}" for name, value in figures.items())


def text_of(name: str, value: Any) -> str:
    """Return a figure as a text to read."""
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
    """A CSV file, a line for each call; a new figure widens the table.

    Parameters
    ----------
    path
        Of the file.
    resumed_at
        Keep the lines of steps up to here; None: begin anew.
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
        """Append a line."""
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
        """Nothing is open between lines."""


def _number_of(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)  # inf too: the norm of a gradient that float16 does not hold


def check_loggers(names: Iterable[str]) -> None:
    """Refuse loggers whose packages cannot be imported. Rank 0 alone has loggers, but all ranks are to end together.

    Parameters
    ----------
    names
        Of the configuration.

    Raises
    ------
    InputError
        If one needs a package that is not there.
    """
    for name in names:
        if name in _MODULES:
            _module_of(name)


def _module_of(name: str) -> Any:
    try:
        return import_module(_MODULES[name])
    except ImportError as error:
        raise InputError(f"training.logger={name} needs it: pip install {name} ({error})") from error


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
    """Make the loggers that a configuration names; the CSV file is written by every run.

    Parameters
    ----------
    config
        Of the training.
    say
        Prints a line.

    Raises
    ------
    InputError
        If one needs a package that is not there.
    """
    kinds: dict[str, Callable[[], Log]] = {
        "stdout": lambda: _Lines(say),
        "tensorboard": lambda: _Tensorboard(Path(config.training.checkpoint_dir) / "tensorboard"),
        "wandb": lambda: _Wandb(config),
    }
    return [kinds[name]() for name in config.training.loggers if name in kinds]

"""Metrics of a training run: means over all ranks, throughput, and their loggers."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dasksc import InputError, scDataset
from dasksc.output.work_folder import atomic_path
from dasksc.train.parallel import Ranks

Row = Mapping[str, Any]


class Means:
    """Weighted means of metrics, accumulated on the device and reduced over ranks on request."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._names: list[str] = []
        self._sums: Tensor | None = None

    def add(self, outputs: dict[str, Tensor], n_rows: int) -> None:
        """Add means over ``outputs["n"]`` items (`n_rows` if there is no ``n``) without synchronizing the device."""
        n = outputs.get("n", n_rows)
        self._names = sorted(outputs.keys() - {"n"})
        values = [outputs[name].detach().double() * n for name in self._names]
        sums = torch.stack([*values, torch.ones_like(values[0]) * n, torch.full_like(values[0], n_rows)])
        self._sums = sums if self._sums is None else self._sums + sums

    def reduced(self) -> tuple[dict[str, float], int]:
        """Reset the means, and return those of all ranks (none if nothing was counted) and the number of rows."""
        if self._sums is None:
            return {}, 0
        *totals, n, n_rows = self._ranks.reduced(self._sums).tolist()
        self._sums = None
        return {name: total / n for name, total in zip(self._names, totals, strict=True)} if n else {}, int(n_rows)


class Pace:
    """Time of training steps, without validation and checkpoints, and time that a rank waits for batches."""

    def __init__(self, ranks: Ranks, dataset: scDataset) -> None:
        self._ranks = ranks
        self._dataset = dataset
        self.since = perf_counter()
        self.waited_s = self.total_s = self.total_wait_s = 0.0  # waited in the current epoch, until the last call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose time does not count."""
        start = perf_counter()
        yield
        self.since += perf_counter() - start

    def reduced(self, n_rows: int) -> dict[str, float]:
        """Return throughput of all ranks, and waiting of the slowest, since the last call of all ranks."""
        elapsed, device, waited_s = perf_counter() - self.since, self._ranks.device, self._dataset.stats()["wait_s"]
        wait_s = waited_s - self.waited_s
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        values = torch.tensor([elapsed, wait_s, wait_s / max(elapsed, 1e-9), memory], dtype=torch.float64)
        elapsed, waited, share, memory = self._ranks.reduced(values.to(device), dist.ReduceOp.MAX).tolist()
        self.since, self.waited_s = perf_counter(), waited_s
        self.total_s += elapsed
        self.total_wait_s += waited
        found = {"cells_per_s": n_rows / max(elapsed, 1e-9), "wait_share": share}
        return found | ({"gpu_memory_bytes": memory} if memory else {})


def _text(name: str, value: Any) -> str:
    if name.removeprefix("validation_") in ("accuracy", "wait_share"):
        return f"{value:.1%}"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


class Table:
    """``metrics.csv`` with one row per call. A new metric adds a column, and a resumed run drops later rows."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        self._path = path
        self._rows: list[Row] = []
        if resumed_at and path.exists():
            with open(path, newline="") as file:
                self._rows = [row for row in csv.DictReader(file) if int(row["step"]) <= resumed_at]
        self._names = list(self._rows[0]) if self._rows else []
        self._rewrite()

    def __call__(self, row: Row) -> None:
        """Append a row."""
        self._rows.append(row)
        if new := [name for name in row if name not in self._names]:
            self._names += new
            self._rewrite()
        else:
            with open(self._path, "a", newline="") as file:
                csv.DictWriter(file, self._names).writerow(row)

    def _rewrite(self) -> None:
        with atomic_path(self._path) as partial, open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(self._rows)


def imported(logger: str) -> Any:
    """Return the module of a logger."""
    try:
        return import_module("torch.utils.tensorboard" if logger == "tensorboard" else logger)
    except ImportError as error:
        raise InputError(f"training.logger={logger} needs the package {logger}: pip install {logger}") from error


def loggers_of(config: Any, say: Callable[[str], None], closing: ExitStack) -> Iterator[Callable[[Row], Any]]:
    """Yield a function for each logger of a configuration, except the CSV file, which every run writes."""
    names = config.training.loggers
    if "stdout" in names:
        yield lambda row: say(_line(row))
    if "tensorboard" in names:
        writer = imported("tensorboard").SummaryWriter(str(Path(config.training.checkpoint_dir) / "tensorboard"))
        closing.callback(writer.close)
        yield lambda row: [writer.add_scalar(name, value, row["step"]) for name, value in row.items()]
    if "wandb" in names:
        run = imported("wandb").init(config=config.to_dict())  # the variable WANDB_PROJECT names the project
        closing.callback(run.finish)
        yield lambda row: run.log(dict(row), step=row["step"])


def _line(row: Row) -> str:
    """Return metrics as a readable line, which begins with ``training`` or ``validation``."""
    prefix = "validation_"
    kind = "validation" if any(name.startswith(prefix) for name in row) else "training"
    return "  ".join([f"{kind:<10}", *(f"{key.removeprefix(prefix)} {_text(key, row[key])}" for key in row)])

"""Metrics of a training run: means over all ranks, throughput, and the share of time spent waiting for data."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dasksc.train.parallel import RankContext

__all__ = ["Means", "Pace"]

T = TypeVar("T")


class Means:
    """Weighted means of metrics, accumulated on the device and reduced over ranks on request.

    Parameters
    ----------
    context
        Rank and device of this process.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._names: list[str] = []
        self._sums: Tensor | None = None

    def add(self, outputs: dict[str, Tensor], n_rows: int) -> None:
        """Add means over ``outputs["n"]`` items (`n_rows` if there is no ``n``) without synchronizing the device."""
        n = outputs.get("n", n_rows)
        self._names = sorted(outputs.keys() - {"n"})
        values = [outputs[name].detach().double() * n for name in self._names]
        counts = [torch.ones_like(values[0]) * n, torch.full_like(values[0], n_rows)]
        sums = torch.stack([*values, *counts])
        self._sums = sums if self._sums is None else self._sums + sums

    def reduce_and_reset(self) -> tuple[dict[str, float], int]:
        """Return the means and the number of rows over all ranks, and reset them. All ranks must call this method.

        The means are empty if nothing was counted.
        """
        if self._sums is None:
            return {}, 0
        *totals, n, n_rows = self._context.reduced(self._sums).tolist()
        self._sums = None
        means = {name: total / n for name, total in zip(self._names, totals, strict=True)} if n else {}
        return means, int(n_rows)


class Pace:
    """Duration of steps, and the time that a rank waits for batches.

    Parameters
    ----------
    context
        Rank and device of this process.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._since = perf_counter()
        self._wait_s = 0.0
        self.total_s = 0.0
        self.total_wait_s = 0.0

    def timed(self, batches: Iterable[T]) -> Generator[T, None, None]:
        """Yield the given batches, and measure the time spent waiting for them."""
        iterator = iter(batches)
        while True:
            wait_start = perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._wait_s += perf_counter() - wait_start
            yield batch

    def pause(self) -> float:
        """Pause the clock (for validation and checkpoints), and return the current time for `resume`."""
        return perf_counter()

    def resume(self, paused: float) -> None:
        """Resume the clock, excluding the time since `paused`."""
        self._since += perf_counter() - paused

    def reduce_and_reset(self, n_rows: int) -> dict[str, float]:
        """Return the metrics since the last call. All ranks must call this method.

        `n_rows` is the number of rows of all ranks together.

        Returns
        -------
        dict
            ``cells_per_s`` over all ranks; ``wait_share`` of the rank that waited longest; ``gpu_memory_bytes``, the
            maximum that torch allocated. Waiting is measured on the CPU, so it may include time in which the GPU still
            computes.
        """
        now = perf_counter()
        elapsed, waited = now - self._since, self._wait_s
        self._since, self._wait_s = now, 0.0
        device = self._context.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        values = torch.tensor([elapsed, waited, waited / max(elapsed, 1e-9), memory], dtype=torch.float64)
        elapsed, waited, share, memory = self._context.reduced(values.to(device), dist.ReduceOp.MAX).tolist()
        self.total_s += elapsed
        self.total_wait_s += waited
        figures = {"cells_per_s": n_rows / max(elapsed, 1e-9), "wait_share": share}
        return figures | ({"gpu_memory_bytes": memory} if memory else {})

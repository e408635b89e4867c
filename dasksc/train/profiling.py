"""Profiling of a window of steps with the torch profiler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dasksc.train.config import Profile
from dasksc.train.parallel import RankContext

__all__ = ["profiling"]

logger = logging.getLogger("dasksc.train.loop")


@contextlib.contextmanager
def profiling(
    window: Profile | None, folder: Path, context: RankContext, step: Callable[[], int]
) -> Iterator[torch.profiler.profile | None]:
    """Record the steps of a window, and write a trace file per rank.

    Parameters
    ----------
    window
        Window of steps; None records nothing.
    folder
        Directory of the trace files, created when the first of them is written.
    context
        Rank and device of this process.
    step
        Function that returns the number of steps taken so far.

    Yields
    ------
    torch.profiler.profile or None
        Profiler, whose ``step`` must be called after each step.
    """
    if window is None:
        yield None
        return
    before = step()
    n_skipped = window.wait + window.warmup

    def export(profiler: torch.profiler.profile) -> None:
        if step() - before > n_skipped:  # otherwise the run ended before a step of the window was recorded
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank-{context.rank}.json"))

    activities = [torch.profiler.ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=window.wait, warmup=window.warmup, active=window.active, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=export) as profiler:
        yield profiler
    n_steps = step() - before
    if n_steps < n_skipped + window.active and context.rank == 0:
        logger.warning(
            "training.profile needs %d steps (wait %d + warmup %d + active %d), and this run had %d: %d of the %d "
            "active steps were recorded. Train for more steps, or lower training.profile.wait",
            *(n_skipped + window.active, window.wait, window.warmup, window.active, n_steps),
            *(max(0, n_steps - n_skipped), window.active),
        )

"""Execution of tasks that each write a file, on any Dask scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dasksc.errors import DaskscError, FetchError
from dasksc.executor.schedulers import FetchScheduler, default_threads
from dasksc.executor.window import Window

__all__ = ["TaskRunner", "Tasks"]


class Tasks(Protocol):
    """Protocol of a set of tasks, numbered from 0. Instances can be pickled."""

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""

    def is_done(self, k: int) -> bool:
        """Return True if the output of task `k` exists, so that the task need not run."""

    def __call__(self, k: int) -> Any:
        """Run task `k`."""


class TaskRunner:
    """Runner that executes a few tasks at a time and reports progress.

    Parameters
    ----------
    scheduler
        Scheduler that runs the tasks.
    advance
        Callback for progress, called with a number of finished cells and the name of the current step.
    """

    def __init__(self, scheduler: FetchScheduler, advance: Callable[[float, str], None]) -> None:
        self._scheduler = scheduler
        self._advance = advance
        self.n_threads = default_threads() if self._scheduler.kind == "threads" else self._scheduler.n_threads or 1

    def run(self, tasks: Tasks, *, what: str, n_cells: int) -> None:
        """Run the tasks that are not done.

        Parameters
        ----------
        tasks
            Tasks to run.
        what
            Name of the step, such as ``"writing X"``, for the progress bar, task keys and error messages.
        n_cells
            Number of cells by which all tasks together advance the progress bar.
        """
        share = n_cells / max(1, tasks.n_tasks)
        remaining = [k for k in range(tasks.n_tasks) if not tasks.is_done(k)]
        self._advance(n_cells - share * len(remaining), what)
        if not remaining:
            return
        window = Window(
            tasks,
            remaining,
            name=f"dasksc-convert-{what.replace(' ', '-')}",
            depth=2 * self.n_threads,
            scheduler=self._scheduler,
            describe=lambda k: f"{what}, part {k} of {tasks.n_tasks},",
        )
        try:
            with window:
                for _ in window:
                    self._advance(share, what)
        except FetchError as error:
            # The messages of these errors suffice, so a FetchError would only hide them.
            if isinstance(error.__cause__, DaskscError | OSError):
                raise error.__cause__ from error
            raise

    def skip(self, n_cells: int, *, what: str) -> None:
        """Report all cells of a step as finished, since the step need not run."""
        self._advance(n_cells, what)

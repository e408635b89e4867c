"""Tasks of which each leaves a file, run on any Dask scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from dasksc.errors import DaskscError, FetchError, InputError
from dasksc.executor.schedulers import Scheduler, default_threads
from dasksc.executor.window import Window

__all__ = ["Runner", "Tasks", "check_progress", "progress_bar"]


class Tasks(Protocol):
    """Tasks numbered from 0. Pickles."""

    @property
    def n_tasks(self) -> int:
        """How many there are."""

    def is_done(self, k: int) -> bool:
        """Whether task `k` need not be run: what it would leave is there."""

    def __call__(self, k: int) -> Any:
        """Run task `k`."""


class Runner:
    """Runs tasks, a few at a time, and shows how far they are.

    Parameters
    ----------
    scheduler
        What runs them.
    advance
        Told how many cells are done.
    """

    def __init__(self, scheduler: Scheduler, advance: Callable[[float, str], None]) -> None:
        self._scheduler = scheduler
        self._advance = advance
        self.n_threads = default_threads() if self._scheduler.kind == "threads" else self._scheduler.n_threads or 1

    def run(self, tasks: Tasks, *, what: str, n_cells: int) -> None:
        """Run those tasks that are not done.

        Parameters
        ----------
        tasks
            What to run; together they stand for `n_cells` cells.
        what
            What it is, for the progress bar, the keys of the tasks and errors: ``"writing X"``.
        n_cells
            How many cells they are.
        """
        share = n_cells / max(1, tasks.n_tasks)
        left = [k for k in range(tasks.n_tasks) if not tasks.is_done(k)]
        self._advance(n_cells - share * len(left), what)
        if not left:
            return
        window = Window(
            tasks,
            left,
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
            # What says by itself what went wrong needs no other words.
            if isinstance(error.__cause__, DaskscError | OSError):
                raise error.__cause__ from error
            raise

    def skip(self, n_cells: int, *, what: str) -> None:
        """Count what need not be run."""
        self._advance(n_cells, what)


def check_progress() -> None:
    """Refuse to show progress where there is nothing to show it with.

    Raises
    ------
    InputError
        If tqdm is not installed.
    """
    try:
        import tqdm.auto  # noqa: F401
    except ImportError as error:
        raise InputError("progress=True needs tqdm: pip install tqdm") from error


@contextmanager
def progress_bar(*, total: int, shown: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a bar with the time left; yield what is told of cells that are done, and of what is being done."""
    if not shown:
        yield lambda n, what: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="cell", unit_scale=True) as bar:

        def advance(n: float, what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(n)

        yield advance

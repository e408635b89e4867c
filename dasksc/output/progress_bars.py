"""Progress bars for work that writes files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dasksc.errors import InputError


@contextmanager
def progress_bar(*, total: int, shown: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar; yield a callback that takes a number of finished cells and the name of the step."""
    if not shown:
        yield lambda n, what: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise InputError("progress=True needs tqdm: pip install tqdm") from error

    with tqdm(total=total, unit="cell", unit_scale=True) as bar:

        def advance(n: float, what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(n)

        yield advance

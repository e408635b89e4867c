"""Examples in docstrings and pages, run by doctest in a folder with the files of `dasksc demo-data`."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dasksc


def public_things(module_name: str) -> dict[str, Any]:
    """Return the public functions and classes of a module, except exceptions, by name."""
    module = importlib.import_module(module_name)
    things = {name: getattr(module, name) for name in module.__all__}
    return {
        name: thing
        for name, thing in things.items()
        if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, Exception))
    }


def has_example(text: str | None) -> bool:
    """Return True if a docstring ends with a section of examples that contains code."""
    _, heading, code = inspect.cleandoc(text or "").rpartition("Examples\n--------\n")
    return bool(heading) and ">>> " in code


def failures_of(code: str, name: str) -> str:
    """Run the examples of a docstring or page in the working directory; return the doctest reports of failures.

    ``dasksc`` is imported. ``...`` in an output stands for any text. Messages of exceptions are not compared.
    """
    test = doctest.DocTestParser().get_doctest(code, {"dasksc": dasksc}, name, None, 0)
    assert test.examples, name
    reports: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    runner.run(test, out=reports.append)
    return "".join(reports)


@contextlib.contextmanager
def demo_folder(demo: Path, folder: Path) -> Iterator[None]:
    """Make `folder` the working directory, with links to the files in `demo`."""
    shutil.copytree(demo, folder, copy_function=os.link)
    with contextlib.chdir(folder):
        yield

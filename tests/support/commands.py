"""Runs of the `dasksc` command in this process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dasksc import cli


@dataclass(frozen=True)
class Finished:
    exit_code: int
    stdout: str
    stderr: str


def ended(function: Callable[[list[str]], Any], arguments: list[str]) -> int:
    """Return the exit code of a function that returns it or exits."""
    try:
        return int(function(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def run_command(*arguments: Any, exit_code: int = 0) -> Finished:
    """Run a command line, which must end with an exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = ended(cli.main, [str(one) for one in arguments])
    assert code == exit_code, (arguments, code, out.getvalue(), err.getvalue())
    return Finished(code, out.getvalue(), err.getvalue())

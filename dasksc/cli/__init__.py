"""The `dasksc` command.

A command is a function of `dasksc.cli.commands`, whose docstring is its help. It adds options to a parser, and returns
the function to call with the parsed options, which alone imports heavy packages: mistakes are told at once. Exit codes:
0 success, 1 an error of the data or the run, 2 an invalid command line, 130 Ctrl-C.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence

import dasksc
from dasksc.cli import commands
from dasksc.options import Parser, nearest

__all__ = ["COMMANDS", "main", "prepared"]

COMMANDS = {
    "check": commands.check,
    "convert": commands.convert,
    "demo-data": commands.demo_data,
    "embed": commands.embed,
    "index": commands.index,
    "info": commands.info,
    "suggest": commands.suggest,
    "train": commands.train,
}
_OVERVIEW = """usage: dasksc COMMAND ...

Feed single-cell atlases on disk to PyTorch.

Commands:
{commands}

dasksc COMMAND --help shows the options of a command, and examples."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code. An error of dasksc is printed as one line."""
    name, *others = (sys.argv[1:] if args is None else args) or ["--help"]
    if name in COMMANDS:
        return _run(name, others)
    if name in ("-h", "--help"):
        summaries = (f"  {one:<10} {(inspect.getdoc(run) or '').splitlines()[0]}" for one, run in COMMANDS.items())
        print(_OVERVIEW.format(commands="\n".join(summaries)))
    elif name == "--version":
        print(f"dasksc, version {dasksc.__version__}")
    else:
        advice = nearest(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        print(f"dasksc: there is no command {name}{advice}", file=sys.stderr)
        return 2
    return 0


def prepared(name: str) -> tuple[Parser, commands.Run]:
    """Return the parser of a command, and the function to call with the parsed options."""
    parser = Parser(f"dasksc {name}", inspect.getdoc(COMMANDS[name]) or "")
    return parser, COMMANDS[name](parser)


def _run(name: str, args: Sequence[str]) -> int:
    parser, run = prepared(name)
    try:
        code = run(parser.parse_args(args))
        print(end="", flush=True)  # there may be no standard output
    except KeyboardInterrupt as error:
        print("\n".join(["dasksc: stopped by Ctrl-C.", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the program that reads the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 1
    except (dasksc.DaskscError, OSError) as error:  # such as a full disk
        print(f"dasksc: {error}", file=sys.stderr)
        return 1
    return code or 0

"""Parser of command lines and YAML files whose options are the parameters of public functions."""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, get_origin

import jsonargparse

from dasksc.options.signatures import NOT_LITERAL, REQUIRED, Parameter, parameters_of
from dasksc.options.values import kinds_of, metavar, nearest, parse

__all__ = ["Parser", "arguments_of"]


class Parser(jsonargparse.ArgumentParser):
    """Parser whose options are the parameters of public functions, and whose errors are one line.

    Parameters
    ----------
    prog
        Name of the command, such as ``dasksc info``.
    text
        Description, and examples after a line ``Examples:``.
    """

    def __init__(self, prog: str, text: str) -> None:
        description, examples, lines = text.partition("Examples:\n")
        super().__init__(
            prog=prog,
            description=description.rstrip(),
            epilog=examples + lines,
            formatter_class=_Formatter,
            allow_abbrev=False,
            print_config="--print-config",
        )
        self._file: str | None = None

    def add_options(self, name: str, *, prefix: str = "", skip: Collection[str] = (), title: str | None = None) -> None:
        """Add an option for each parameter of a public function or class that can be written as text.

        Parameters
        ----------
        name
            Public name, such as ``"open"`` or ``"BlockShuffling"``.
        prefix
            Section of the YAML file with a dot at its end, such as ``"data."``. Options of sections are spelled with
            underscores, and take ``true`` and ``false`` for flags; others are spelled with hyphens.
        skip
            Parameters without an option.
        title
            Heading of these options in the help. Default: that of all options.
        """
        place = self.add_argument_group(title) if title else self
        for one in parameters_of(name):
            if one.name not in skip:
                flag = _spelled(f"--{prefix}{one.name}")
                singular = [flag.removesuffix("s")] if _is_mapping(one) and flag.endswith("s") else []
                place.add_argument(flag, *singular, **_settings(one, is_flag=not prefix))

    def parse_args(self, args: Sequence[str]) -> jsonargparse.Namespace:  # type: ignore[override]
        """Parse a command line; underscores and hyphens in the names of options are the same."""
        parsed: jsonargparse.Namespace = super().parse_args(list(map(_spelled, args)))
        return parsed

    def parse_path(self, path: str | os.PathLike[str], *others: Any, **named: Any) -> jsonargparse.Namespace:
        """Parse a YAML file; errors name it."""
        self._file = os.fspath(path)
        parsed: jsonargparse.Namespace = super().parse_path(path, *others, **named)
        self._file = None
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error in one line, and exit with code 2."""
        known = [flag for action in self._actions for flag in action.option_strings]
        message = re.sub(r'^(?:argument |Parser key "?)([^\s":]+)"?:', r"\1:", message)
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            message = f"no option {found[1]}{nearest(found[1], known)}"
        elif found := re.match(r"Option '(.+)' is not accepted", message):
            message = f"no option {found[1]}{nearest(found[1], [flag.lstrip('-') for flag in known])}"
        place = "" if self._file is None else f"{self._file}: "
        self.exit(2, f"{self.prog}: {place}{message}\nAll options: {self.prog} --help\n")


def arguments_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed options that are parameters of a public function or class."""
    return {one.name: options[one.name] for one in parameters_of(name) if one.name in options}


def _spelled(argument: str) -> str:
    """Return an option with underscores if it is in a section, otherwise with hyphens."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--"):
        return argument
    name = name[2:].replace("-", "_") if "." in name else name[2:].replace("_", "-")
    return f"--{name}{equals}{value}"


def _is_mapping(one: Parameter) -> bool:
    return all(get_origin(kind) is dict for kind in kinds_of(one.type))


def _settings(one: Parameter, *, is_flag: bool) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a parameter."""
    text = one.help.replace("%", "%%")
    if one.default is REQUIRED:
        return {
            "type": functools.partial(parse, one.type),
            "required": True,
            "help": text,
            "metavar": metavar(one.type),
        }
    default = list(one.default) if isinstance(one.default, tuple) else one.default
    if default is NOT_LITERAL:
        default = argparse.SUPPRESS
    elif default not in (None, False, []):
        text += f" [default: {str(default).lower() if default is True else default}]"
    if one.type is bool and is_flag:
        return {
            "action": argparse.BooleanOptionalAction if default is True else "store_true",
            "default": default,
            "help": text,
        }
    return {
        "type": functools.partial(parse, one.type),
        "default": default,
        "help": text,
        "metavar": metavar(one.type),
        "action": _Pairs if _is_mapping(one) else "store",
    }


class _Pairs(argparse.Action):
    """Option that is given once for each pair ``KEY=VALUE``, or once with a mapping in YAML."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace[self.dest] = {**(namespace.get(self.dest) or {}), **(values or {})}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help without the types that jsonargparse adds."""

"""Parser of command lines and YAML files whose options are parameters of functions and classes."""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import jsonargparse

from dasksc.options.signatures import NOT_LITERAL, REQUIRED, Parameter, parameters_of
from dasksc.options.values import kinds_of, metavar, nearest, parse

__all__ = ["Parser", "arguments_of"]


class Parser(jsonargparse.ArgumentParser):
    """Parser with options from signatures, and one-line errors. Its text may end with examples."""

    _file: str | None = None

    def __init__(self, prog: str, text: str) -> None:
        description, examples, lines = text.partition("For example:\n")
        super().__init__(prog=prog, description=description, epilog=examples + lines, formatter_class=_Formatter)
        self.allow_abbrev = False

    def add_options(
        self, name: str, *, prefix: str = "", skip: Collection[str] = (), title: str | None = None, **defaults: Any
    ) -> None:
        """Add options for the parameters of a function or class, named as for `parameters_of`.

        `prefix` is a section of the YAML file, such as ``"data."``, where flags take ``true`` and ``false``. `title` is
        a heading in the help, and `defaults` replace those of the signature.
        """
        place = self.add_argument_group(title) if title else self
        for one in parameters_of(name):
            if one.name not in skip:
                _add(place, one._replace(default=defaults.get(one.name, one.default)), prefix)

    def parse_args(self, args: Sequence[str]) -> Any:  # type: ignore[override]
        """Parse a command line; hyphens and underscores in the names of options are the same."""
        return super().parse_args(list(map(_spelled, args)))

    def parse_path(self, path: str | os.PathLike[str], *others: Any, **named: Any) -> Any:
        """Parse a YAML file; errors name it."""
        self._file = os.fspath(path)
        try:
            return super().parse_path(path, *others, **named)
        except UnicodeDecodeError as error:
            self.error(f"Not a YAML file: {error}")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print an error, and exit with code 2."""
        known = [flag for action in self._actions for flag in action.option_strings]
        is_line = message.startswith(("argument ", "unrecognized ", "the following "))
        place = "" if self._file is None or is_line else f"{self._file}: "
        message = re.sub(r'^(?:argument |Parser key "?)([^\s":]+)"?:', r"\1:", message)
        if found := re.match(r"(?:unrecognized arguments: |Option ')([^\s']+)", message):
            named = known if found[1].startswith("-") else [flag.lstrip("-") for flag in known]
            message = f"{found[1]} is not expected{nearest(found[1], named)}"
        self.exit(2, f"{self.prog}: {place}{message}\nAll options: {self.prog} --help\n")


def arguments_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are parameters of a function or class, named as for `parameters_of`."""
    return {one.name: options[one.name] for one in parameters_of(name) if one.name in options}


def _add(place: Any, one: Parameter, prefix: str) -> None:
    default = list(one.default) if isinstance(one.default, tuple) else one.default
    settings: dict[str, Any] = {"default": default, "help": one.help.replace("%", "%%")}
    if default is REQUIRED:
        settings = {"required": True, "help": settings["help"]}
    elif default is NOT_LITERAL:
        settings["default"] = argparse.SUPPRESS
    elif default is not None and default is not False and default != []:
        settings["help"] += f" [default: {str(default).lower() if default is True else default}]"
    flag = _spelled(f"--{prefix}{one.name}")
    if one.type is bool and not prefix:
        settings["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
    else:
        settings |= {"type": functools.partial(parse, one.type), "metavar": metavar(one.type)}
        if set(kinds_of(one.type).values()) == {dict} and not prefix:
            settings |= {"action": _Pairs, "dest": one.name}
            flag = flag.removesuffix("s")
    place.add_argument(flag, **settings)


def _spelled(argument: str) -> str:
    """Return an option as it is declared: with underscores in a section of a file, otherwise with hyphens."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or name == "--print_config":
        return argument
    name = name[2:].replace("-", "_") if "." in name else name[2:].replace("_", "-")
    return f"--{name}{equals}{value}"


class _Pairs(argparse.Action):
    """Option that is given once for each pair ``KEY=VALUE``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace[self.dest] = {**(namespace.get(self.dest) or {}), **(values or {})}


class _Formatter(argparse.HelpFormatter):
    """Help with a short usage, examples on their own lines, and no types."""

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        required = [one for one in actions if one.required]
        return super()._format_usage(usage, required, [], prefix).rstrip() + " [options]\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("For example:"):
            return text
        fill = super()._fill_text
        return "\n\n".join(fill(one, width, indent) for one in text.split("\n\n"))

"""Options for command lines and YAML files, generated from the signatures of functions and classes.

Signatures are read from source files: importing `scDataset` imports torch, anndata and numba, which takes seconds, and
parsing its source takes milliseconds.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import glob
import inspect
import operator
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import jsonargparse
import yaml

import dasksc
from dasksc.errors import MissingPathError

REQUIRED = inspect.Parameter.empty
NOT_LITERAL = object()
"""Default that the source computes; leave out the argument to get it."""

_PLAIN = {"str": str, "int": int, "float": float, "bool": bool, "Any": Any}
_PLACEHOLDERS = {int: "INTEGER", float: "NUMBER", bool: "true|false", list: "A,B", dict: "KEY=VALUE", str: "TEXT"}
_FLAGS = {"true": True, "false": False}


class InvalidValue(argparse.ArgumentTypeError, ValueError):
    """Value that an option does not accept."""


def _kinds_of(type_: Any) -> dict[Any, Any]:
    """Return the members of a union without None, each with its kind: a plain type, Any, Literal, list or dict."""
    members = [type_] if get_origin(type_) in (None, Literal, list, dict) else get_args(type_)
    return {one: get_origin(one) or one for one in members if one is not NoneType}


def _metavar(type_: Any) -> str:
    """Return what a value looks like, such as ``N`` or ``inner|outer``."""
    return "|".join(
        "|".join(map(str, get_args(one))) if kind is Literal else _PLACEHOLDERS.get(kind, "VALUE")
        for one, kind in _kinds_of(type_).items()
    )


def check_path(path: str) -> None:
    """Raise an error for a local path that does not exist; patterns and URLs are left to `dasksc.open`."""
    if ":/" not in path and not glob.has_magic(path) and not os.path.exists(path):
        folder, name = os.path.split(path)
        names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise MissingPathError(f"there is nothing at {path}{nearest(name, names)}")


def nearest(given: str, names: Iterable[str]) -> str:
    """Return advice that gives the most similar names, or nothing if none is similar."""
    similar = difflib.get_close_matches(given, list(names), n=2)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def parse(type_: Any, value: Any) -> Any:
    """Return a value, or text in YAML, ``A,B`` or ``KEY=VALUE``, as a member of a type, or raise `InvalidValue`."""
    if NoneType in get_args(type_) and value in (None, "null"):
        return None
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InvalidValue(f"{value!r} is not valid YAML") from error
    kinds = _kinds_of(type_)
    is_plain = isinstance(value, str) and str in kinds  # then only text with a comma is a list, and none a mapping
    for one, kind in sorted(kinds.items(), key=lambda item: item[1] is str):
        if not (is_plain and (kind is dict or (kind is list and "," not in value))):
            try:
                return _as(one, kind, value)
            except (TypeError, ValueError, KeyError):
                continue
    expected = _metavar(type_)
    raise InvalidValue(f"expected {expected}; got {value!r}{nearest(str(value), expected.split('|'))}")


def _as(type_: Any, kind: Any, value: Any) -> Any:
    """Return a value as a type that is no union; raise TypeError, ValueError or KeyError if it is another."""
    is_text = isinstance(value, str)
    if kind is Any:
        return _FLAGS.get(value, value) if is_text else value
    if kind is bool:
        return _FLAGS[str(value).lower()]
    if kind is Literal:
        return {str(choice): choice for choice in get_args(type_)}[str(value)]
    if kind is list and isinstance(value, str | list | tuple):
        return [parse(get_args(type_)[0], one) for one in (value.split(",") if isinstance(value, str) else value)]
    if kind is dict:
        pairs = dict([value.split("=", 1)] if is_text else value)
        return {key: parse(get_args(type_)[1], one) for key, one in pairs.items()}
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or (kind is int and isinstance(value, float))
    ):
        raise TypeError
    return kind(value)


class Parameter(NamedTuple):
    """Parameter that can be written as text: its type is a union of plain types, None, Any, Literal, list and dict."""

    name: str
    type: Any
    default: Any
    help: str


@functools.cache
def parameters_of(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of ``dasksc.name`` or ``module:name`` that can be written as text."""
    module, _, name = name.rpartition(":")
    definition, module = _find(module or dasksc._MODULE_OF[name], name)
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef), name
    descriptions = _descriptions(ast.get_docstring(definition) or "")
    for one, text in descriptions.items():
        if referred := re.search(r"as for dasksc\.(\w+)$", text):
            descriptions[one] = next((other.help for other in parameters_of(referred[1]) if other.name == one), text)
    return tuple(
        Parameter(one, functools.reduce(operator.or_, types), _value(default, module), descriptions.get(one, ""))
        for one, annotation, default in _declared(definition)
        if (types := list(_types(annotation, module))) and types != [None]
    )


@functools.cache
def _definitions(module: str) -> dict[str, Any]:
    """Return the node that defines each name of a module; for an imported name, its module and its name there."""
    package, *parts = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*parts)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node.value
            case ast.ImportFrom(module=str(source), names=names) if source.startswith("dasksc."):
                found |= {alias.asname or alias.name: (source, alias.name) for alias in names}
    return found


def _find(module: str, name: str) -> tuple[ast.AST | None, str]:
    """Return the node that defines a name, if it is part of dasksc, and the module that defines it."""
    found = _definitions(module).get(name)
    return _find(*found) if isinstance(found, tuple) else (found, module)


def _declared(node: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Yield name, annotation and default of each parameter of a function, an ``__init__`` or a dataclass."""
    if isinstance(node, ast.ClassDef):
        init = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        fields = [] if init else [one for one in node.body if isinstance(one, ast.AnnAssign)]
        yield from ((one.target.id, one.annotation, one.value) for one in fields if isinstance(one.target, ast.Name))
        node = init[0] if init else node
    if isinstance(node, ast.FunctionDef):
        given = node.args
        defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults + given.kw_defaults
        for one, default in zip(given.args + given.kwonlyargs, defaults, strict=True):
            yield one.arg, one.annotation, default


def _value(node: ast.AST | None, module: str) -> Any:
    match node:
        case None:
            return REQUIRED
        case ast.Call(func=ast.Name(id="field"), keywords=[ast.keyword(arg="default", value=value)]):
            return _value(value, module)
        case ast.Name(id=name):
            definition, module = _find(module, name)
            return NOT_LITERAL if definition is None else _value(definition, module)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NOT_LITERAL


def _types(node: ast.AST | None, module: str) -> Iterator[Any]:
    """Yield the members of an annotation that can be written as text."""
    match node:
        case ast.Constant(value=None):
            yield None
        case ast.BinOp(left=left, right=right):
            yield from _types(left, module)
            yield from _types(right, module)
        case ast.Name(id=name):
            yield from [_PLAIN[name]] if name in _PLAIN else _types(*_find(module, name))
        case ast.Subscript(value=ast.Attribute(attr="PathLike")):
            yield str
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            yield Literal[ast.literal_eval(choices)]
        case (
            ast.Subscript(value=ast.Name(id="Sequence" | "list"), slice=item)
            | ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, *_]))
        ):
            if inner := list(_types(item, module)):
                yield list[functools.reduce(operator.or_, inner)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="Mapping" | "dict"), slice=ast.Tuple(elts=[_, item])):
            if inner := list(_types(item, module)):
                yield dict[str, functools.reduce(operator.or_, inner)]  # type: ignore[misc]


def _descriptions(docstring: str) -> dict[str, str]:
    """Return the first clause of the description of each parameter, without markup."""
    section = re.split(r"\n\n\S+\n---", docstring.partition("\nParameters\n----------\n")[2])[0]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^(\S.*)\n((?: .*\n?|\n)*)", section, re.MULTILINE):
        clause = re.match(r"(?:If True, )?((?:``.*?``|[.:;](?=\S)|[^.:;])*)", " ".join(text.split()))
        plain = clause[1].replace("`", "") if clause else ""
        found |= dict.fromkeys(names.split(", "), plain[:1].upper() + plain[1:])
    return found


class Parser(jsonargparse.ArgumentParser):
    """Parser with options from signatures, and one-line errors. Its text may end with examples."""

    _file: str | None = None

    def __init__(self, prog: str, text: str) -> None:
        description, examples, lines = text.partition("For example:\n")
        super().__init__(prog=prog, description=description, epilog=examples + lines, formatter_class=_Formatter)
        self.allow_abbrev = False

    def add_options(
        self,
        name: str,
        *others: Parameter,
        prefix: str = "",
        skip: Collection[str] = (),
        title: str | None = None,
        **defaults: Any,
    ) -> None:
        """Add options for `others` and the parameters of a function or class; with a `prefix`, to a section of YAML."""
        place = self.add_argument_group(title) if title else self
        for one in (*others, *(one for one in parameters_of(name) if one.name not in skip)):
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
            is_config = "--config" in known and found[1].endswith((".yaml", ".yml"))
            advice = f"; give it as --config {found[1]}" if is_config else nearest(found[1], named)
            message = f"{found[1]} is not expected{advice}"
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
        settings |= {"type": functools.partial(parse, one.type), "metavar": _metavar(one.type)}
        if set(_kinds_of(one.type).values()) == {dict} and not prefix:
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


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help with a short usage, examples on their own lines, and no types."""

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        required = [one for one in actions if one.required]
        return super()._format_usage(usage, required, [], prefix).rstrip() + " [options]\n\n"

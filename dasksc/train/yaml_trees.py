"""Parsing, copying and modification of YAML trees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dasksc import InputError, MissingPathError

__all__ = ["changed", "copied", "read_file", "read_yaml", "set_value"]


class _NumericYamlLoader(yaml.SafeLoader):
    """YAML loader that parses numbers such as 1e-4, which YAML 1.1 treats as text."""


_NumericYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """Parse YAML with a safe loader."""
    return yaml.load(text, Loader=_NumericYamlLoader)  # a subclass of SafeLoader


def read_file(path: str | Path) -> Any:
    """Read a YAML file.

    Raises
    ------
    MissingPathError
        If there is no such file.
    InputError
        If it is not YAML.
    """
    try:
        return read_yaml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingPathError(f"there is no configuration at {path}") from error
    except (OSError, UnicodeDecodeError, yaml.reader.ReaderError) as error:
        reason = f": {error.strerror}" if isinstance(error, OSError) else ""
        raise InputError(f"{path} is not a text file with a configuration{reason}. Give a YAML file") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {_problem_of(error)}") from error


def _problem_of(error: yaml.YAMLError) -> str:
    """Return the line and the problem of a YAML error, without the excerpts of the text."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    if "'\\t'" in problem:
        return f"line {mark.line + 1} is indented with a tab; use spaces"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def changed(raw: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a tree in which options of the form ``a.b=value`` are set."""
    tree: dict[str, Any] = copied(raw)
    for change in changes:
        set_value(tree, change)
    return tree


def copied(tree: Any) -> Any:
    """Copy nested mappings as dicts; leaf values are not copied."""
    return {key: copied(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def set_value(tree: dict[str, Any], change: str) -> None:
    """Set the value of an option of the form ``a.b=value`` in a tree."""
    name, equals, text = change.partition("=")
    *sections, last = name.split(".")
    if not equals or not last:
        raise InputError(f"--set {change} is not of the form section.key=value")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            below = tree[section] = _expanded(below, change)
        tree = below
    try:
        tree[last] = read_yaml(text) if text else None
    except yaml.YAMLError as error:
        raise InputError(f"--set {change}: {text!r} is not YAML; put text with special characters in quotes") from error


def _expanded(short: Any, change: str) -> dict[str, Any]:
    """Expand a shorthand value to the section that it represents."""
    if short is None or isinstance(short, bool):
        return {}
    if isinstance(short, str):
        return {"name": short}
    if isinstance(short, int | float):
        return {"share": short}
    raise InputError(f"--set {change}: {short!r} is a value, not a section with keys; set it as a whole")

"""Values of options: text of a command line, and values of a YAML file."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

__all__ = ["InvalidValue", "kinds_of", "metavar", "nearest", "parse"]

_PLACEHOLDERS = {
    int: "INTEGER",
    float: "NUMBER",
    bool: "true|false",
    list: "A,B",
    dict: "KEY=VALUE",
    str: "TEXT",
    Any: "VALUE",
}
_FLAGS = {"true": True, "false": False}


class InvalidValue(argparse.ArgumentTypeError, ValueError):
    """Value that an option does not accept."""


def kinds_of(type_: Any) -> dict[Any, Any]:
    """Return the members of a union without None, each with its kind: a plain type, Any, Literal, list or dict."""
    members = [type_] if get_origin(type_) in (None, Literal, list, dict) else get_args(type_)
    return {one: get_origin(one) or one for one in members if one is not NoneType}


def metavar(type_: Any) -> str:
    """Return what a value looks like, such as ``N`` or ``inner|outer``."""
    return "|".join(
        "|".join(map(str, get_args(one))) if kind is Literal else _PLACEHOLDERS[kind]
        for one, kind in kinds_of(type_).items()
    )


def nearest(given: str, names: Iterable[str]) -> str:
    """Return advice that gives the most similar names, or nothing if none is similar."""
    similar = difflib.get_close_matches(given, list(names), n=2)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def parse(type_: Any, value: Any) -> Any:
    """Return a value as a member of a type, or raise `InvalidValue`.

    Text that begins with ``[`` or ``{`` is YAML. Other text is split at commas for a list, and at ``=`` for a mapping,
    but if the type also allows text, only text with a comma is a list, and none is a mapping.
    """
    if NoneType in get_args(type_) and value in (None, "null"):
        return None
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InvalidValue(f"{value!r} is not valid YAML") from error
    kinds = kinds_of(type_)
    is_plain = isinstance(value, str) and str in kinds
    for one, kind in sorted(kinds.items(), key=lambda item: item[1] is str):
        if not (is_plain and (kind is dict or (kind is list and "," not in value))):
            try:
                return _as(one, kind, value)
            except (TypeError, ValueError, KeyError):
                continue
    expected = metavar(type_)
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

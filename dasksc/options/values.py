"""Values of options: the text of a command line, or the values of a YAML file, as values in Python."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

__all__ = ["InvalidValue", "kinds_of", "metavar", "nearest", "parse"]

# Kinds of values, as a placeholder in help and in error messages.
_NAMES: dict[Any, tuple[str, str]] = {
    list: ("A,B", "a list (a,b or [a, b])"),
    str: ("TEXT", "text"),
    dict: ("K=V", "a mapping (key=value)"),
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    bool: ("true|false", "true or false"),
    Any: ("VALUE", "a value"),
}


class InvalidValue(argparse.ArgumentTypeError, ValueError):
    """Value that an option does not accept."""


def kinds_of(type_: Any) -> list[Any]:
    """Return the members of a union without None, or the type itself as the only member."""
    is_union = get_origin(type_) not in (None, Literal, list, dict)
    return [one for one in (get_args(type_) if is_union else [type_]) if one is not NoneType]


def metavar(type_: Any) -> str:
    """Return a placeholder for a value, such as ``N`` or ``inner|outer``."""
    kinds = kinds_of(type_)
    if any(get_origin(one) is Literal for one in kinds):
        return "|".join(str(choice) for one in kinds for choice in get_args(one) or ("true", "false"))
    origins = [get_origin(one) or one for one in kinds]
    return next(text for kind, (text, _) in _NAMES.items() if kind in origins)


def nearest(given: str, names: Iterable[str]) -> str:
    """Return advice that gives the most similar name, or nothing if none is similar."""
    similar = difflib.get_close_matches(given, list(names), n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def parse(type_: Any, value: Any) -> Any:
    """Return a value as one of the members of a type.

    Text that begins with ``[`` or ``{`` is YAML, and ``null`` is None. Other text is split at commas for a list, and at
    ``=`` for a mapping. If the type also allows text, only text with a comma is a list, and none is a mapping.

    Raises
    ------
    InvalidValue
        If no member accepts the value.
    """
    kinds = kinds_of(type_)
    allows_none = type_ is not Any and NoneType in get_args(type_)
    if allows_none and value in (None, "null"):
        return None
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InvalidValue(f"{value!r} is not valid YAML") from error
    if isinstance(value, str) and str in kinds:
        kinds = [one for one in kinds if get_origin(one) is not dict and (get_origin(one) is not list or "," in value)]
    for kind in sorted(kinds, key=lambda kind: kind is str):
        try:
            return _as(kind, value)
        except (TypeError, ValueError, KeyError):
            continue
    choices = [str(choice) for one in kinds for choice in get_args(one) if get_origin(one) is Literal]
    names = [*choices, *(_NAMES[get_origin(one) or one][1] for one in kinds if get_origin(one) is not Literal)]
    raise InvalidValue(f"expected {' or '.join(names)}; got {value!r}{nearest(str(value), choices)}")


def _as(kind: Any, value: Any) -> Any:
    """Return a value as a type that is no union; raise TypeError, ValueError or KeyError if it is another."""
    is_text = isinstance(value, str)
    if kind is Any:
        return {"true": True, "false": False}.get(value, value) if is_text else value
    if kind is bool:
        return {"true": True, "false": False}[str(value).lower()]
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[str(value)]
    if get_origin(kind) is list:
        if not isinstance(value, str | list | tuple):
            raise TypeError
        return [parse(get_args(kind)[0], one) for one in (value.split(",") if isinstance(value, str) else value)]
    if get_origin(kind) is dict:
        pairs = dict([value.split("=", 1)] if is_text else value)
        return {key: parse(get_args(kind)[1], one) for key, one in pairs.items()}
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    if kind is int and isinstance(value, float):
        raise TypeError
    return kind(value)

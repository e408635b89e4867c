"""Messages about invalid configurations, in terms of their keys, with the nearest valid names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dasksc.atlas.lookup import nearest, similar

__all__ = ["problems_in"]

# Wording of numeric bounds, keyed by the error type of pydantic.
_LIMITS = {
    "greater_than_equal": "at least",
    "greater_than": "greater than",
    "less_than_equal": "at most",
    "less_than": "less than",
}


def problems_in(root: type[BaseModel], found: ValidationError) -> list[str]:
    """Return the problems that pydantic found, one message per key."""
    problems: dict[str, str] = {}
    for error in found.errors():
        where = _keys_of(root, error["loc"])
        # If a key has alternative types, each one reports an error; the first is informative enough.
        problems.setdefault(".".join(where), _problem(root, where, error))
    return list(problems.values())


def _keys_of(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the keys that lead to a problem, without the names that pydantic gives to alternatives."""
    where: list[str] = []
    model: type[BaseModel] | None = root
    for part in map(str, location):
        if model is None and (part in ("str", "int", "float", "bool") or "[" in part):
            continue
        where.append(part)
        model = None if model is None else _section_of(model, part)
    return where


def _problem(root: type[BaseModel], where: Sequence[str], error: Any) -> str:
    """Return the message for a problem, with the nearest valid name for an unknown key or choice."""
    name = ".".join(where)
    if error["type"] == "extra_forbidden":
        here = _keys_at(root, where[:-1])
        elsewhere = [] if similar(where[-1], here) else list(_places_of(where[-1], root))
        below = [place for place in elsewhere if place.startswith(".".join([*where[:-1], ""]))]
        if elsewhere:
            return f"{name} is not known; did you mean {' or '.join(map(repr, (below or elsewhere)[:3]))}?"
        return f"{name} is not known; {nearest(where[-1], here)}"
    if error["type"] == "missing":
        return f"{name} is missing"
    return f"{name}={error['input']!r}: {_expected(root, where, error)}"


def _expected(root: type[BaseModel], where: Sequence[str], error: Any) -> str:
    """Describe the value that a key expects, with an example in YAML."""
    given, kind, limits = error["input"], error["type"], error.get("ctx", {})
    key = "" if where[-1].isdecimal() else f"{where[-1]}: "  # an item of a list has no key
    if kind == "literal_error":
        expected = str(limits["expected"])
        choices = re.findall("'([^']*)'", expected)
        return nearest(given, choices) if isinstance(given, str) and choices else f"expected {expected.lower()}"
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind]} {next(iter(limits.values())):g}"
    if kind.startswith("int_"):
        return "give a whole number, such as 64"
    if kind.startswith("float_"):
        return "give a number, such as 0.1"
    if kind.startswith("bool_"):
        return "give true or false"
    if kind == "string_type":
        return f"give text in quotes: {key}'{given}'" if isinstance(given, int | float) else "give text"
    if kind == "list_type":
        return f"give a list, such as {key}[{given if isinstance(given, str) else 'a, b'}]"
    if kind in ("dict_type", "model_type"):
        section = _section_at(root, where)
        return f"give a section, such as {key}{{{'key' if section is None else next(iter(section.model_fields))}: ...}}"
    message: str = error["msg"]
    return message.removeprefix("Value error, ")


def _places_of(key: str, section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the places of a key in a section and the sections below it."""
    for name in section.model_fields:
        if name == key:
            yield f"{above}{name}"
        if (below := _section_of(section, name)) is not None:
            yield from _places_of(key, below, f"{above}{name}.")


def _keys_at(root: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Return the valid keys of a section."""
    section = _section_at(root, sections)
    assert section is not None
    return list(section.model_fields)


def _section_at(root: type[BaseModel], keys: Sequence[str]) -> type[BaseModel] | None:
    """Return the schema of the section that `keys` lead to, or None if they lead to a value."""
    section: type[BaseModel] | None = root
    for key in keys:
        section = None if section is None else _section_of(section, key)
    return section


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the schema of the section at a key, or None if the key is not a section."""
    if key not in model.model_fields:
        return None
    annotation = model.model_fields[key].annotation
    options = getattr(annotation, "__args__", (annotation,))
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)

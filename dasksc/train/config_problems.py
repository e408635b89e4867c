"""Messages about invalid configurations, in terms of their keys, with the nearest valid names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dasksc.atlas.lookup import nearest

__all__ = ["problems_in"]


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
        return f"{name} is not known; {nearest(where[-1], _keys_at(root, where[:-1]))}"
    if error["type"] == "missing":
        return f"{name} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        message = nearest(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]))
    return f"{name}={error['input']!r}: {message}"


def _keys_at(model: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Return the valid keys of a section."""
    for section in sections:
        below = _section_of(model, section)
        assert below is not None
        model = below
    return list(model.model_fields)


def _section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """Return the schema of the section at a key, or None if the key is not a section."""
    if key not in model.model_fields:
        return None
    annotation = model.model_fields[key].annotation
    options = getattr(annotation, "__args__", (annotation,))
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)

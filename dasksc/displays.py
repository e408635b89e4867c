"""Text for displays: values on one line, constructor calls without default arguments, full signatures.

These functions compute nothing, read nothing and run no user code. For an object of a class that they do not support,
they show only the name of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_N_SHOWN = 3
_N_CHARACTERS = 60
# Libraries whose objects have a shape and a dtype, which are known without computing.
_ARRAYS = ("numpy", "pandas", "scipy", "torch", "dask")
_BRACKETS: dict[type, tuple[str, str]] = {
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    list: ("[", "]"),
    tuple: ("(", ")"),
}
_PLAIN = (str, int, float, tuple, list)


def brief(value: Any) -> str:
    """Return the text of a value on one line: arrays as shape and dtype, long collections as their first elements."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _N_CHARACTERS else repr(value[: _N_CHARACTERS - 3] + "...")
    if value is None or isinstance(value, bool | int | float | complex | slice | range):
        return repr(value)
    if isinstance(value, type):
        return value.__qualname__
    if type(value) in _BRACKETS:
        return _collection(value)
    if isinstance(value, functools.partial):
        return f"partial({brief(value.func)})"
    if dataclasses.is_dataclass(value):
        return constructor(value)
    if _package(type(value).__repr__) == "dasksc":
        return _line(repr(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if _package(type(value)) in _ARRAYS:
        return _library_object(value)
    return f"{type(value).__name__}(...)"


def constructor(value: Any, **texts: str) -> str:
    """Return the constructor call of a dataclass instance, without arguments that have their default value."""
    arguments = set_arguments(value, texts)
    return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in arguments.items())})"


def set_arguments(value: Any, texts: Mapping[str, str], *, with_defaults: bool = False) -> dict[str, str]:
    """Return the constructor arguments of a dataclass instance, as a dict of names and text."""
    arguments = dict(texts)
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if not field.init or not field.repr or field.name in texts:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        given = getattr(value, field.name)
        if with_defaults or not _is_default(given, default):
            arguments[field.name] = brief(given)
    return arguments


def changed_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each argument that differs from its default value, in the order of the signature."""
    return {
        name: brief(given[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name in given and name != "self" and not _is_default(given[name], parameter.default)
    }


def with_options_of(
    function: Callable[..., Any], *, without: Iterable[str] = (), **defaults: Any
) -> Callable[[_Callable], _Callable]:
    """Return a decorator that shows the keyword arguments of `function` in place of ``**options``."""
    # ``help()``, editors and the reference then list the possible options. Calls do not change.

    def decorate(callee: _Callable) -> _Callable:
        own = inspect.signature(callee)
        named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        left_out = {*own.parameters, *without}
        options = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=defaults.get(one.name, one.default))
            for one in inspect.signature(function).parameters.values()
            if one.name not in left_out and one.default is not inspect.Parameter.empty
        ]
        callee.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return callee

    return decorate


def first_of(names: Sequence[object], n: int = 3) -> str:
    """Return the first `n` names, separated by commas, followed by the number of further names."""
    return ", ".join(map(str, names[:n])) + (f" and {len(names) - n:,} more" if len(names) > n else "")


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if not isinstance(value, _PLAIN) or not isinstance(default, _PLAIN):
        return False
    if isinstance(value, float) and isinstance(default, float) and math.isnan(value):
        return math.isnan(default)
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return len(value) == len(default) == 0  # elements may be arrays, which have no single truth value
    return bool(value == default)


def _collection(value: Any) -> str:
    first, last = _BRACKETS[type(value)]
    if not value:
        return f"{type(value).__name__}()" if isinstance(value, set | frozenset) else f"{first}{last}"
    items: Sequence[Any] = list(value.items() if isinstance(value, dict) else value)
    displayed = items if len(items) <= _N_SHOWN + 1 else items[:_N_SHOWN]
    texts = [f"{brief(one[0])}: {brief(one[1])}" if isinstance(value, dict) else brief(one) for one in displayed]
    if len(displayed) < len(items):
        texts.append(f"... {len(items):,} in all")
    comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
    return f"{first}{', '.join(texts)}{comma}{last}"


def _library_object(value: Any) -> str:
    if type(value).__name__.lower().endswith("dtype"):
        return str(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None:
        return _line(repr(value))
    if shape == () and hasattr(value, "item") and _package(type(value)) == "numpy":
        return brief(value.item())
    return f"{type(value).__name__}(shape={tuple(shape)}, dtype={dtype})"


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 2 * _N_CHARACTERS else line[: 2 * _N_CHARACTERS - 3] + "..."

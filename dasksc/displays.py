"""Text for displays: values on one line, constructor calls without default arguments, full signatures.

These functions compute nothing, read nothing and run no user code. For an object of a class that they do not support,
they show only the name of the class.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_N_SHOWN = 3
_N_CHARACTERS = 60
# Libraries whose objects have a shape and a dtype, which are known without computing.
_ARRAYS = ("numpy", "pandas", "scipy", "torch", "dask")
_BRACKETS: dict[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}


def brief(value: Any) -> str:
    """Return the text of a value on one line: arrays as shape and dtype, long collections as their first elements."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _N_CHARACTERS else repr(value[: _N_CHARACTERS - 3] + "...")
    if value is None or isinstance(value, bool | int | float | complex | slice | range):
        return repr(value)
    if type(value) in _BRACKETS:
        return _collection(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    if isinstance(value, functools.partial):
        return f"partial({brief(value.func)})"
    if dataclasses.is_dataclass(value):
        return constructor(value)
    if isinstance(value, np.generic | np.dtype):
        return str(value)
    package = _package(type(value))
    if package in _ARRAYS and (shape := getattr(value, "shape", None)) is not None:
        return f"{type(value).__name__}(shape={tuple(shape)}, dtype={getattr(value, 'dtype', None)})"
    if package in _ARRAYS or _package(type(value).__repr__) == "dasksc":
        line = " ".join(repr(value).split())
        return line if len(line) <= 2 * _N_CHARACTERS else line[: 2 * _N_CHARACTERS - 3] + "..."
    return f"{type(value).__name__}(...)"


def constructor(value: Any, **texts: str) -> str:
    """Return the constructor call of a dataclass instance, without arguments that have their default value."""
    arguments = dict(texts)
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if not field.init or not field.repr or field.name in texts:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        given = getattr(value, field.name)
        if not _is_default(given, default):
            arguments[field.name] = brief(given)
    return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in arguments.items())})"


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
    if isinstance(value, list | tuple):  # elements may be arrays, which have no single truth value
        return isinstance(default, list | tuple) and len(value) == len(default) == 0
    return value is default or (isinstance(value, str | int | float) and bool(value == default))


def _collection(value: Any) -> str:
    n = len(value) if len(value) <= _N_SHOWN + 1 else _N_SHOWN
    if isinstance(value, dict):
        texts = [f"{brief(key)}: {brief(one)}" for key, one in islice(value.items(), n)]
    else:
        texts = list(map(brief, value[:n]))
    if n < len(value):
        texts.append(f"... {len(value):,} in all")
    first, last = _BRACKETS[type(value)]
    return f"{first}{', '.join(texts)}{',' if type(value) is tuple and len(value) == 1 else ''}{last}"


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]

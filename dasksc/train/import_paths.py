"""Lookup of objects by the names in a configuration, with suggestions for unknown names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from dasksc import InputError
from dasksc.atlas.lookup import nearest, similar, with_advice

__all__ = ["arguments_of", "check_arguments", "find"]


def find(name: str, built_in: Mapping[str, Any], *, what: str) -> Any:
    """Return the object with a given name.

    Parameters
    ----------
    name
        One of the `built_in` names, or ``"package.module:name"`` for any importable object.
    built_in
        Objects by short name.
    what
        Key of the configuration that has the name, for error messages.

    Raises
    ------
    InputError
        If there is no such object.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(
            with_advice(
                f"{what}={name!r} is not known; {nearest(_completed(name, built_in), built_in)}",
                "To use your own, give 'package.module:name'",
            )
        )
    try:
        module = import_module(module_name)
    except (ImportError, AttributeError) as error:
        # A module that exists may import another one that is not installed.
        is_absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = "Is its directory on PYTHONPATH?" if is_absent else "Correct that import, or install the package"
        raise InputError(f"{what}={name!r} cannot be imported: {error}. {hint}") from error
    value: Any = module
    parts = attribute.split(".")
    for i, part in enumerate(parts):
        try:
            value = getattr(value, part)
        except (ImportError, AttributeError) as error:  # modules may import their attributes on access
            near = similar(part, dir(value)) if isinstance(error, AttributeError) else []
            found = ".".join([*parts[:i], *near])
            hint = (
                f"; did you mean {f'{module_name}:{found}'!r}?" if near else f". Give a name that {module_name} defines"
            )
            raise InputError(f"{what}={name!r} cannot be imported: {error}{hint}") from error
    return value


def _completed(name: str, available: Iterable[str]) -> str:
    """Return the known name whose first word is similar to `name`, such as mlp_classifier for mlp.

    Return `name` unchanged if no first word is similar, or if `name` already resembles a whole known name.
    """
    by_first_word = {one.partition("_")[0]: one for one in available}
    near = [] if similar(name, available) else similar(name, by_first_word)
    return by_first_word[near[0]] if near else name


def arguments_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class that can be passed by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in by_name}


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any], *, what: str) -> None:
    """Raise an error for arguments that `function` does not accept, and for missing required arguments.

    Raises
    ------
    InputError
        If a name is unknown (the message has the nearest valid name), or a required argument is missing.
    """
    parameters = arguments_of(function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    for name in given:
        if name not in parameters and not takes_any:
            raise InputError(f"{what}.{name} is not known; {nearest(name, parameters)}")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in given]
    if missing:
        raise InputError(f"{what} lacks required keys: {', '.join(missing)}. Add them to the section {what}")

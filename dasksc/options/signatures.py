"""Signatures of functions and classes of dasksc, read from their source files.

Importing `scDataset` imports torch, anndata and numba, which takes seconds; parsing its source takes milliseconds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import dasksc

__all__ = ["NOT_LITERAL", "REQUIRED", "Parameter", "parameters_of"]

REQUIRED = inspect.Parameter.empty
NOT_LITERAL = object()
"""Default that the source computes; leave out the argument to get it."""

_PLAIN = {"str": str, "int": int, "float": float, "bool": bool, "Any": Any}


class Parameter(NamedTuple):
    """Parameter whose value can be written as text.

    `type` is the annotation without types that cannot be written: a union of plain types, None, Any, Literal, list and
    dict. `help` is the first clause of the description in the docstring.
    """

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
    path = Path(dasksc.__file__).parent.joinpath(*module.split(".")[1:])
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
        case ast.Subscript(value=ast.Name(id="Sequence" | "list"), slice=item):
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

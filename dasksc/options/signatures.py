"""Signatures of public functions and classes, read from their source files without importing them.

Importing `scDataset` imports torch, anndata and numba, which takes seconds. Its source file is parsed in milliseconds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import dasksc

__all__ = ["NOT_LITERAL", "REQUIRED", "Parameter", "parameters_of"]

REQUIRED = inspect.Parameter.empty
NOT_LITERAL = object()
"""Default that the source computes; leave out the argument to get it."""

_PLAIN = {"str": str, "PathLike": str, "int": int, "float": float, "bool": bool, "Any": Any}
_Definition: TypeAlias = ast.FunctionDef | ast.ClassDef | ast.expr


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter whose value can be written as text.

    `type` is a union of str, int, float, bool, None, Any, Literal[...], list[...] and dict[...]: the annotation without
    the types that cannot be written. `help` is the first clause of the description.
    """

    name: str
    type: Any
    default: Any
    help: str


@functools.cache
def parameters_of(name: str) -> tuple[Parameter, ...]:
    """Return the parameters of a public function or class of dasksc, without those that cannot be written as text.

    `name` is that in `dasksc`, or that of a module and its definition, such as ``dasksc.train.models:Autoencoder``.
    """
    module, _, name = name.rpartition(":")
    found = _Source.of(module or dasksc._MODULE_OF[name]).find(name)
    assert found is not None, name
    definition, source = found
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
    help_of = _descriptions(ast.get_docstring(definition) or "")
    return tuple(
        Parameter(parameter, functools.reduce(operator.or_, types), source.value(default), help_of.get(parameter, ""))
        for parameter, annotation, default in _declared(definition)
        if (types := list(source.types(annotation))) and types != [None]
    )


def _declared(definition: _Definition) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Yield name, annotation and default of each parameter: of a function, `__init__`, or a dataclass."""
    if isinstance(definition, ast.ClassDef):
        init = [one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if not init:
            for field in definition.body:
                match field:
                    case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                        yield name, field.annotation, field.value
            return
        definition = init[0]
    assert isinstance(definition, ast.FunctionDef)
    listed = definition.args.posonlyargs + definition.args.args
    defaults = [None] * (len(listed) - len(definition.args.defaults)) + definition.args.defaults
    named = zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
    for one, default in [*zip(listed, defaults, strict=True), *named]:
        yield one.arg, one.annotation, default


class _Source:
    """Definitions in a module of dasksc."""

    def __init__(self, module: str) -> None:
        path = Path(dasksc.__file__).parent.joinpath(*module.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.body = ast.parse(path.read_text(encoding="utf-8")).body

    of = functools.cache(lambda module: _Source(module))

    def find(self, name: str) -> tuple[_Definition, _Source] | None:
        """Return a function, a class or the value of a constant, and the module that defines it."""
        for node in self.body:
            match node:
                case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                    return node, self
                case ast.Assign(targets=[ast.Name(id=given)], value=value) if given == name:
                    return value, self
                case ast.AnnAssign(target=ast.Name(id=given), value=ast.expr() as value) if given == name:
                    return value, self
                case ast.ImportFrom(module=str(module)) if module.startswith("dasksc."):
                    for alias in node.names:
                        if name == (alias.asname or alias.name):
                            return _Source.of(module).find(alias.name)
        return None

    def value(self, node: ast.expr | None) -> Any:
        """Return the value of a default."""
        match node:
            case None:
                return REQUIRED
            case ast.Call(func=ast.Name(id="field")):
                return self.value(next((one.value for one in node.keywords if one.arg == "default"), node.func))
            case ast.Name(id=name) if found := self.find(name):
                return found[1].value(found[0]) if isinstance(found[0], ast.expr) else NOT_LITERAL
        try:
            return ast.literal_eval(node)
        except ValueError:
            return NOT_LITERAL

    def types(self, node: ast.expr | None) -> Iterator[Any]:
        """Yield the members of an annotation that can be written as text."""
        match node:
            case ast.Constant(value=None):
                yield None
            case ast.BinOp(left=left, right=right):
                yield from self.types(left)
                yield from self.types(right)
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                yield Literal[ast.literal_eval(choices)]
            case ast.Subscript(value=ast.Name(id="Sequence" | "list"), slice=item):
                if inner := list(self.types(item)):
                    yield list[functools.reduce(operator.or_, inner)]  # type: ignore[misc]
            case ast.Subscript(value=ast.Name(id="Mapping" | "dict"), slice=ast.Tuple(elts=[_, item])):
                if inner := list(self.types(item)):
                    yield dict[str, functools.reduce(operator.or_, inner)]  # type: ignore[misc]
            case ast.Subscript(value=ast.Attribute(attr="PathLike")):
                yield str
            case ast.Name(id=name) if name in _PLAIN:
                yield _PLAIN[name]
            case ast.Name(id=name) if found := self.find(name):
                if isinstance(found[0], ast.expr):
                    yield from found[1].types(found[0])


def _descriptions(docstring: str) -> dict[str, str]:
    """Return the first clause of the description of each parameter in a numpydoc docstring."""
    _, _, section = docstring.partition("Parameters\n----------\n")
    section = re.split(r"\n\n\S+\n-{3,}\n", section)[0]
    found = {}
    for names, text in re.findall(r"^(\S.*)\n((?: .*\n?|\n)+)", section, re.MULTILINE):
        for name in names.split(", "):
            own = "- `" in text and re.search(rf"^ +- `{name}` ((?:.|\n)*?)(?=\n +- |\n\n|\Z)", text, re.MULTILINE)
            found[name] = _first_clause(own[1] if own else text)
    return found


def _first_clause(text: str) -> str:
    text = re.sub(r"^If True, ", "", " ".join(text.split()))
    clause = re.match(r"(?:``.*?``|[.:;](?=\S)|[^.:;])*", text)
    assert clause is not None
    plain = clause[0].replace("`", "")
    return plain[:1].upper() + plain[1:]

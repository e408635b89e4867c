"""Public names of the package as text, so that a review shows every change to the interface.

Annotations appear as in the source and values in short form, so that the text is the same on every Python version.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import dasksc
from dasksc.cli import COMMANDS, prepared

MODULES = (
    *("dasksc", "dasksc.datasets", "dasksc.errors", "dasksc.transforms", "dasksc.tokens", "dasksc.experimental"),
    *("dasksc.dashboard", "dasksc.train", "dasksc.train.sections", "dasksc.train.models"),
    "dasksc.integrations.data_module",
)
# Importing these modules imports a trainer, which takes longer than all other imports.
TRAINERS = ("lightning", "pytorch_lightning", "scvi", "transformers")
SPECIAL = ("__call__", "__contains__", "__getitem__", "__iter__", "__len__")


def interface() -> str:
    """Return the public names of the documented modules, their signatures, and other names that users rely on."""
    sections = {module: sorted(_of_module(module)) for module in MODULES}
    sections |= {f"dasksc.integrations.{name}": sorted(_of_source(f"dasksc.integrations.{name}")) for name in TRAINERS}
    dataset = dasksc.scDataset(np.arange(4), dasksc.Streaming(), 2, scheduler="synchronous")
    inherited = set(dir(type(dataset)))
    sections["attributes of a data set"] = sorted(
        name for name in vars(dataset) if not name.startswith("_") and name not in inherited
    )
    sections["figures of scDataset.stats()"] = sorted(dataset.stats())
    sections["keys of scDataset.state_dict()"] = sorted(dataset.state_dict())
    configuration = (Path(dasksc.__file__).parent / "dasksc.yaml").read_text()
    sections["configuration"] = [
        f"{key} = {value}" for key, value in sorted(yaml.safe_load(configuration)["dasksc"].items())
    ]
    sections["commands"] = sorted(_commands())
    return "\n".join(f"[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())


def _of_module(module_name: str) -> Iterator[str]:
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            yield from _of_class(name, thing)
        elif inspect.isfunction(thing):
            yield f"{name}{_signature(thing)}"
        else:
            yield f"{name}: {type(thing).__name__}"


def _of_class(name: str, thing: type) -> Iterator[str]:
    ours = [base for base in thing.__mro__ if base.__module__.partition(".")[0] == "dasksc"]
    theirs = {direct for base in ours for direct in base.__bases__} - {object}  # without bases of third-party classes
    bases = [base.__name__ for base in thing.__mro__[1:] if base in theirs and not base.__name__.startswith("_")]
    is_made_by_us = any("__init__" in vars(base) for base in ours)
    yield f"class {name}({', '.join(bases)}): {_signature(thing) if is_made_by_us else ''}".rstrip()
    for member in sorted({member for base in ours for member in vars(base)}):
        if member.startswith("_") and member not in SPECIAL:
            continue
        value = next(vars(base)[member] for base in ours if member in vars(base))
        if isinstance(value, classmethod | staticmethod):
            yield f"{name}.{member}{_signature(value.__func__)} {type(value).__name__}"
        elif inspect.isfunction(value):
            yield f"{name}.{member}{_signature(value)}"
        else:
            yield f"{name}.{member}"


class _Text(str):
    """Text that a signature shows without quotes."""

    __repr__ = str.__str__


def _signature(thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except ValueError:  # compiled functions have no signature
        return ""
    parameters = []
    for one in signature.parameters.values():
        default = one.default if one.default is one.empty else _Text(_value(one.default))
        parameters.append(one.replace(annotation=_annotation(one.annotation), default=default))
    return str(signature.replace(parameters=parameters, return_annotation=_annotation(signature.return_annotation)))


def _annotation(value: Any) -> Any:
    return _Text(value) if isinstance(value, str) else inspect.Parameter.empty


def _value(value: Any) -> str:
    """Return a default as text, or its type if the source has no literal for it."""
    if isinstance(value, bool | int | float | str | bytes | tuple | list | dict | None):
        return repr(value)
    return getattr(value, "__qualname__", None) or f"<{type(value).__name__}>"


def _of_source(module_name: str) -> Iterator[str]:
    """Yield the definitions of a module without importing it."""
    spec = importlib.util.find_spec(module_name)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"{node.name}({', '.join(map(ast.unparse, node.bases))})"
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and (member.name == "__init__" or member.name[0] != "_"):
                    yield f"{node.name}.{member.name}({ast.unparse(member.args)})"
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{node.name}({ast.unparse(node.args)})"


def _commands() -> Iterator[str]:
    for name in COMMANDS:
        for one in prepared(name)[0]._actions:
            if one.dest != "help":
                yield f"{name} {'/'.join(one.option_strings) or one.dest}"

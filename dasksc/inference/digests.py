"""Digests of models and functions, equal in every process and for any number of ranks.

The digest of a model includes its parameters and buffers, plain public attributes of its modules (such as
``beta=0.5``), the class name of each module, and the source code of module classes that are not part of torch. The
digest of a function includes its source code, defaults and closure. Neither includes global variables, or other
functions that this code calls.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from dask.base import tokenize
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["model_digest"]

Update = Callable[[bytes | memoryview], None]
# Objects added so far, by id. They are kept alive, so no other object gets the id of one of them.
Visited = dict[int, Any]

_PLAIN = (bool, int, float, str, bytes, type(None))


def model_digest(value: Any) -> str:
    """Return a digest of a model, a function or any other object, such as a list of functions.

    Parameters
    ----------
    value
        Any object. Under FSDP, all ranks must call this function together: parameters are gathered one at a time.

    Returns
    -------
    str
        32 hexadecimal digits. Computing them takes time proportional to the size of the parameters.
    """
    hashed = hashlib.blake2b(digest_size=16)
    _add(value, hashed.update, {})
    return hashed.hexdigest()


def _add(value: Any, update: Update, seen: Visited) -> None:
    """Add a value to a digest; an object that contains itself is added once."""
    if isinstance(value, _PLAIN):
        update(repr((type(value).__name__, value)).encode())
        return
    if isinstance(value, torch.Tensor):
        _add_tensor(value, update)
        return
    if isinstance(value, np.ndarray | np.generic):
        update(tokenize(value).encode())
        return
    if id(value) in seen:
        update(b"again")
        return
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        _add_module(value, update, seen)
    elif isinstance(value, MethodType):
        _add(value.__func__, update, seen)
        _add(value.__self__, update, seen)
    elif isinstance(value, FunctionType):
        _add_function(value, update, seen)
    elif isinstance(value, functools.partial):
        for part in (value.func, value.args, value.keywords):
            _add(part, update, seen)
    elif isinstance(value, type):
        update(_source_of(value))
    elif isinstance(value, ModuleType):
        update(value.__name__.encode())
    elif isinstance(value, Mapping):
        update(f"mapping {len(value)}".encode())
        for key, item in value.items():
            _add(key, update, seen)
            _add(item, update, seen)
    elif isinstance(value, set | frozenset):
        update(repr(sorted(model_digest(item) for item in value)).encode())
    elif isinstance(value, Sequence):
        update(f"sequence {len(value)}".encode())
        for item in value:
            _add(item, update, seen)
    else:
        update(_source_of(type(value)))
        update(str(getattr(value, "__name__", "")).encode())  # built-in functions have nothing else
        _add(dict(getattr(value, "__dict__", {})), update, seen)


def _add_tensor(tensor: torch.Tensor, update: Update) -> None:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    update(f"{whole.dtype} {tuple(whole.shape)} {whole.layout}".encode())
    if whole.layout != torch.strided:
        whole = whole.to_dense()
    # NumPy lacks some data types of torch.
    flat = whole.detach().contiguous().cpu().reshape(-1)
    if flat.numel():
        update(flat.view(torch.uint8).numpy().data)


def _add_module(module: nn.Module, update: Update, seen: Visited) -> None:
    for name, part in module.named_modules():
        seen[id(part)] = part
        update(name.encode())
        # Sharding replaces the class of each module by a derived class.
        classes = [cls for cls in type(part).__mro__ if not issubclass(cls, FSDPModule)]
        for cls in classes:
            if cls.__module__.partition(".")[0] != "torch" and cls is not object:
                update(_source_of(cls))
        update(classes[0].__qualname__.encode())
        for key, held in sorted(vars(part).items()):
            if not key.startswith("_") and key != "training" and isinstance(held, (*_PLAIN, tuple, list)):
                update(key.encode())
                _add(held, update, {})
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        update(name.encode())
        _add_tensor(tensor, update)


def _add_function(function: FunctionType, update: Update, seen: Visited) -> None:
    update(_source_of(function))
    if function.__name__ == "<lambda>":  # several may share a line of source code
        update(_code_of(function.__code__))
    for held in (function.__defaults__, function.__kwdefaults__):
        _add(held, update, seen)
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # a variable that is not set yet
            held = None
        _add(held, update, seen)


def _source_of(thing: Any) -> bytes:
    """Return the name and source code of a class or function, or its compiled code if there is no source."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    try:
        return f"{name}\n{inspect.getsource(thing)}".encode()
    except (OSError, TypeError):  # typed into an interpreter, or built in
        functions = (
            [thing] if hasattr(thing, "__code__") else [f for f in vars(thing).values() if inspect.isfunction(f)]
        )
        return b"".join([name.encode(), *(_code_of(function.__code__) for function in functions)])


def _code_of(code: CodeType) -> bytes:
    constants = [_code_of(c) if isinstance(c, CodeType) else repr(c).encode() for c in code.co_consts]
    return b"".join([code.co_code, *constants, *(name.encode() for name in code.co_names)])

"""Digests of models and functions, equal in every process and for any number of ranks.

The digest of a model includes its parameters and buffers, the attributes of its modules (such as ``beta=0.5``), the
class name of each module, and the source code of module classes that are not part of torch. The digest of a function
includes its source code, defaults and closure. Other objects count as pickle stores them. No digest includes hooks of
modules, devices, locks, global variables, or other functions that this code calls.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from dask.base import tokenize
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = ["model_digest"]

logger = logging.getLogger("dasksc.inference")

Update = Callable[[bytes | memoryview], None]
# Objects added so far, by id. They are kept alive, so no other object gets the id of one of them.
Visited = dict[int, Any]

# Ranks use different devices, and a lock has no value.
_IGNORED = (torch.device, type(threading.Lock()), type(threading.RLock()))
# Arrays and tables, for which Dask has tokens.
_NORMALIZED = (np.ndarray, np.generic, pd.DataFrame, pd.Series, pd.Index)
_PLAIN = (bool, int, float, complex, str, bytes, range, type(None))
# Attributes of every module. `named_modules`, `named_parameters` and `named_buffers` yield their contents.
_OF_MODULES = frozenset(vars(nn.Module()))
# Parameters of recurrent modules, which torch lists once more.
_REPEATED = frozenset({"_flat_weights", "_flat_weight_refs"})
# Beginnings of the names of attributes that `fully_shard` adds to modules. The first is followed by a random name.
_OF_SHARDING = ("__composable_api", "_fsdp_use_orig_params", "_is_fsdp_managed_module")


class _OpaqueError(Exception):
    """Internal error for an object that cannot be compared with one of another process."""


def model_digest(value: Any) -> str | None:
    """Return a digest of a model, a function or any other object, such as a list of functions.

    Parameters
    ----------
    value
        Any object. Under FSDP, all ranks must call this function together: parameters are gathered one at a time.

    Returns
    -------
    str or None
        32 hexadecimal digits; computing them takes time proportional to the size of the parameters. None if the object
        refers to one that cannot be pickled, such as an open file.
    """
    try:
        return _digest(value)
    except (_OpaqueError, RecursionError) as reason:
        logger.info("%s cannot be compared with that of another call: %s", type(value).__name__, reason)
        return None


def _digest(value: Any) -> str:
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
    if isinstance(value, _NORMALIZED):
        update(tokenize(value).encode())
        return
    if isinstance(value, _IGNORED):
        return
    if sp.issparse(value):  # without what SciPy has found out about it
        value = {name: held for name, held in vars(value).items() if isinstance(held, np.ndarray | tuple | dict)}
    if id(value) in seen:
        update(b"again")
        return
    if not isinstance(value, tuple):  # equal tuples may be one object or several
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
        update(repr(sorted(map(_digest, value))).encode())
    elif isinstance(value, Sequence):
        update(f"sequence {len(value)}".encode())
        for item in value:
            _add(item, update, seen)
    else:
        if type(value).__module__.startswith("torch.distributed."):  # process groups and meshes, which know their rank
            return
        kind: Any = type(value)
        update(_source_of(kind))
        for part in _reduced(value):
            _add(part, update, seen)


def _reduced(value: Any) -> list[Any]:
    """Return the parts from which pickle rebuilds an object."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        parts = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:  # raised by the object's own code
        raise _OpaqueError(f"{type(value).__qualname__}: {error}") from error
    if isinstance(parts, str):  # the name of a global object
        return [getattr(value, "__module__", None), parts]
    return [list(part) if isinstance(part, Iterator) else part for part in parts]


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
        classes: list[Any] = [cls for cls in type(part).__mro__ if not issubclass(cls, FSDPModule)]
        for cls in classes:
            if not _is_of_torch(cls) and cls is not object:
                update(_source_of(cls))
        update(classes[0].__qualname__.encode())
        for key, held in sorted(_attributes(part, is_of_torch=_is_of_torch(classes[0])).items()):
            update(key.encode())
            _add(held, update, seen)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        update(name.encode())
        _add_tensor(tensor, update)


def _attributes(part: Any, *, is_of_torch: bool) -> dict[str, Any]:
    """Return the attributes of a module that may change its results; those of torch's own modules are public."""
    if is_of_torch and hasattr(part, "_orig_mod"):  # wrapped by `torch.compile`, with its own state
        return {}
    state = part.__getstate__()
    # Lightning's attributes tell what its trainer does, such as the name of the running method.
    bases = [cls for cls in type(part).__mro__ if cls.__name__ == "LightningModule" and _is_of_lightning(cls)]
    of_lightning = [set(vars(cls())) for cls in bases]
    ignored = (_OF_MODULES | _REPEATED).union(*of_lightning)
    return {
        key: held
        for key, held in (state.items() if isinstance(state, dict) else [("state", state)])
        if key not in ignored
        and not key.startswith(_OF_SHARDING)
        and not (is_of_torch and key.startswith("_"))
        # `register_fsdp_forward_method` replaces a method of a module by a wrapper.
        and not (isinstance(part, FSDPModule) and hasattr(type(part), key) and hasattr(held, "__wrapped__"))
    }


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _is_of_lightning(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _add_function(function: FunctionType, update: Update, seen: Visited) -> None:
    update(_source_of(function))
    if function.__name__ == "<lambda>":  # several may share a line of source code
        update(_code_of(function.__code__))
    for held in (function.__defaults__, function.__kwdefaults__, vars(function)):
        _add(held, update, seen)
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # a variable that is not set yet
            held = None
        _add(held, update, seen)


@functools.lru_cache(maxsize=1024)  # inspect parses the whole module each time
def _source_of(thing: Any) -> bytes:
    """Return the name and source code of a class or function, or its compiled code if there is no source."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    try:
        return f"{name}\n{inspect.getsource(thing)}".encode()
    except (OSError, TypeError):  # typed into an interpreter, or built in
        held = [thing] if not isinstance(thing, type) else vars(thing).values()
        functions = [function for function in held if inspect.isfunction(function)]
        return b"".join([name.encode(), *(_code_of(function.__code__) for function in functions)])


def _code_of(code: CodeType) -> bytes:
    constants = [_code_of(c) if isinstance(c, CodeType) else repr(c).encode() for c in code.co_consts]
    return b"".join([code.co_code, *constants, *(name.encode() for name in code.co_names)])

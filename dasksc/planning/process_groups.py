"""Process groups of ``torch.distributed`` and ``jax.distributed``, found without importing either."""

from __future__ import annotations

import sys
import time
from typing import Any

from dasksc._compat.jax import distributed_state

__all__ = ["jax_state", "leave_group", "torch_distributed"]

_SETTLE_S = 0.2


def torch_distributed() -> Any:
    """Return ``torch.distributed`` if a process group is up, without importing torch for it."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def jax_state() -> Any:
    """Return the state of ``jax.distributed`` if that is up, without importing JAX for it."""
    module = sys.modules.get("jax.distributed")
    return distributed_state() if module is not None and module.is_initialized() else None


def leave_group() -> None:
    """Destroy the process group, if there is one, when its threads have let go of what they did last.

    A thread of Gloo drops the tensors of a collective a moment after the collective is done, for which it may need
    the interpreter's lock. If the interpreter ends first, PyTorch aborts the process ("terminate called without an
    active exception"); and destroying the group holds that lock while it waits for the thread.
    """
    distributed = torch_distributed()
    if distributed is not None:
        time.sleep(_SETTLE_S)
        distributed.destroy_process_group()

"""Process groups of ``torch.distributed`` and ``jax.distributed``, detected without importing either."""

from __future__ import annotations

import sys
import time
from typing import Any

_SETTLE_S = 0.2


def torch_distributed() -> Any:
    """Return ``torch.distributed`` if a process group is initialized, otherwise None; never import torch."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def jax_state() -> Any:
    """Return the state of ``jax.distributed`` if it is initialized, otherwise None; never import JAX."""
    module = sys.modules.get("jax.distributed")
    if module is None or not module.is_initialized():
        return None
    # The public functions of JAX would initialize its devices, and so wait for all other processes.
    return sys.modules["jax._src.distributed"].global_state


def leave_group() -> None:
    """Destroy the process group, if there is one, after a short wait for its threads."""
    # A thread of Gloo releases the tensors of a collective a moment after the collective ends, and may need the GIL to
    # do so. If the interpreter exits first, PyTorch aborts the process ("terminate called without an active
    # exception"). Destroying the group at once can deadlock, since the call holds the GIL while it waits for the
    # thread.
    distributed = torch_distributed()
    if distributed is not None:
        time.sleep(_SETTLE_S)
        distributed.destroy_process_group()

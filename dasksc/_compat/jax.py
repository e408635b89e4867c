"""Private parts of JAX, which this module does not import."""

from __future__ import annotations

import sys
from typing import Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute

__all__ = ["distributed_state"]


def distributed_state() -> Any:
    """Return the state of an initialized ``jax.distributed`` (``global_state``); raises if missing."""
    # The public functions of JAX would initialize its devices, and so wait for all other processes. The ``client`` of
    # the state is the key-value store.
    internals = sys.modules.get("jax._src.distributed")
    if internals is None:
        raise UnsupportedVersionError("jax", "module jax._src.distributed")
    return attribute(internals, "global_state", library="jax")

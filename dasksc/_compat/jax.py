"""What is private in JAX, which is not imported."""

from __future__ import annotations

import sys
from typing import Any

from dasksc._compat.unsupported import UnsupportedVersionError, attribute

__all__ = ["distributed_state"]


def distributed_state() -> Any:
    """Return the state of ``jax.distributed``, which is up (``jax._src.distributed.global_state``).

    JAX's public names would start its devices, which waits for every other process. Its ``client`` is the key-value
    store. Raises where missing.
    """
    internals = sys.modules.get("jax._src.distributed")
    if internals is None:
        raise UnsupportedVersionError("jax", "module jax._src.distributed")
    return attribute(internals, "global_state", library="jax")

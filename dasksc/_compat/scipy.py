"""Private flags of SciPy sparse matrices. Reading the public properties would compute flags that are not known yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from dasksc._compat.unsupported import UnsupportedVersionError, warn_once

__all__ = ["copy_flags", "is_canonical_known", "mark_canonical"]

_CANONICAL = "_has_canonical_format"
_FLAGS = ("_has_sorted_indices", _CANONICAL)


def mark_canonical(block: Any) -> None:
    """Mark a block as canonical: the column indices of each row are strictly ascending."""
    # SciPy does not document this setter.
    block.has_canonical_format = True


def is_canonical_known(block: Any) -> bool:
    """Return True if SciPy already knows whether a block is canonical; if not, asking it scans the whole block."""
    return hasattr(block, _CANONICAL)


def copy_flags(block: Any, to: Any) -> None:
    """Copy the flags of a block to another one with the same sparsity pattern; does nothing if they are missing."""
    for name in _FLAGS:
        if hasattr(block, name):
            setattr(to, name, getattr(block, name))


def _report_missing_flags() -> None:
    block = sp.csr_matrix((1, 1), dtype=np.int8)
    mark_canonical(block)
    for name in _FLAGS:
        if name not in vars(block):
            error = UnsupportedVersionError("scipy", f"csr_matrix.{name}")
            warn_once(error, without="every Dask operation on sparse X checks all column indices")


_report_missing_flags()

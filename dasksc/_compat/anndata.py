"""Private parts of AnnData."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import attribute

__all__ = ["selected_rows_and_columns"]


def selected_rows_and_columns(adata: Any) -> tuple[Any, Any]:
    """Return the row and column indices of an AnnData view (``_oidx``, ``_vidx``); raises if missing."""
    return attribute(adata, "_oidx", library="anndata"), attribute(adata, "_vidx", library="anndata")

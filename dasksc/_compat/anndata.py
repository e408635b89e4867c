"""What is private in AnnData."""

from __future__ import annotations

from typing import Any

from dasksc._compat.unsupported import attribute

__all__ = ["selected_rows_and_columns"]


def selected_rows_and_columns(adata: Any) -> tuple[Any, Any]:
    """Return the indices of a view into the AnnData behind it (``_oidx``, ``_vidx``); raises where missing."""
    return attribute(adata, "_oidx", library="anndata"), attribute(adata, "_vidx", library="anndata")

"""Private parts of AnnData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dasksc._compat.unsupported import attribute, optional

__all__ = ["selected_rows_and_columns", "unified_dtypes"]


def selected_rows_and_columns(adata: Any) -> tuple[Any, Any]:
    """Return the row and column indices of an AnnData view (``_oidx``, ``_vidx``); raises if missing."""
    return attribute(adata, "_oidx", library="anndata"), attribute(adata, "_vidx", library="anndata")


def unified_dtypes(tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame] | None:
    """Return the tables with the column data types that `anndata.concat` would give them; None if unsupported."""
    unify = optional(
        "anndata",
        "anndata._core.merge",
        "unify_dtypes",
        without="opening joined atlases with names=False takes 8 more bytes of memory per cell",
    )
    return None if unify is None else list(unify(tables))

"""Private parts of AnnData."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd


def selected_rows_and_columns(adata: Any) -> tuple[Any, Any]:
    """Return the row and column indices of an AnnData view."""
    return adata._oidx, adata._vidx


def unified_dtypes(tables: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Return the tables with the column data types that `anndata.concat` would give them."""
    from anndata._core.merge import unify_dtypes

    return list(unify_dtypes(tables))

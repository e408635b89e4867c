"""Concatenation of fetched rows, from one matrix or from several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from dasksc.storage.fetched_csr import CSRFetched
from dasksc.storage.fetched_dense import DenseFetched
from dasksc.storage.fetched_rows import Origins
from dasksc.storage.matrix import Layout, RowBuffer
from dasksc.storage.row_pointers import RowPointers

__all__ = ["join", "stack"]


def join(parts: Sequence[RowBuffer]) -> RowBuffer:
    """Concatenate fetches of one matrix, without copying if they hold the same data types."""
    if len(parts) == 1:
        return parts[0]
    rows = cast(Sequence[CSRFetched | DenseFetched], parts)
    origins = [part.origins for part in rows if part.origins is not None]
    joined = replace(origins[0], numbers=np.concatenate([one.numbers for one in origins])) if origins else None
    if len({part.types for part in rows}) == 1:
        return _concatenated(rows, label=rows[0].label, dtype=rows[0].dtype, origins=joined)
    # The matrix consists of several ones, and the data types of a fetch depend on which of them it touched.
    first = rows[0]
    return stack(
        parts,
        label=first.label,
        dtype=first.dtype,
        layout=first.layout,
        origins=None if joined is None else joined.without_maps(),
    )


def stack(
    parts: Sequence[RowBuffer], *, label: str, dtype: np.dtype[Any], layout: Layout, origins: Origins | None
) -> RowBuffer:
    """Concatenate fetches of several matrices; only parts that differ in data type or layout are copied.

    Parameters
    ----------
    parts
        Fetches to concatenate; at least one.
    label, dtype, layout, origins
        Attributes of the result. The layout is CSR if any part is CSR.
    """
    rows = cast(Sequence[CSRFetched | DenseFetched], parts)
    if layout == "csr":
        rows = [_as_csr(part) for part in rows]
    held = [np.result_type(*types) for types in zip(*(part.types for part in rows), strict=True)]
    rows = [part if part.column_maps is None and list(part.types) == held else part.converted(*held) for part in rows]
    return _concatenated(rows, label=label, dtype=dtype, origins=origins)


def _concatenated(
    parts: Sequence[CSRFetched | DenseFetched], *, label: str, dtype: np.dtype[Any], origins: Origins | None
) -> RowBuffer:
    rows = np.concatenate([part.rows for part in parts])
    n_vars = parts[0].shape[1] if origins is None or origins.maps is None else origins.maps.n_vars
    if isinstance(parts[0], DenseFetched):
        dense = cast(Sequence[DenseFetched], parts)
        values = RowPointers.joined([part.values for part in dense])
        return DenseFetched(label=label, rows=rows, n_vars=n_vars, dtype=dtype, values=values, origins=origins)
    sparse = cast(Sequence[CSRFetched], parts)
    return CSRFetched(
        label=label,
        rows=rows,
        n_vars=n_vars,
        dtype=dtype,
        lengths=np.concatenate([part.lengths for part in sparse]),
        data=RowPointers.joined([part.data for part in sparse]),
        indices=RowPointers.joined([part.indices for part in sparse]),
        origins=origins,
    )


def _as_csr(part: CSRFetched | DenseFetched) -> CSRFetched:
    if isinstance(part, CSRFetched):
        return part
    held = part.values.dtype if part.column_maps is None else None
    indptr, indices, data = part.gather_csr(np.arange(part.shape[0], dtype=np.int64), dtype=held)
    return CSRFetched.of_block(part.label, part.rows, part.shape[1], part.dtype, (indptr, indices, data))

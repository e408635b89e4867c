"""Concatenation of fetched rows, from one matrix or from several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from dasksc.storage.fetched_csr import CSRRowBuffer
from dasksc.storage.fetched_dense import DenseRowBuffer
from dasksc.storage.fetched_rows import Origins
from dasksc.storage.matrix import Layout, RowBuffer
from dasksc.storage.row_pointers import RowPointers


def join(parts: Sequence[RowBuffer]) -> RowBuffer:
    """Concatenate fetches of one matrix, without copying if they hold the same data types."""
    if len(parts) == 1:
        return parts[0]
    rows = cast(Sequence[CSRRowBuffer | DenseRowBuffer], parts)
    origins = [buffer.origins for buffer in rows if buffer.origins is not None]
    joined = replace(origins[0], numbers=np.concatenate([one.numbers for one in origins])) if origins else None
    if len({buffer.types for buffer in rows}) == 1:
        return _concatenated(rows, label=rows[0].label, dtype=rows[0].dtype, origins=joined)
    # The matrix is a concatenation, and the data types of a fetch depend on the parts that it has read.
    first = rows[0]
    return stack(
        parts,
        label=first.label,
        dtype=first.dtype,
        layout=first.layout,
        origins=None if joined is None else replace(joined, maps=None),  # columns are the common ones by then
    )


def stack(
    parts: Sequence[RowBuffer], *, label: str, dtype: np.dtype[Any], layout: Layout, origins: Origins | None
) -> RowBuffer:
    """Concatenate fetches of several matrices; only parts that differ in data type or layout are copied."""
    rows = cast(Sequence[CSRRowBuffer | DenseRowBuffer], parts)
    if layout == "csr":
        rows = [_as_csr(buffer) for buffer in rows]
    held = [np.result_type(*types) for types in zip(*(buffer.types for buffer in rows), strict=True)]
    rows = [
        buffer if buffer.column_maps is None and list(buffer.types) == held else buffer.converted(*held)
        for buffer in rows
    ]
    return _concatenated(rows, label=label, dtype=dtype, origins=origins)


def _concatenated(
    parts: Sequence[CSRRowBuffer | DenseRowBuffer], *, label: str, dtype: np.dtype[Any], origins: Origins | None
) -> RowBuffer:
    rows = np.concatenate([buffer.rows for buffer in parts])
    n_vars = parts[0].shape[1] if origins is None or origins.maps is None else origins.maps.n_vars
    if isinstance(parts[0], DenseRowBuffer):
        dense = cast(Sequence[DenseRowBuffer], parts)
        values = RowPointers.joined([buffer.values for buffer in dense])
        return DenseRowBuffer(label=label, rows=rows, n_vars=n_vars, dtype=dtype, values=values, origins=origins)
    sparse = cast(Sequence[CSRRowBuffer], parts)
    return CSRRowBuffer(
        label=label,
        rows=rows,
        n_vars=n_vars,
        dtype=dtype,
        lengths=np.concatenate([buffer.lengths for buffer in sparse]),
        data=RowPointers.joined([buffer.data for buffer in sparse]),
        indices=RowPointers.joined([buffer.indices for buffer in sparse]),
        origins=origins,
    )


def _as_csr(buffer: CSRRowBuffer | DenseRowBuffer) -> CSRRowBuffer:
    if isinstance(buffer, CSRRowBuffer):
        return buffer
    held = buffer.values.dtype if buffer.column_maps is None else None
    indptr, indices, data = buffer.gather_csr(np.arange(buffer.shape[0], dtype=np.int64), dtype=held)
    return CSRRowBuffer.of_block(buffer.label, buffer.rows, buffer.shape[1], buffer.dtype, (indptr, indices, data))

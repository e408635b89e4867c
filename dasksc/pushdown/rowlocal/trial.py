"""Trial of array code on synthetic rows, to detect functions that mix rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.pushdown.computed_chunks import DaskMatrix, as_layout
from dasksc.pushdown.rowlocal.nodes import Node, Run, joined
from dasksc.storage import Matrix, RowBuffer, as_matrix

__all__ = ["N_TRIED", "are_equal", "synthetic_run", "trial"]

# Number of synthetic rows if all functions are known to be row-local (True), and otherwise (False). In the
# second case more rows are needed, since some functions mix rows only in large blocks.
N_TRIED = {True: 6, False: 41}


def trial(nodes: list[Node], matrix: DaskMatrix, *, n_rows: int, n_tried: int) -> str | None:
    """Test with synthetic values whether the rows of a block are independent."""
    # Return a description of the first violation, or None.
    generator = np.random.default_rng(0)
    # Sampling with replacement repeats some rows; in small blocks, it repeats most of them.
    together = np.sort(generator.integers(n_rows, size=n_tried))
    together[-1] = together[-2]
    places = np.arange(n_tried)
    alone = np.unique(np.linspace(0, n_tried - 1, 6).astype(np.int64))
    parts = [places[i : i + 1] for i in alone] + [places[:7], places[7:20], places[20:]]

    def computed(need: NDArray[np.int64]) -> NDArray[Any]:
        with np.errstate(all="ignore"):
            values = as_layout(joined([nodes], (need,), run, matrix), "dense")
        return np.asarray(values)

    try:
        run = synthetic_run([(nodes, together)])
        expected = computed(together)
        for part in parts:
            if len(part) and not are_equal(computed(together[part]), expected[part]):
                return "synthetic rows gave different values when computed alone and with others"
        for order in (places[::-1], generator.permutation(places)):
            if not are_equal(computed(together[order]), expected[order]):
                return "synthetic rows gave different values in another order"
    except InputError as error:
        return f"with synthetic rows, {error}"
    except Exception as error:  # a function may raise anything on synthetic rows
        return f"one of them raised {error!r} for synthetic rows"
    return None


def synthetic_run(wanted: list[tuple[list[Node], NDArray[np.int64]]]) -> Run:
    """Start a run for the nodes and rows in `wanted` on synthetic rows, without reading any matrix."""
    return Run.started(wanted, _synthetic_rows)


def _synthetic_rows(matrix: Matrix, rows: NDArray[np.int64]) -> RowBuffer:
    """Return synthetic rows that differ in scale and sparsity, with values in the range of the data type."""
    generator = np.random.default_rng(len(rows))
    largest = np.iinfo(matrix.dtype).max if matrix.dtype.kind in "iu" else 10_000
    scale = np.geomspace(1, min(largest, 10_000) - 1, max(1, len(rows)))[: len(rows)]
    share = np.linspace(0.8, 0.2, len(rows))
    shape = (len(rows), matrix.shape[1])
    values = 1 + (generator.random(shape) * scale[:, None]).astype(np.int64)
    values[generator.random(shape) >= share[:, None]] = 0
    block = values.astype(matrix.dtype)
    synthetic = as_matrix(
        sp.csr_matrix(block) if matrix.layout == "csr" else block, f"synthetic rows for {matrix.label}"
    )
    return synthetic.fetch(np.arange(len(rows), dtype=np.int64))


def are_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return True if two blocks are equal up to rounding errors."""
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)

"""Names of private functions that scanpy and fast-array-utils apply to the chunks of Dask arrays.

If another version renames a function, dasksc no longer knows that the function treats rows independently, and tests the
function on more rows (see `dasksc.pushdown.trust`). Renaming the function of `SCALE_ROWS` has a second effect: the CSR
results of the function hold copies of the column indices, instead of sharing those of the input.
"""

from __future__ import annotations

__all__ = ["REDUCTION_NAMES", "SCALE_ROWS"]

# Multiplies or divides rows or columns by factors; has an ``out`` argument.
SCALE_ROWS = ("scanpy._utils", "axis_mul_or_truediv")
REDUCTION_NAMES = frozenset(
    [
        # scanpy 1.11, then 1.12
        ("scanpy._utils", "_.<locals>.sum_drop_keepdims"),
        ("scanpy._utils", "_.<locals>.aggregate_sum"),
        ("fast_array_utils.stats._utils", "_dask_block"),
    ]
)

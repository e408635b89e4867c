"""Private functions of scanpy, and of the library it adds up by, that array code is made of: by module and name.

Under other names they are believed only once they were tried, and copy column numbers.
"""

from __future__ import annotations

__all__ = ["REDUCTION_NAMES", "SCALE_ROWS"]

# Multiplies or divides rows or columns by factors; takes ``out``.
SCALE_ROWS = ("scanpy._utils", "axis_mul_or_truediv")
REDUCTION_NAMES = frozenset(
    [
        # scanpy 1.11, then 1.12
        ("scanpy._utils", "_.<locals>.sum_drop_keepdims"),
        ("scanpy._utils", "_.<locals>.aggregate_sum"),
        ("fast_array_utils.stats._utils", "_dask_block"),
    ]
)

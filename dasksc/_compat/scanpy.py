"""Private functions of scanpy that array code is made of, by module and name: scanpy is not imported.

Under other names they are believed only once they were tried, and copy column numbers.
"""

from __future__ import annotations

__all__ = ["REDUCTION_NAMES", "SCALE_ROWS"]

# Multiplies or divides rows or columns by factors; takes ``out``.
SCALE_ROWS = ("scanpy._utils", "axis_mul_or_truediv")
REDUCTION_NAMES = frozenset(
    [("scanpy._utils", "_.<locals>.sum_drop_keepdims"), ("scanpy._utils", "_.<locals>.aggregate_sum")]
)

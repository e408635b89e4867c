"""What tells the rows of two matrices apart, and what it takes to store them."""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import mix

__all__ = ["digest_csr", "digest_dense"]

_LIMIT = 2.0**63


@kernel
def _word(value):
    """Return 64 bits that tell a value apart, the same in every type that holds it."""
    if value == np.floor(value) and -_LIMIT <= value < _LIMIT:
        return np.uint64(np.int64(value))
    # Not a whole number: its bits as float64, mixed once more, so that they are no whole number's.
    return mix(np.float64(value).view(np.uint64))


@kernel
def _count(value):
    """Return `value` as float64 if it is a count; else infinity. A negative zero is not: no integer is one."""
    number = np.float64(value)
    return number if number == np.floor(number) and math.copysign(1.0, number) > 0 else np.inf


@kernel
def digest_csr(indptr, indices, data, sums, digests, largest):
    """Describe each CSR row.

    Parameters
    ----------
    indptr, indices, data
        The rows.
    sums
        Their sums, shape (n_rows,), float64.
    digests
        Which columns hold which values, in whatever order: mixed words that are added up, without carry.
        Shape (n_rows,), uint64.
    largest
        Their largest values, if all are counts; else infinity. Shape (n_rows,), float64.
    """
    for i in range(len(indptr) - 1):
        total = most = 0.0
        digest = np.uint64(0)
        for k in range(indptr[i], indptr[i + 1]):
            total += data[k]
            most = max(most, _count(data[k]))
            digest += mix(_word(data[k]) ^ mix(np.uint64(indices[k])))
        sums[i] = total
        digests[i] = digest
        largest[i] = most


@kernel
def digest_dense(block, sums, digests, largest):
    """Describe each row of `block`, as `digest_csr` does; zeros do not count, but negative ones do."""
    for i in range(block.shape[0]):
        total = most = 0.0
        digest = np.uint64(0)
        for k in range(block.shape[1]):
            value = block[i, k]
            most = max(most, _count(value))
            if value != 0:
                total += value
                digest += mix(_word(value) ^ mix(np.uint64(k)))
        sums[i] = total
        digests[i] = digest
        largest[i] = most

"""Digests of matrix rows, for comparing matrices, and largest counts, for choosing the data type of the counts."""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import mix

_LIMIT = 2.0**63


@kernel
def _word(value):
    """Return 64 bits that identify a value, equal for every data type that represents it."""
    if value == np.floor(value) and -_LIMIT <= value < _LIMIT:
        return np.uint64(np.int64(value))
    # For a fractional value, return the bits of its float64, mixed so that they do not coincide with the bits of a
    # whole number.
    return mix(np.float64(value).view(np.uint64))


@kernel
def _count(value):
    """Return `value` as float64 if it is a count (-0.0 is not), otherwise infinity."""
    number = np.float64(value)
    return number if number == np.floor(number) and math.copysign(1.0, number) > 0 else np.inf


@kernel
def digest_csr(indptr, indices, data, sums, digests, largest):
    """Write the sum, digest and largest value of each CSR row; the largest value is infinite unless all are counts."""
    # The digest is the sum, modulo 2**64, of a 64-bit hash of the column and value of each nonzero.
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
    """Write the outputs of `digest_csr` for each row of a dense `block`."""
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

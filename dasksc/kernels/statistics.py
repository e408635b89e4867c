"""Statistics of rows: moments of columns, totals, and digests for comparing matrices.

Common parameters
-----------------
indptr, columns, values
    CSR rows: shapes (n_rows + 1,), (nnz,) and (nnz,).
groups
    Group of each row, shape (n_rows,), int64.
"""

from __future__ import annotations

import math

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import mix

_LIMIT = 2.0**63


@kernel
def add_moments(indptr, columns, values, groups, order, moments):
    """Add nonzero values to `moments`, shape (n_groups, n_vars, 4), float64, row by row in `order`."""
    # The four entries are the number of nonzeros, the first nonzero (0 if it is not finite), the sum of the differences
    # from it, and the sum of the squared differences. The differences keep precision if the mean is large.
    n_vars = moments.shape[1]
    flat = moments.reshape(-1)
    for place in range(len(order)):
        i = order[place]
        begin = np.uint64(groups[i] * n_vars)
        for k in range(np.uint64(indptr[i]), np.uint64(indptr[i + 1])):
            value = np.float64(values[k])
            if value == 0:
                continue
            at = (begin + np.uint64(columns[k])) * np.uint64(4)
            if flat[at] == 0 and math.isfinite(value):
                flat[at + np.uint64(1)] = value
            difference = value - flat[at + np.uint64(1)]
            flat[at] += 1
            flat[at + np.uint64(2)] += difference
            flat[at + np.uint64(3)] += difference * difference


@kernel
def add_rows(indptr, columns, values, masks, totals, counts):
    """Write the total of each row, and those of the columns in each of `masks`, into `totals`; count its nonzeros."""
    for i in range(len(counts)):
        total = 0.0
        count = 0
        for k in range(indptr[i], indptr[i + 1]):
            total += values[k]
            count += values[k] != 0
        totals[i, 0] = total
        counts[i] = count
        for j in range(masks.shape[0]):
            total = 0.0
            for k in range(indptr[i], indptr[i + 1]):
                if masks[j, columns[k]]:
                    total += values[k]
            totals[i, 1 + j] = total


@kernel
def add_clipped(indptr, columns, values, groups, bounds, sums):
    """Clip values at `bounds`, shape (n_groups, n_vars), and add them and their squares to `sums`."""
    for i in range(len(groups)):
        group = groups[i]
        for k in range(indptr[i], indptr[i + 1]):
            column = columns[k]
            value = min(np.float64(values[k]), bounds[group, column])
            sums[group, column, 0] += value
            sums[group, column, 1] += value * value


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
    # Digests serve to compare matrices, and largest values to choose the data type of counts.
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

"""Molecule counts of synthetic cells, drawn from the expression profiles of their groups."""

from __future__ import annotations

import numpy as np

from dasksc.kernels.compiled import kernel
from dasksc.kernels.permute import bits, stream

_U32 = np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)
_ALWAYS = np.uint32(0xFFFFFFFF)


@kernel
def fill_alias_table(share, keep, other):
    """Fill the alias table of a distribution; `share`, the probabilities times n, is overwritten."""
    # A draw takes one random word. Its high half selects a uniform index i. If its low half exceeds keep[i], the result
    # is other[i] instead of i. (Walker: An efficient method for generating discrete random variables with general
    # distributions, ACM Trans. Math. Softw. 3, 1977; Vose: A linear algorithm for generating random numbers with a
    # given distribution, IEEE Trans. Softw. Eng. 17, 1991.)
    n = share.shape[0]
    stack = np.empty(n, dtype=np.int32)  # indices with share < 1 from the left, the others from the right
    n_poor, n_rich = 0, 0
    for i in range(n):
        if share[i] < 1:
            stack[n_poor] = i
            n_poor += 1
        else:
            n_rich += 1
            stack[n - n_rich] = i
    while n_poor and n_rich:
        n_poor -= 1
        poor, rich = stack[n_poor], stack[n - n_rich]
        keep[poor] = np.uint32(share[poor] * 4294967295.0)
        other[poor] = rich
        share[rich] -= 1 - share[poor]
        if share[rich] < 1:
            n_rich -= 1
            stack[n_poor] = rich
            n_poor += 1
    for i in range(n_poor):
        keep[stack[i]], other[stack[i]] = _ALWAYS, stack[i]
    for i in range(n - n_rich, n):
        keep[stack[i]], other[stack[i]] = _ALWAYS, stack[i]


@kernel
def draw_cells(key, first_cell, groups, depths, keep, other, indices, data, total):
    """Draw molecules of each cell until it has `depths` different genes, as CSR rows with sorted indices."""
    # Each cell has a random stream of its own, so its counts depend only on the key, the alias tables, and the cell's
    # number, group and depth. `indices` and `data` have one element more than is used.
    n_genes = keep.shape[1]
    counts = np.zeros(n_genes, dtype=np.int32)
    end = 0
    for cell in range(depths.shape[0]):
        keep_of, other_of = keep[groups[cell]], other[groups[cell]]
        cell_key = stream(key, first_cell + cell + 1)
        seen, molecules = 0, 0
        while seen < depths[cell]:
            word = bits(cell_key, molecules)
            gene = np.int64(((word >> _U32) * np.uint64(n_genes)) >> _U32)
            if (word & _LOW_32) > keep_of[gene]:
                gene = np.int64(other_of[gene])
            seen += counts[gene] == 0
            counts[gene] += 1
            molecules += 1
        total[cell] = molecules
        for column in range(n_genes):  # branch-free: the next gene overwrites a count of 0
            indices[end] = column
            data[end] = counts[column]
            end += counts[column] > 0
            counts[column] = 0

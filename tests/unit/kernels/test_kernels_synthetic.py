"""Alias tables and drawn cells: their distributions, and equality with a pure-Python counterpart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.kernels import permute
from dasksc.kernels.synthetic import draw_cells, fill_alias_table

pytestmark = pytest.mark.core

KEY = np.uint64(12345)


def tables_of(profiles):
    keep, other = np.empty(profiles.shape, np.uint32), np.empty(profiles.shape, np.int32)
    for i, profile in enumerate(profiles):
        fill_alias_table(profile * len(profile), keep[i], other[i])
    return keep, other


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_an_alias_table_holds_the_distribution_it_was_filled_with(weights):
    share = np.array(weights) / np.sum(weights)
    (keep,), (other,) = tables_of(share[None])
    n = len(share)
    assert ((other >= 0) & (other < n)).all()
    kept = (keep.astype(np.float64) + 1) / 2**32
    held = np.bincount(other, 1 - kept, minlength=n) + kept
    np.testing.assert_allclose(held / n, share, atol=1e-8)


def twin(first_cell, groups, depths, keep, other):
    """Return the rows of the kernel as dicts of counts, computed draw by draw."""
    n_genes = keep.shape[1]
    for i, (group, depth) in enumerate(zip(groups, depths, strict=True)):
        key, counts, n = np.uint64(permute.stream(KEY, first_cell + i + 1)), {}, 0
        while len(counts) < depth:
            word = int(permute.bits(key, n))
            gene = ((word >> 32) * n_genes) >> 32
            if (word & 0xFFFFFFFF) > keep[group, gene]:
                gene = int(other[group, gene])
            counts[gene] = counts.get(gene, 0) + 1
            n += 1
        yield counts


@pytest.mark.parametrize("group_dtype", [np.int8, np.int32])
def test_cells_equal_those_of_a_plain_loop(group_dtype):
    rng = np.random.default_rng(0)
    profiles = rng.lognormal(0, 2, (3, 40))
    keep, other = tables_of(profiles / profiles.sum(axis=1, keepdims=True))
    groups = rng.integers(0, 3, 25).astype(group_dtype)
    depths = rng.integers(1, 12, 25).astype(np.int32)
    nnz = depths.sum()
    indices, data, total = np.empty(nnz + 1, np.int32), np.empty(nnz + 1, np.float32), np.empty(25, np.float32)
    draw_cells(KEY, 7, groups, depths, keep, other, indices, data, total)
    expected = [sorted(counts.items()) for counts in twin(7, groups, depths, keep, other)]
    assert list(zip(indices[:nnz].tolist(), data[:nnz].tolist(), strict=True)) == [p for row in expected for p in row]
    assert total.tolist() == [sum(count for _, count in row) for row in expected]

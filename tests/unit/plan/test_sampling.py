"""Draws of the strategies, and their errors for invalid arguments."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

import dasksc
from dasksc import BlockShuffling, BlockWeightedSampling, ClassBalancedSampling, InputError, Streaming
from dasksc.kernels import draw as draw_kernels
from dasksc.plan import samplers
from dasksc.plan.binding import bind
from dasksc.plan.keys import Purpose, epoch_keys
from dasksc.plan.labels import encode_labels
from dasksc.plan.samplers import Sampler
from tests.support.sets import Own
from tests.support.twins import ERROR

pytestmark = pytest.mark.core


def sampler_of(strategy: dasksc.SamplingStrategy, n: int, obs: Any = None) -> Sampler:
    return bind(strategy, range(n), n, lambda key: obs[key])


def rows_of(strategy: dasksc.SamplingStrategy, n: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    sampler = sampler_of(strategy, n)
    return sampler.draw(seed, epoch).rows(np.arange(sampler.n_rows, dtype=np.int64))


def counts_of(strategy: dasksc.SamplingStrategy, n: int, n_epochs: int = 1) -> NDArray[np.int64]:
    return sum((np.bincount(rows_of(strategy, n, epoch=e), minlength=n) for e in range(n_epochs)), np.zeros(n, int))


def assert_drawn_by(counts: NDArray[np.int64], weights: Any) -> None:
    """Test counts against weights by chi-square; rows with few expected draws are pooled."""
    weights = np.asarray(weights, dtype=float)
    possible = np.flatnonzero(weights)
    assert not np.delete(counts, possible).any()
    possible = possible[np.argsort(weights[possible])]
    expected = weights[possible] / weights.sum() * counts.sum()
    # Bins with at least ten expected draws; a short bin at the end joins the one before.
    bins = np.unique(np.floor(np.cumsum(expected) / 10), return_inverse=True)[1]
    observed, expected = np.bincount(bins, counts[possible]), np.bincount(bins, expected)
    few = np.flatnonzero(expected < 5)
    if len(few):
        keep = np.setdiff1d(np.arange(len(expected)), few)
        observed[keep[-1]] += observed[few].sum()
        expected[keep[-1]] += expected[few].sum()
        observed, expected = observed[keep], expected[keep]
    assert observed.sum() == counts.sum()
    if len(expected) > 1:
        assert stats.chisquare(observed, expected).pvalue > ERROR


WEIGHTS = {
    "equal": np.ones(1000),
    "integers": np.arange(1, 301),
    "booleans": np.arange(300) % 3 == 0,
    "float32": np.linspace(0, 1, 500, dtype=np.float32),
    "zeros at the ends": np.concatenate([np.zeros(100), np.ones(50), np.zeros(100)]),
    "one huge weight": np.where(np.arange(1000) == 700, 1e6, 1.0),
    "denormal": np.arange(1, 200) * 5e-324,
    "from denormal to large": np.repeat([5e-324, 1e-300, 1.0, 2.0], 60),
    "large": np.full(100, 1e306),
    "one row": np.array([0.25]),
    "65 rows": np.arange(65) + 1.0,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_are_drawn_in_proportion_to_their_weights(name: str) -> None:
    weights = WEIGHTS[name]
    strategy = BlockWeightedSampling(8, weights=weights, total_size=20_000)
    assert_drawn_by(counts_of(strategy, len(weights)), weights)


@given(n=st.integers(1, 400), data=st.data())
def test_without_replacement_no_row_comes_twice(n: int, data: st.DataObject) -> None:
    weights = np.array(data.draw(st.lists(st.sampled_from([0.0, 5e-324, 1.0, 3.0, 1e300]), min_size=n, max_size=n)))
    positive = int(np.count_nonzero(weights))
    total_size = data.draw(st.integers(1, max(1, positive)))
    strategy = BlockWeightedSampling(8, weights=weights, total_size=total_size, replace=False)
    if not positive:
        with pytest.raises(InputError, match="positive, finite sum"):
            sampler_of(strategy, n)
        return
    rows = rows_of(strategy, n)
    assert len(np.unique(rows)) == len(rows) == total_size
    assert np.all(weights[rows] > 0)


@pytest.mark.parametrize("kind", ["even", "rising", "one in 1,000", "by the sample's step", "huge and denormal"])
def test_without_replacement_the_largest_keys_are_taken(kind: str) -> None:
    # There are more rows than sampled keys, so the smallest drawn key is estimated from the sample.
    n = 4 * samplers._SAMPLED_KEYS
    row = np.arange(n)
    weights = {
        "even": np.ones(n),
        "rising": row + 1.0,
        "one in 1,000": np.where(row % 1000 == 7, 1.0, 0.0),
        "by the sample's step": np.where(row % 4 == 0, 1e-6, 1.0),
        "huge and denormal": np.where(row % 7 == 0, 1e300, 5e-324),
    }[kind]
    keys = np.empty(n)
    key = epoch_keys(3, 1, Purpose.DRAW, 0)[0]
    draw_kernels.gumbel_keys(row, weights, np.empty(0), key, keys)
    for total_size in (1, 200, np.count_nonzero(weights) // 2, np.count_nonzero(weights)):
        strategy = BlockWeightedSampling(8, weights=weights, total_size=int(total_size), replace=False)
        rows = rows_of(strategy, n, seed=3, epoch=1)
        np.testing.assert_array_equal(rows, np.sort(np.argsort(keys)[n - total_size :]))


def inclusion(weights: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the exact probability of each row to be among `size` successive draws without replacement."""
    chances = np.zeros(len(weights))
    for order in permutations(np.flatnonzero(weights), size):
        chance, remaining = 1.0, weights.sum()
        for row in order:
            chance *= weights[row] / remaining
            remaining -= weights[row]
        chances[list(order)] += chance
    return chances


def test_rounds_draw_without_replacement_inside_each() -> None:
    weights = np.array([1.0, 2.0, 3.0, 5.0])
    strategy = BlockWeightedSampling(8, weights=weights, total_size=7, replace=False, sampling_size=3)
    n_epochs = 3000
    counts = np.zeros(4)
    for epoch in range(n_epochs):
        times = np.bincount(rows_of(strategy, 4, epoch=epoch), minlength=4)
        assert times.sum() == 7
        assert times.max() <= 3  # rounds of 3, 3 and 1
        counts += times
    chances = 2 * inclusion(weights, 3) + inclusion(weights, 1)
    # Variances of independent rounds are additive.
    variance = 2 * inclusion(weights, 3) * (1 - inclusion(weights, 3)) + inclusion(weights, 1) * (
        1 - inclusion(weights, 1)
    )
    z = stats.norm.isf(ERROR / 2 / 4)
    assert np.all(np.abs(counts / n_epochs - chances) <= z * np.sqrt(variance / n_epochs))


CLASS_SIZES = np.array([1000, 500, 30, 3])
LABELS = np.repeat(np.arange(4), CLASS_SIZES)


def test_a_temperature_takes_class_weights_and_leaves_out_what_has_no_label() -> None:
    labels = np.repeat([0, 1, 2, -1], [900, 90, 10, 500])
    strategy = ClassBalancedSampling(
        labels, 8, temperature=2.0, class_weights={1: 3.0, 2: 0.0}, replace=False, total_size=40
    )
    # Shares are proportional to the square roots of the class sizes, 10 : sqrt(10), times the class weights, 1 and 3.
    exact = 40 * np.array([10, 3 * np.sqrt(10)]) / (10 + 3 * np.sqrt(10))
    drawn = np.bincount(labels[rows_of(strategy, len(labels))], minlength=3)
    assert drawn[2] == 0
    assert drawn.sum() == 40
    assert (abs(drawn[:2] - exact) < 1).all()


def shares(smoothing: float, factors: Any = 1.0) -> NDArray[np.float64]:
    present = CLASS_SIZES > 0
    share = ((1 - smoothing) / present.sum() + smoothing * CLASS_SIZES / CLASS_SIZES.sum()) * factors
    return share / share.sum()


@pytest.mark.parametrize(("smoothing", "block_size"), [(0.0, 8), (0.3, 1), (1.0, 8)])
def test_classes_are_drawn_by_the_formula(smoothing: float, block_size: int) -> None:
    strategy = ClassBalancedSampling(LABELS, block_size, smoothing=smoothing, total_size=40_000)
    weights = (shares(smoothing) / CLASS_SIZES)[LABELS]
    counts = counts_of(strategy, len(LABELS))
    assert_drawn_by(np.bincount(LABELS, counts), shares(smoothing))
    assert_drawn_by(counts, weights)


def test_without_replacement_each_class_gives_its_exact_share() -> None:
    rows = rows_of(ClassBalancedSampling(LABELS, 8, replace=False), len(LABELS))
    assert np.bincount(LABELS[rows]).tolist() == [3, 3, 3, 3]
    assert len(np.unique(rows)) == 12
    rows = rows_of(ClassBalancedSampling(LABELS, 8, replace=False, total_size=10), len(LABELS))
    assert sorted(np.bincount(LABELS[rows])) == [2, 2, 3, 3]
    rows = rows_of(ClassBalancedSampling(LABELS, 8, replace=False, smoothing=1.0), len(LABELS))
    assert np.bincount(LABELS[rows]).tolist() == CLASS_SIZES.tolist()


def of_every_type(labels: list[int]) -> dict[str, Any]:
    """Return the labels in every type that can hold them, with those below 0 missing."""
    import dask.array as da
    import torch

    array = np.array(labels, dtype=np.int64)
    missing = array < 0
    floats = np.where(missing, np.nan, array)
    objects: Any = [None if none else label for label, none in zip(labels, missing, strict=True)]
    same = {
        "int64": array,
        "float64 with -1": array.astype(np.float64),
        "float64": floats,
        "long double": floats.astype(np.longdouble),
        "read-only, strided": np.broadcast_to(np.repeat(array, 2), (2 * len(array),))[::2],
        "list": labels,
        "objects": np.array(objects, dtype=object),
        "series": pd.Series(array, index=np.arange(len(array)) + 7),
        "Int64": pd.array(objects, dtype="Int64"),
        "Float64": pd.array(objects, dtype="Float64"),
        "masked": np.ma.masked_array(np.maximum(array, 0), mask=missing),
        "tensor": torch.from_numpy(array),
        "categorical": pd.Categorical(objects),
    }
    for dtype in ("i1", "i2", "i4", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u4", "f2", "f4", ">f4", ">f8"):
        kept = floats if "f" in dtype else array
        with np.errstate(invalid="ignore", over="ignore"):
            cast = kept.astype(dtype)
        if np.array_equal(cast.astype(np.float64), kept, equal_nan=True):
            same[dtype] = cast
    lazy = {"lazy int64": da.from_array(array, chunks=3), "lazy float64": da.from_array(floats, chunks=3)}
    lazy["lazy masked"] = da.ma.masked_array(da.from_array(np.maximum(array, 0), chunks=3), mask=missing)
    texts = np.array([f"type {label}" for label in labels])
    words = {"text": texts, "bytes": texts.astype("S"), "string": pd.array(texts, dtype="string")}
    if not missing.any():
        same |= words | {"lazy text": da.from_array(texts, chunks=3), "text categories": pd.Categorical(texts)}
        if set(labels) <= {0, 1}:
            same |= {"bool": array == 1, "boolean": pd.array(array == 1, dtype="boolean")}
            same["lazy bool"] = da.from_array(array == 1, chunks=3)
    return same | lazy


@settings(max_examples=settings.default.max_examples // 5)  # each example has every type
@given(
    labels=st.lists(
        st.sampled_from([-5, -1, 0, 1, 2, 7]) | st.sampled_from([-1, 1_000_005, 1_000_007]) | st.integers(0, 1),
        min_size=1,
        max_size=12,
    )
    | st.lists(st.integers(0, 1), min_size=1, max_size=6),
    few=st.booleans(),
)
def test_labels_are_the_same_classes_in_any_type_and_by_every_path(labels: list[int], few: bool) -> None:
    if few:
        labels = [label % 3 for label in labels]
    for name, values in of_every_type(labels).items():
        codes, names = encode_labels(values)
        assert len(codes) == len(labels), name
        found = [None if code < 0 else names[code] for code in codes.tolist()]
        is_text = any(isinstance(one, str | bytes) for one in found)
        expected = [None if label < 0 else f"type {label}" if is_text else label for label in labels]
        assert [one.decode() if isinstance(one, bytes) else one for one in found] == expected, name


def test_rows_whose_codes_are_no_label_are_never_drawn() -> None:
    for labels in (np.array([-1, 1000005, -1, 1000007, 1000005]), np.array([-5, 0, -5, 1, 0])):
        assert_drawn_by(counts_of(ClassBalancedSampling(labels, 1, total_size=3000), 5), [0, 0.5, 0, 1, 0.5])


MASK = np.arange(30) % 4 == 1
SUBSETS: dict[str, tuple[Any, list[int]]] = {
    "all": (None, list(range(30))),
    "a slice": (slice(5, 20), list(range(5, 20))),
    "a slice backwards": (slice(None, None, -3), list(range(2, 30, 3))),
    "a range": (range(4, 9), list(range(4, 9))),
    "a mask": (MASK, np.flatnonzero(MASK).tolist()),
    "sorted": (np.array([2, 3, 17], dtype=np.int32), [2, 3, 17]),
    "unsorted": ([17, 3, 29, 0], [0, 3, 17, 29]),
    "repeated": ([4, 4, 5], [4, 4, 5]),
    "a series": (pd.Series([3, 1]), [1, 3]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_indices_say_which_rows_are_drawn(name: str) -> None:
    indices, expected = SUBSETS[name]
    assert rows_of(Streaming(indices), 30).tolist() == expected
    assert np.sort(rows_of(BlockShuffling(4, indices=indices), 30)).tolist() == expected
    if expected:
        drawn = set(rows_of(BlockWeightedSampling(8, indices=indices, total_size=2000), 30).tolist())
        assert drawn == set(expected)


@pytest.mark.parametrize(
    ("name", "block_size"), [(name, (1, 8)[i % 2]) for i, (name, (_, rows)) in enumerate(SUBSETS.items()) if rows]
)
def test_weights_and_labels_may_be_given_for_all_rows_or_for_those_drawn_from(name: str, block_size: int) -> None:
    indices, expected = SUBSETS[name]
    full = np.arange(30) % 5 + 1.0
    given_rows = np.arange(30)[indices] if indices is not None else np.arange(30)
    weights = np.bincount(expected, minlength=30) * full
    for entries in (full, full[given_rows]):
        strategy = BlockWeightedSampling(block_size, indices=indices, weights=entries, total_size=20_000)
        assert_drawn_by(counts_of(strategy, 30), weights)
    labels = np.arange(30) // 10
    wanted = np.bincount(expected, minlength=30) / np.maximum(1, np.bincount(labels[expected], minlength=3))[labels]
    for entries in (labels, labels[given_rows]):
        strategy_ = ClassBalancedSampling(entries, block_size, indices=indices, total_size=20_000)
        assert_drawn_by(counts_of(strategy_, 30), wanted)


def test_no_two_seeds_and_epochs_share_a_key() -> None:
    keys = [
        int(key)
        for seed in [0, 1, 2, 3, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
        for epoch in [*range(20), 2**32 - 1]
        for purpose in Purpose
        for more in ((), (0,), (1,))
        for key in epoch_keys(seed, epoch, purpose, *more, n=3)
    ]
    assert len(set(keys)) == len(keys)


def test_a_users_strategy_needs_two_methods_only() -> None:
    assert rows_of(Own([3, 1, 1]), 5).tolist() == [3, 1, 1]
    assert rows_of(Own([]), 5).tolist() == []
    with pytest.raises(NotImplementedError, match="SamplingStrategy.*get_len"):
        sampler_of(dasksc.SamplingStrategy(), 5)


def test_digests_tell_samplers_apart() -> None:
    strategies = [
        Streaming(),
        Streaming(shuffle=True),
        Streaming(slice(0, 90)),
        Streaming(slice(1, 91)),
        BlockShuffling(8),
        BlockShuffling(9),
        BlockShuffling(8, drop_last=True),
        BlockShuffling(8, indices=np.arange(0, 100, 2)),
        BlockWeightedSampling(8),
        BlockWeightedSampling(8, total_size=99),
        BlockWeightedSampling(8, replace=False),
        BlockWeightedSampling(8, replace=False, sampling_size=10),
        BlockWeightedSampling(8, weights=np.arange(100)),
        BlockWeightedSampling(8, weights=np.arange(100) + 1),
        BlockWeightedSampling(8, weights=np.arange(100, dtype=float)),
        ClassBalancedSampling(np.arange(100) % 3, 8),
        ClassBalancedSampling(np.arange(100) % 4, 8),
        ClassBalancedSampling(np.arange(100) % 3, 8, smoothing=0.5),
        ClassBalancedSampling(np.arange(100) % 3, 8, replace=False),
        Own(np.arange(100)),
        Own(np.arange(99)),
    ]
    digests = [sampler_of(strategy, 100).digest() for strategy in strategies]
    assert len(set(digests)) == len(digests)
    assert digests == [sampler_of(strategy, 100).digest() for strategy in strategies]

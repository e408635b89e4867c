"""Sets of cells: their content, the draws of groups and controls, ranks, coverage and resuming."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dasksc.errors import InputError
from dasksc.plan.deal import ConsumedSegment
from dasksc.plan.sets import SetSampler
from tests.support.sets import CONTROL, bound, plan_of, screen, sets_of
from tests.support.twins import ERROR

pytestmark = pytest.mark.core

SIZE = 6


@given(
    seed=st.integers(0, 50),
    n=st.integers(200, 600),
    is_sorted=st.booleans(),
    replace=st.booleans(),
    match=st.sampled_from([None, ["line", "batch"], ["batch"]]),
    n_controls=st.integers(1, 3),
    n_rare=st.integers(1, SIZE - 1),
)
def test_sets_of_scattered_rows_are_of_whole_groups_and_match(
    seed: int, n: int, is_sorted: bool, replace: bool, match: list[str] | None, n_controls: int, n_rare: int
) -> None:
    obs = screen(n, is_sorted=is_sorted, seed=seed)
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(n, 3 * n // 4, replace=False))
    # One group of HepG2, the first cell line, has too few selected rows for a set.
    is_rare = ((obs.line == "HepG2") & (obs.gene == "A")).to_numpy()
    indices = np.setdiff1d(indices, np.flatnonzero(is_rare)[n_rare:])
    agree = ["line"] if match is None else match
    sampler = bound(
        obs,
        ["line", "gene"],
        SIZE,
        control=CONTROL,
        match=match,
        n_controls=n_controls,
        replace=replace,
        indices=rng.permutation(indices),
        incomplete="drop",
        unmatched="drop",
    )
    own = obs.iloc[indices]
    matched = set(own[own.gene == "ctrl"].set_index(agree).index)
    targets = own[(own.gene != "ctrl") & own.set_index(agree).index.isin(matched)]
    counts = targets.groupby(["line", "gene"], observed=True).size()
    expected = counts[counts >= SIZE]
    assert list(sampler.table.itertuples(index=False, name=None)) == list(expected.index)
    assert sampler.accounts["n_cells"] == expected.sum()
    assert sampler.accounts["n_short_groups"] == (counts < SIZE).sum()
    assert sampler.n_sets == (-(-expected.sum() // SIZE) if replace else (expected // SIZE).sum())
    allowed = set(targets.index)
    by = agree[0] if len(agree) == 1 else agree  # a single column gives keys that are values, not tuples
    pools = {key: set(rows) for key, rows in own[own.gene == "ctrl"].groupby(by, observed=True).groups.items()}
    for group, rows, controls in sets_of(plan_of(sampler)):
        assert set(rows) <= allowed
        assert set(obs.loc[list(rows), ["line", "gene"]].itertuples(index=False, name=None)) == {expected.index[group]}
        assert len(set(rows)) == SIZE
        for i, row in enumerate(rows):
            key = tuple(obs.loc[row, agree]) if len(agree) > 1 else obs.loc[row, agree[0]]
            assert set(controls[i * n_controls : (i + 1) * n_controls]) <= pools[key]


@pytest.mark.parametrize("replace", [False, True])
def test_a_group_smaller_than_a_set_repeats_its_cells_evenly(replace: bool) -> None:
    obs = pd.DataFrame({"gene": ["A"] * 3 + ["B"] * 40})
    for group, rows, _ in sets_of(
        plan_of(bound(obs, "gene", 8, replace=replace, **({"n_sets": 50} if replace else {})))
    ):
        if group == 0:
            assert sorted(Counter(rows).values()) == [2, 3, 3]
            assert set(rows) == {0, 1, 2}
        elif replace:
            assert len(set(rows)) == 8


def test_incomplete_sets_are_dropped_or_filled_without_repeats() -> None:
    obs = pd.DataFrame({"gene": ["A"] * 5 + ["B"] * 20 + ["C"] * 24})
    filled = list(sets_of(plan_of(bound(obs, "gene", 8, replace=False))))
    assert Counter(group for group, _, _ in filled) == {0: 1, 1: 3, 2: 3}
    assert {row for _, rows, _ in filled for row in rows} == set(range(49))
    assert all(len(set(rows)) == 8 for group, rows, _ in filled if group)
    dropped = bound(obs, "gene", 8, replace=False, incomplete="drop")
    found = list(sets_of(plan_of(dropped)))
    assert dropped.table.gene.tolist() == ["B", "C"]
    assert Counter(group for group, _, _ in found) == {0: 2, 1: 3}
    rows = [row for _, rows, _ in found for row in rows]
    assert len(set(rows)) == len(rows) == 40
    # Another epoch leaves out other rows.
    later = {row for _, rows, _ in sets_of(plan_of(dropped, epoch=1)) for row in rows}
    assert later != set(rows)


def group_counts(sampler: SetSampler) -> NDArray[np.int64]:
    return np.bincount([group for group, _, _ in sets_of(plan_of(sampler, 100))], minlength=len(sampler.table))


def test_groups_are_drawn_by_cells_or_alike() -> None:
    obs = screen()
    cells = obs.gene.value_counts().sort_index()
    by_cells = group_counts(bound(obs, "gene", 4, n_sets=5_000))
    assert stats.chisquare(by_cells, cells / cells.sum() * 5_000).pvalue > ERROR
    alike = group_counts(bound(obs, "gene", 4, n_sets=5_000, weights="groups"))
    assert stats.chisquare(alike).pvalue > ERROR


SHAPES = {
    "replace": st.booleans(),
    "drop_last": st.booleans(),
    "equal_ranks": st.booleans(),
    "world_size": st.integers(1, 5),
    "n": st.integers(20, 400),
    "set_size": st.sampled_from([1, 3, 8]),
}


@given(**SHAPES)
def test_ranks_share_the_sets_of_an_epoch(
    replace: bool, drop_last: bool, equal_ranks: bool, world_size: int, n: int, set_size: int
) -> None:
    sampler = bound(screen(n), "gene", set_size, control=CONTROL, replace=replace)
    plan = plan_of(sampler, drop_last=drop_last, equal_ranks=equal_ranks, world_size=world_size)
    everything = Counter(sets_of(plan_of(sampler, sets_of_batch=1)))
    assert everything.total() == sampler.n_sets
    ranks = [list(sets_of(plan.of_rank(rank))) for rank in range(world_size)]
    yielded = Counter(one for rank in ranks for one in rank)
    n_rows = set_size * yielded.total()
    assert n_rows == plan.n_rows + plan.n_padded - plan.n_dropped
    assert n_rows == sum(plan.of_rank(rank).n_rank_rows for rank in range(world_size))
    assert plan.n_control_rows == plan.n_rows
    assert set(yielded) <= set(everything)
    if drop_last:
        assert plan.n_padded == 0
    else:
        assert set(yielded) == set(everything)
        extra = yielded - everything
        assert extra.total() * set_size == plan.n_padded
        assert plan.n_padded <= (world_size - 1) * set_size
    if equal_ranks:
        assert len({len(rank) for rank in ranks}) == 1


@given(**SHAPES, then=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])), data=st.data())
def test_an_epoch_left_anywhere_is_completed_by_other_ranks(
    replace: bool,
    drop_last: bool,
    equal_ranks: bool,
    world_size: int,
    n: int,
    set_size: int,
    then: tuple[int, int],
    data: st.DataObject,
) -> None:
    sampler = bound(screen(n), "gene", set_size, control=CONTROL, replace=replace)
    plan = plan_of(sampler, drop_last=drop_last, equal_ranks=equal_ranks, world_size=world_size)
    n_done = data.draw(st.integers(0, min(plan.of_rank(rank).n_batches for rank in range(world_size))))
    done = [list(sets_of(plan.of_rank(rank)))[: n_done * 2] for rank in range(world_size)]
    segment = ConsumedSegment(world_size=world_size, batch_size=plan.batch_size, fetch_factor=3, n_batches=n_done)
    n_ranks, sets_of_batch = then
    rest = plan_of(
        sampler, sets_of_batch, equal_ranks=False, drop_last=drop_last, world_size=n_ranks, consumed=(segment,)
    )
    if equal_ranks:
        rest = plan_of(sampler, sets_of_batch, drop_last=drop_last, world_size=n_ranks, consumed=(segment,))
    later = Counter(one for rank in range(n_ranks) for one in sets_of(rest.of_rank(rank)))
    everything = Counter(sets_of(plan_of(sampler, sets_of_batch=1)))
    before = Counter(one for rank in done for one in rank)
    assert set(later) | set(before) <= set(everything)
    if not drop_last:
        assert set(later) | set(before) == set(everything)
        n_twice = (later + before).total() - everything.total()
        # With equal_ranks=True, each of the two segments repeats at most one set per rank.
        assert n_twice <= ((world_size - 1) + (n_ranks - 1) if equal_ranks else 0)
        assert rest.n_rows + rest.n_padded >= set_size * later.total()


def test_digests_tell_samplers_apart() -> None:
    obs = screen()
    control: dict[str, Any] = {"control": CONTROL}
    options = [
        {},
        {"set_size": 4},
        {"by": "line"},
        control,
        control | {"n_controls": 2},
        control | {"match": ["batch"]},
    ]
    options += [{"replace": False}, {"weights": "groups"}, {"n_sets": 7}, {"indices": slice(0, 1500)}]
    digests = [[bound(obs, **({"by": "gene", "set_size": 8} | one)).digest() for one in options] for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(options)


def with_gap() -> pd.DataFrame:
    """Return a screen without controls in RPE1, and in batch z of K562."""
    obs = screen()
    is_gap = (obs.gene == "ctrl") & ((obs.line == "RPE1") | ((obs.line == "K562") & (obs.batch == "z")))
    return obs[~is_gap].reset_index(drop=True)


def test_unmatched_cells_are_refused_with_their_labels() -> None:
    obs = with_gap()
    n = int(((obs.line == "RPE1") & (obs.gene != "ctrl")).sum())
    with pytest.raises(InputError, match=f"{n}.*line='RPE1'.*unmatched='drop'"):
        bound(obs, ["line", "gene"], 8, control=CONTROL)


def test_unmatched_groups_are_dropped_and_counted() -> None:
    obs = with_gap()
    sampler = bound(obs, ["line", "gene"], 8, control=CONTROL, unmatched="drop")
    assert set(sampler.table.line) == {"HepG2", "K562"}
    assert sampler.accounts["n_unmatched_groups"] == 4
    assert sampler.accounts["n_unmatched_cells"] == ((obs.line == "RPE1") & (obs.gene != "ctrl")).sum()
    assert sampler.accounts["n_cells"] == ((obs.line != "RPE1") & (obs.gene != "ctrl")).sum()
    assert all((obs.line[list(rows)] != "RPE1").all() for _, rows, _ in sets_of(plan_of(sampler)))


@pytest.mark.parametrize("n_controls", [1, 9])
def test_controls_of_a_set_repeat_only_where_too_few_match(n_controls: int) -> None:
    obs = screen(400)
    pools = obs[obs.gene == "ctrl"].groupby(["line", "batch"], observed=True).size()
    sampler = bound(obs, "gene", 8, control=CONTROL, match=["line", "batch"], n_controls=n_controls, n_sets=60)
    n_repeated = 0
    for _, _, controls in sets_of(plan_of(sampler)):
        drawn = obs.iloc[list(controls)].groupby(["line", "batch"], observed=True)
        for pool, rows in drawn.groups.items():
            times = rows.value_counts()
            n_repeated += times.max() > 1
            assert times.max() == -(-len(rows) // pools[pool])
    assert (n_repeated > 0) == (n_controls == 9)


def test_cells_without_a_label_to_match_by_are_unmatched() -> None:
    obs = screen()
    obs["batch"] = obs.batch.where(obs.index % 10 != 0)
    n = int(((obs.gene != "ctrl") & obs.batch.isna()).sum())
    with pytest.raises(InputError, match=f"{n} of the cells"):
        bound(obs, "gene", 8, control=CONTROL, match="batch")
    dropped = bound(obs, "gene", 8, control=CONTROL, match="batch", unmatched="drop")
    assert dropped.accounts["n_unmatched_cells"] == n
    for _, rows, controls in sets_of(plan_of(dropped)):
        assert obs.batch[list(rows)].tolist() == obs.batch[list(controls)].tolist()


def test_cells_without_a_group_are_never_drawn(caplog: pytest.LogCaptureFixture) -> None:
    obs = screen()
    obs["gene"] = obs.gene.where(obs.index % 7 != 0)
    sampler = bound(obs, "gene", 8)
    assert sampler.accounts["n_unlabelled"] == obs.gene.isna().sum()
    assert "have no label in" in caplog.text
    assert not obs.gene[[row for _, rows, _ in sets_of(plan_of(sampler)) for row in rows]].isna().any()


@given(st.sampled_from(["mask", "rows", "slice"]), st.booleans())
def test_indices_restrict_targets_and_controls(kind: str, has_own: bool) -> None:
    obs = screen()
    rng = np.random.default_rng(1)
    mask = rng.random(2000) < 0.5
    indices: Any = {"mask": mask, "rows": rng.permutation(np.flatnonzero(mask)), "slice": slice(100, 900)}[kind]
    allowed = set(range(100, 900)) if kind == "slice" else set(np.flatnonzero(mask).tolist())
    own = np.arange(1000, 2000) if has_own else None
    sampler = bound(obs, "gene", 8, control=CONTROL, indices=indices, control_indices=own)
    for _, rows, controls in sets_of(plan_of(sampler)):
        assert set(rows) <= allowed
        assert set(controls) <= (allowed if own is None else set(range(1000, 2000)))


def labels_of(sampler: Any, name: str) -> list[Any]:
    return list(sampler.table[name])


@pytest.mark.parametrize("dtype", ["i1", "i8", "f4", "f8", "Int64", object])
def test_negative_whole_numbers_are_labels_like_others(dtype: Any) -> None:
    obs = pd.DataFrame({"day": pd.Series([-7, 3, -7, 0, -1, 3, -1, 0] * 3).astype(dtype)})
    sampler = bound(obs, "day", 2)
    assert labels_of(sampler, "day") == [-7, -1, 0, 3]
    assert sampler.accounts["n_unlabelled"] == 0
    assert all(
        set(obs.day[list(rows)]) == {labels_of(sampler, "day")[group]} for group, rows, _ in sets_of(plan_of(sampler))
    )
    matched = bound(obs.assign(gene=["ctrl", "A"] * 12, day=[-1] * 24), "gene", 2, control=CONTROL, match="day")
    assert matched.accounts["n_unmatched_cells"] == 0
    by_day = bound(obs, "day", 2, control={"day": -7}, match=[])
    assert {obs.day[row] for _, _, controls in sets_of(plan_of(by_day)) for row in controls} == {-7}


DAYS = pd.to_datetime(["2024-01-01", "2024-01-02", "2024-01-03"]).repeat(20)


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(DAYS),
        pd.Series(pd.Categorical(DAYS)),
        pd.Series(DAYS.tz_localize("UTC")),
        pd.Series(DAYS - DAYS[0] + np.timedelta64(1, "h")),
    ],
    ids=["days", "categories", "zone", "durations"],
)
def test_dates_and_durations_are_labels_of_controls(column: pd.Series[Any]) -> None:
    obs = pd.DataFrame({"day": column, "gene": list("abcd") * 15})
    day = pd.Index(column.iloc[20:21])
    sampler = bound(obs, "gene", 4, control={"day": day[:1]}, match=[])
    assert sampler.accounts["n_control_cells"] == 20
    assert all(set(controls) <= set(range(20, 40)) for _, _, controls in sets_of(plan_of(sampler)))

"""Sets of cells: their content, the draws of groups and controls, ranks, coverage and resuming.

Statistical tests use fixed seeds; `ERROR` is the probability that a perfect generator fails one of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dasksc import CellSets
from dasksc.errors import InputError, MissingKeyError
from dasksc.plan.deal import ConsumedSegment
from dasksc.plan.sets import SetSampler
from tests.support.sets import CONTROL, bound, plan_of, screen, sets_of

pytestmark = pytest.mark.core

ERROR = 1e-4


# --- Content of sets --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("n_controls", [1, 3])
@pytest.mark.parametrize("match", [None, ["line", "batch"], ["batch"]])
def test_sets_are_of_one_group_and_controls_match(
    is_sorted: bool, replace: bool, n_controls: int, match: list[str] | None
) -> None:
    obs = screen(is_sorted=is_sorted)
    sampler = bound(obs, ["line", "gene"], 16, control=CONTROL, match=match, replace=replace, n_controls=n_controls)
    agree = ["line"] if match is None else match
    n = 0
    for group, rows, controls in sets_of(plan_of(sampler)):
        n += 1
        own = obs.iloc[list(rows)]
        assert set(zip(own.line, own.gene, strict=True)) == {tuple(sampler.table.loc[group, ["line", "gene"]])}
        assert "ctrl" not in set(own.gene)
        beside = obs.iloc[list(controls)]
        assert set(beside.gene) == {"ctrl"}
        for name in agree:
            assert beside[name].tolist() == np.repeat(own[name].to_numpy(), n_controls).tolist()
        assert len(set(rows)) == len(rows)
        assert len(set(controls)) == len(controls)
    assert n == sampler.n_sets


def test_controls_are_targets_when_included() -> None:
    sampler = bound(screen(), "gene", 8, control=CONTROL, include_control=True)
    assert "ctrl" in set(sampler.table.gene)
    assert "ctrl" not in set(bound(screen(), "gene", 8, control=CONTROL).table.gene)


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


# --- Distributions ----------------------------------------------------------------------------------


def group_counts(sampler: SetSampler) -> NDArray[np.int64]:
    return np.bincount([group for group, _, _ in sets_of(plan_of(sampler))], minlength=len(sampler.table))


def test_groups_are_drawn_by_cells_alike_or_by_weight() -> None:
    obs = screen()
    cells = obs.gene.value_counts().sort_index()
    by_cells = group_counts(bound(obs, "gene", 4, n_sets=20_000))
    assert stats.chisquare(by_cells, cells / cells.sum() * 20_000).pvalue > ERROR
    alike = group_counts(bound(obs, "gene", 4, n_sets=20_000, weights="groups"))
    assert stats.chisquare(alike).pvalue > ERROR
    weights = {"A": 1.0, "B": 2.0, "C": 0.0, "D": 3, "ctrl": 4}
    weighted = group_counts(bound(obs, "gene", 4, n_sets=20_000, weights=weights))
    assert weighted[2] == 0
    kept = [0, 1, 3, 4]
    assert stats.chisquare(weighted[kept], np.array([1, 2, 3, 4]) * 2000).pvalue > ERROR


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("block_size", [1, 8])
def test_every_cell_of_a_group_and_every_matching_control_is_as_likely(is_sorted: bool, block_size: int) -> None:
    obs = screen(600, is_sorted=is_sorted)
    sampler = bound(obs, ["line", "gene"], 5, control=CONTROL, block_size=block_size, n_sets=60_000)
    targets, controls = np.zeros(600), np.zeros(600)
    for _, rows, own in sets_of(plan_of(sampler, 50)):
        targets[list(rows)] += 1
        controls[list(own)] += 1
    is_control = (obs.gene == "ctrl").to_numpy()
    assert not targets[is_control].any()
    assert not controls[~is_control].any()
    # With weights="cells", all targets are equally likely, as are all controls of a line. Cells of a block are drawn
    # together, so their counts are correlated and a chi-square test does not apply. Each count is compared with a
    # normal distribution instead.
    assert_even(targets[~is_control], per_set=5, block_size=block_size)
    for line in obs.line.unique():
        assert_even(controls[is_control & (obs.line == line).to_numpy()], per_set=5, block_size=block_size)


def assert_even(counts: NDArray[np.float64], per_set: int, block_size: int) -> None:
    # The variance of a count is at most its mean: each set draws a cell at most once.
    mean = counts.mean()
    z = (counts - mean) / np.sqrt(mean)
    assert np.abs(z).max() < stats.norm.isf(ERROR / len(counts) / 2)
    # A trend along storage order would reveal a favored position.
    blocks = counts[: len(counts) // block_size * block_size].reshape(-1, block_size).mean(axis=1)
    assert stats.spearmanr(np.arange(len(blocks)), blocks).pvalue > ERROR


# --- Ranks, coverage and resuming -------------------------------------------------------------------

SHAPES = {
    "replace": st.booleans(),
    "drop_last": st.booleans(),
    "equal_ranks": st.booleans(),
    "world_size": st.integers(1, 5),
    "n": st.integers(20, 400),
    "set_size": st.sampled_from([1, 3, 8]),
}


@settings(max_examples=60)
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


@settings(max_examples=60)
@given(
    **SHAPES,
    then=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4])),
    data=st.data(),
)
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


def test_digests_tell_samplers_and_draws_apart() -> None:
    obs = screen()
    options: list[dict[str, Any]] = [
        {},
        {"set_size": 4},
        {"by": "line"},
        {"control": CONTROL},
        {"control": CONTROL, "n_controls": 2},
        {"control": CONTROL, "match": ["batch"]},
        {"replace": False},
        {"weights": "groups"},
        {"n_sets": 7},
        {"indices": slice(0, 1500)},
    ]
    digests = {bound(obs, **({"by": "gene", "set_size": 8} | option)).digest() for option in options}
    assert len(digests) == len(options)
    assert bound(obs, "gene", 8).digest() == bound(obs, "gene", 8).digest()


# --- Unmatched cells --------------------------------------------------------------------------------


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
    assert sampler.accounts.n_unmatched_groups == 4
    assert sampler.accounts.n_unmatched_cells == ((obs.line == "RPE1") & (obs.gene != "ctrl")).sum()
    assert sampler.accounts.n_cells == ((obs.line != "RPE1") & (obs.gene != "ctrl")).sum()
    assert all((obs.line[list(rows)] != "RPE1").all() for _, rows, _ in sets_of(plan_of(sampler)))


def test_unmatched_cells_of_a_group_are_dropped_alone() -> None:
    obs = with_gap()
    sampler = bound(obs, ["line", "gene"], 8, control=CONTROL, match=["line", "batch"], unmatched="drop")
    is_target = obs.gene != "ctrl"
    is_open = is_target & ((obs.line == "RPE1") | ((obs.line == "K562") & (obs.batch == "z")))
    assert sampler.accounts.n_unmatched_cells == is_open.sum()
    assert sampler.accounts.n_unmatched_groups == 8
    drawn = [row for _, rows, _ in sets_of(plan_of(sampler)) for row in rows]
    assert not is_open[drawn].any()


@pytest.mark.parametrize("n_controls", [1, 9])
def test_controls_of_a_set_repeat_only_where_too_few_match(n_controls: int) -> None:
    obs = screen(400)
    pools = obs[obs.gene == "ctrl"].groupby(["line", "batch"], observed=True).size()
    sampler = bound(obs, "gene", 8, control=CONTROL, match=["line", "batch"], n_controls=n_controls, n_sets=500)
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
    assert dropped.accounts.n_unmatched_cells == n
    for _, rows, controls in sets_of(plan_of(dropped)):
        assert obs.batch[list(rows)].tolist() == obs.batch[list(controls)].tolist()


def test_cells_without_a_group_are_never_drawn(caplog: pytest.LogCaptureFixture) -> None:
    obs = screen()
    obs["gene"] = obs.gene.where(obs.index % 7 != 0)
    sampler = bound(obs, "gene", 8)
    assert sampler.accounts.n_unlabelled == obs.gene.isna().sum()
    assert "have no label in" in caplog.text
    assert not obs.gene[[row for _, rows, _ in sets_of(plan_of(sampler)) for row in rows]].isna().any()


# --- Rows to draw from ------------------------------------------------------------------------------


@given(st.sampled_from(["mask", "rows", "slice"]), st.booleans())
@settings(max_examples=20)
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


# --- Bad arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": ()}, "by= is empty"),
        ({"by": ["gene", "gene"]}, "twice"),
        ({"by": [3]}, "obs"),
        ({"set_size": 0}, "set_size"),
        ({"set_size": 2.5}, "set_size"),
        ({"block_size": 0}, "block_size"),
        ({"n_sets": 0}, "n_sets"),
        ({"n_controls": 0, "control": CONTROL}, "n_controls"),
        ({"incomplete": "keep"}, "'repeat'.*'drop'.*'keep'"),
        ({"unmatched": "loosen"}, "unmatched"),
        ({"weights": "rows"}, "weights.*'cells'.*'groups'"),
        ({"replace": False, "n_sets": 3}, "replace=False"),
        ({"replace": False, "weights": "groups"}, "replace=False"),
        ({"match": "line"}, "match=.*control="),
        ({"n_controls": 2, "include_control": True}, "n_controls=.*include_control=.*control="),
        ({"control": {}}, "control= is empty"),
        ({"control": {"gene": "ctrI"}}, "label.*'ctrI'.*'ctrl'"),
        ({"control": np.ones(3, dtype=bool), "match": "line"}, "2000"),
        ({"control": np.ones(2000, dtype=bool)}, "match= is required"),
        ({"control": "gene == 'ctrl'"}, "is an expression, which only scDataset can evaluate"),
        ({"control": CONTROL, "control_indices": [0], "indices": slice(0, 1)}, "none of the 1 rows"),
        ({"control": CONTROL, "control_indices": [0, 2000]}, "control_indices.*2000"),
        (
            {"control": CONTROL, "control_indices": [True]},
            "control_indices.*2000",
        ),
        ({"control": CONTROL, "control_indices": [0.5]}, "control_indices"),
        ({"control": CONTROL, "control_indices": [[1]]}, "control_indices"),
        ({"control": CONTROL, "control_indices": slice("a", None)}, "control_indices=slice"),
        ({"weights": {"A": 1.0}}, "weights"),
        ({"weights": {"Z": 1.0}}, "weights.*'Z'"),
        ({"weights": {"A": -1.0}}, "finite and not negative"),
        ({"weights": dict.fromkeys(["A", "B", "C", "D", "ctrl"], 0)}, "nothing to draw"),
        ({"set_size": 1500, "incomplete": "drop"}, "no set can be drawn"),
        ({"indices": []}, "no set can be drawn"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    obs = screen()
    if "control_indices" in options:
        obs.loc[0, "gene"] = "A"
    with pytest.raises(InputError, match=message):
        bound(obs, **({"by": "gene", "set_size": 8} | options))


def test_a_missing_column_is_refused_by_argument() -> None:
    obs = screen()

    def labels_of(name: str) -> Any:
        if name not in obs:
            raise MissingKeyError(f"obs has no {name!r}")
        return obs[name]

    with pytest.raises(MissingKeyError) as caught:
        CellSets("gene", 8, control=CONTROL, match=["plate"]).bind(len(obs), labels_of)
    assert caught.value.__notes__ == ["The column 'plate' is given in match= of CellSets."]


def test_get_indices_keeps_sets_together():
    adata = ad.AnnData(
        np.zeros((60, 1)), obs=pd.DataFrame({"gene": pd.Categorical(list("abc") * 20)}, index=list(map(str, range(60))))
    )
    rows = CellSets("gene", 4, n_sets=30).get_indices(adata, seed=3).reshape(30, 4)
    genes = adata.obs["gene"].to_numpy()[rows]
    assert (genes == genes[:, :1]).all()
    assert len({tuple(one) for one in rows.tolist()}) > 10

"""Errors of strategies and plans: each names the argument, and the value or the way out."""

from __future__ import annotations

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc import BlockShuffling, BlockWeightedSampling, CellSets, ClassBalancedSampling, Streaming
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from dasksc.plan.binding import bind
from tests.support.sets import CONTROL, Own, bound, screen

pytestmark = pytest.mark.core

NAN = float("nan")
HIDDEN = np.ma.masked_array([1, 2], mask=[False, True])
DURATIONS = np.ones(10, "m8[s]")


def balanced(labels: Any = (1,) * 10, **options: Any) -> ClassBalancedSampling:
    return ClassBalancedSampling(labels, **options)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: BlockShuffling(0), "block_size"),
        (lambda: BlockShuffling(indices=[0, 10]), "indices.*10"),
        (lambda: BlockShuffling(indices=[-1, 3]), "indices contain -1"),
        (lambda: BlockShuffling(indices=np.array([2**63], dtype=np.uint64)), "indices contain 9223372036854775808"),
        (lambda: BlockShuffling(indices=[True, False]), "indices.*10"),
        (lambda: BlockShuffling(indices=[0.5]), "indices.*float64"),
        (lambda: BlockShuffling(indices=[[1]]), "indices"),
        (lambda: Streaming(HIDDEN), "indices"),
        (lambda: Streaming(DURATIONS), "indices"),
        (lambda: Streaming([[1], [2, 3]]), "indices"),
        (lambda: Streaming(slice("a", "b")), "indices=slice"),
        (lambda: dasksc.SamplingStrategy(3), "indices"),
        (lambda: BlockWeightedSampling(weights=np.ones(10) * 1j), "weights"),
        (lambda: BlockWeightedSampling(weights=np.ones((10, 1))), "weights"),
        (lambda: BlockWeightedSampling(weights="n"), r"weights='n'.*adata\.obs\['n'\]"),
        (lambda: BlockWeightedSampling(weights=np.ones(9), indices=[1, 2]), "weights.*10.*2"),
        (lambda: BlockWeightedSampling(weights=[-1] + [1] * 9), "weights.*-1"),
        (lambda: BlockWeightedSampling(weights=[1, np.nan], indices=[7, 5]), "weights.*row 5"),
        (lambda: BlockWeightedSampling(weights=np.zeros(10)), "weights"),
        (lambda: BlockWeightedSampling(weights=np.full(10, 1e308)), "the sum is inf"),
        (lambda: BlockWeightedSampling(weights=[], indices=[]), "indices="),
        (lambda: BlockWeightedSampling(total_size=0), "total_size"),
        (lambda: BlockWeightedSampling(total_size=11, replace=False), "11.*10"),
        (lambda: BlockWeightedSampling(weights=[1] * 4 + [0] * 6, replace=False, sampling_size=5), "5.*4"),
        (lambda: ClassBalancedSampling(), "labels=.*label_key="),
        (lambda: balanced("type"), "labels='type'.*label_key='type'"),
        (lambda: balanced([1, 2]), "labels.*10"),
        (lambda: balanced([0, 1, 0], indices=range(5)), "labels.*10.*5.*indices"),
        (lambda: balanced(3), "labels"),
        (lambda: balanced(np.ones((10, 2))), "labels"),
        (lambda: balanced([-1] * 10), "label"),
        (lambda: balanced(smoothing="0"), "smoothing"),
        (lambda: balanced(smoothing=1.5), "smoothing.*1.5"),
        (lambda: balanced(temperature=0), "temperature"),
        (lambda: balanced(temperature=NAN), "temperature"),
        (lambda: balanced(smoothing=0.1, temperature=2), "smoothing=.*temperature="),
        (lambda: balanced(["a"] * 10, class_weights={"b": 1}), "class_weights.*label 'b'.*'a'"),
        (lambda: balanced(class_weights=[1]), "class_weights"),
        (lambda: balanced(["a"] * 10, class_weights={"a": -1}), "class_weights.*-1"),
        (lambda: balanced(["a"] * 10, class_weights={"a": 0}), "class_weights"),
        (lambda: balanced([0] * 9 + [1], replace=False, total_size=4), "total_size=4"),
        (lambda: balanced(per_batch=True, sampling_size=3, replace=False), "per_batch.*sampling_size"),
        (lambda: Own([1, 2], length=3), "Own.get_len.*get_indices"),
        (lambda: Own([1, 10]), "Own.get_indices.*10"),
        (lambda: Own([0.5]), "Own.get_indices.*float64"),
        (lambda: Own([1], length=-1), "Own.get_len.*-1"),
        (lambda: Own([1], length="three"), "Own.get_len.*'three'"),
        (lambda: "shuffle", "strategy.*dasksc.BlockShuffling"),
    ],
)
def test_strategies_that_cannot_draw_are_refused(make: Any, facts: str) -> None:
    with pytest.raises(InputError, match=facts):
        bind(make(), range(10), 10, lambda key: None).draw(0, 0)


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"by": ()}, InputError, "by="),
        ({"by": ["gene", "gene"]}, InputError, "twice"),
        ({"by": 3}, WrongTypeError, "by"),
        ({"set_size": 2.5}, InputError, "set_size"),
        ({"n_controls": 0, "control": CONTROL}, InputError, "n_controls"),
        ({"incomplete": "keep"}, InputError, "'repeat'.*'drop'.*'keep'"),
        ({"incomplete": np.ones(2)}, InputError, "incomplete"),
        ({"replace": "no"}, InputError, "replace.*'no'"),
        ({"replace": False, "n_sets": 3}, InputError, "replace=False"),
        ({"weights": "rows"}, InputError, "weights.*'cells'.*'groups'"),
        ({"weights": {"A": 1.0}}, InputError, "weights.*'cells'.*'groups'"),
        ({"match": "line"}, InputError, "match=.*control="),
        ({"n_controls": 2, "include_control": True}, InputError, "n_controls=.*include_control=.*control="),
        ({"control": {}}, InputError, "control="),
        ({"control": {"gene": "ctrI"}}, MissingKeyError, "control.*'ctrI'.*'ctrl'"),
        ({"control": {"gene": {"a": 1}}}, WrongTypeError, "control=.*'gene'.*label"),
        ({"control": {"gene": []}}, InputError, "control=.*'gene'"),
        ({"control": {3: "ctrl"}}, WrongTypeError, "control"),
        ({"control": 3, "match": []}, InputError, "control"),
        ({"control": np.ones(3, dtype=bool), "match": "line"}, InputError, "control.*2000"),
        ({"control": np.ones(2000, dtype=bool)}, InputError, "match="),
        ({"control": "gene == 'ctrl'"}, InputError, "control=.*scDataset"),
        ({"control": CONTROL, "control_indices": [0], "indices": slice(0, 1)}, InputError, "none of the 1 rows"),
        ({"set_size": 1500, "incomplete": "drop"}, InputError, "incomplete='drop'.*1500"),
        ({"indices": []}, InputError, "0 rows"),
    ],
)
def test_sets_that_cannot_be_drawn_are_refused(options: dict[str, Any], error: type[Exception], facts: str) -> None:
    obs = screen()
    if "control_indices" in options:
        obs.loc[0, "gene"] = "A"
    with pytest.raises(error, match=facts):
        bound(obs, **({"by": "gene", "set_size": 8} | options))


def test_columns_that_are_missing_or_continuous_are_refused() -> None:
    obs = screen().assign(dose=np.random.default_rng(0).random(2000))

    def labels_of(name: str) -> Any:
        if name not in obs:
            raise MissingKeyError(f"obs has no {name!r}")
        return obs[name]

    for name, error in (("plate", MissingKeyError), ("dose", InputError)):
        with pytest.raises(error, match=name):
            CellSets("gene", 8, control=CONTROL, match=[name]).bind(len(obs), labels_of)
    with pytest.raises(InputError, match="'gene'.* no obs"):
        CellSets("gene", 4).get_len(np.zeros((20, 3)))


@pytest.mark.parametrize(
    "strategy",
    [
        CellSets("gene", 64, n_sets=2**60),
        BlockWeightedSampling(1, total_size=2**63 - 1),
        ClassBalancedSampling(label_key="gene", total_size=2**62 + 1),
        ClassBalancedSampling(label_key="gene", per_batch=True, total_size=64 * 2**31),
        BlockWeightedSampling(1, total_size=2**40, replace=False, sampling_size=1),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_epochs_of_too_many_rows_are_refused(strategy: dasksc.SamplingStrategy) -> None:
    obs = pd.DataFrame({"gene": pd.Categorical(list("abcd") * 20)}, index=list(map(str, range(80))))
    with pytest.raises(InputError, match=r"2\*\*\d\d"):
        dasksc.scDataset(ad.AnnData(np.zeros((80, 1)), obs=obs), strategy, 64, seed=0)

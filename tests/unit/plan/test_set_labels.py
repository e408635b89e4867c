"""Labels of groups, weights and controls of `CellSets`: any type, a fixed order, and invalid labels."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc import CellSets
from dasksc.errors import InputError, MissingKeyError, WrongTypeError
from tests.support.sets import CONTROL, bound, plan_of, screen, sets_of

pytestmark = pytest.mark.core


def labels_of(sampler: Any, name: str) -> list[Any]:
    return list(sampler.table[name])


# --- Labels and their order -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["i1", "i8", "f4", "f8", "Int64", object])
def test_negative_whole_numbers_are_labels_like_others(dtype: Any) -> None:
    obs = pd.DataFrame({"day": pd.Series([-7, 3, -7, 0, -1, 3, -1, 0] * 3).astype(dtype)})
    sampler = bound(obs, "day", 2)
    assert labels_of(sampler, "day") == [-7, -1, 0, 3]
    assert sampler.accounts.n_unlabelled == 0
    assert all(
        set(obs.day[list(rows)]) == {labels_of(sampler, "day")[group]} for group, rows, _ in sets_of(plan_of(sampler))
    )
    matched = bound(obs.assign(gene=["ctrl", "A"] * 12, day=[-1] * 24), "gene", 2, control=CONTROL, match="day")
    assert matched.accounts.n_unmatched_cells == 0
    by_day = bound(obs, "day", 2, control={"day": -7}, match=[])
    assert {obs.day[row] for _, _, controls in sets_of(plan_of(by_day)) for row in controls} == {-7}


@pytest.mark.parametrize(
    "labels",
    [
        ["b", "a", "c", "a"],
        [10**9, 5, 10**8, 5],
        [0.5, 0.1, 0.25, 0.1],
        [True, False, True, True],
        [2, 0, 1, 0],
        list(pd.to_datetime(["2024-02-01", "2024-01-01", "2025-01-01", "2024-01-01"])),
    ],
)
def test_groups_are_in_the_order_of_their_labels(labels: list[Any]) -> None:
    obs = pd.DataFrame({"gene": labels * 3})
    sampler = bound(obs, "gene", 2)
    assert labels_of(sampler, "gene") == sorted(set(labels))
    backward = bound(obs[::-1].reset_index(drop=True), "gene", 2)
    assert labels_of(backward, "gene") == sorted(set(labels))


# --- Given labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "given", "message"),
    [
        ([0, 1], "0", "label.*'0'.*labels"),
        ([False, True], "True", "label.*'True'.*labels"),
        (["0", "1"], 0, "label.*labels.*'0'"),
        ([0.5, 1.5], "0.5", "label.*'0.5'.*labels"),
        ([100, 1001], 1002, "label.*1002.*100"),
        (["ctrl", "A"], "ctrI", r"label.*'ctrI'.*'ctrl'\?"),
        (["ctrl", "A"], "xyz", "label.*'xyz'.*'A'"),
    ],
)
def test_a_label_that_is_missing_is_told_apart_by_its_type(labels: list[Any], given: Any, message: str) -> None:
    obs = pd.DataFrame({"gene": labels * 10})
    with pytest.raises(MissingKeyError, match=message):
        bound(obs, "gene", 2, control={"gene": given})


def test_weights_of_groups_that_are_not_drawn_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    obs = screen()
    obs.loc[(obs.gene == "ctrl") & (obs.line == "RPE1"), "gene"] = "A"
    every = {(line, gene): 1.0 for line in obs.line.unique() for gene in "ABCD"}
    options: dict[str, Any] = {"control": CONTROL, "unmatched": "drop", "incomplete": "drop"}
    counts = obs[(obs.gene != "ctrl") & (obs.line != "RPE1")].groupby(["line", "gene"], observed=True).size()
    size = int(counts.min()) + 1
    with caplog.at_level(logging.INFO, "dasksc.plan"):
        sampler = bound(obs, ["line", "gene"], size, weights=every, **options)
    n_drawn = int((counts >= size).sum())
    assert len(sampler.table) == n_drawn
    assert f"weights contain {12 - n_drawn} groups without cells to draw from" in caplog.text
    unweighted = bound(obs, ["line", "gene"], size, weights="groups", **options)
    assert list(sets_of(plan_of(sampler))) == list(sets_of(plan_of(unweighted)))
    with pytest.raises(MissingKeyError, match="weights.*'RPE1'.*'Z'"):
        bound(obs, ["line", "gene"], size, weights=every | {("RPE1", "Z"): 1.0}, **options)
    with pytest.raises(
        MissingKeyError,
        match="weights.*'RPE1'.*labels",
    ):
        bound(obs, ["line", "gene"], size, weights=every | {"RPE1": 1.0}, **options)
    with pytest.raises(InputError, match="finite and not negative"):
        bound(obs, ["line", "gene"], size, weights=every | {("RPE1", "A"): -1.0}, **options)


DAYS = pd.to_datetime(["2024-01-01", "2024-01-02", "2024-01-03"]).repeat(20)
TIMES = {
    "days": pd.Series(DAYS),
    "seconds": pd.Series(DAYS.astype("datetime64[s]")),
    "categories": pd.Series(pd.Categorical(DAYS)),
    "zone": pd.Series(DAYS.tz_localize("UTC")),
    "durations": pd.Series(DAYS - DAYS[0] + pd.Timedelta("1h")),
    "short": pd.Series((DAYS - DAYS[0]) // 10**13),
}


@pytest.mark.parametrize("as_given", [lambda day: day[:1], np.asarray, list, lambda day: day[0], set], ids=range(5))
@pytest.mark.parametrize("column", TIMES.values(), ids=TIMES.keys())
def test_dates_and_durations_are_labels_of_controls(column: pd.Series[Any], as_given: Any) -> None:
    obs = pd.DataFrame({"day": column, "gene": list("abcd") * 15})
    day = pd.Index(column.iloc[20:21])
    if as_given is np.asarray and getattr(column.dtype, "tz", None):
        day = day.astype(object)
    sampler = bound(obs, "gene", 4, control={"day": as_given(day)}, match=[])
    assert sampler.accounts.n_control_cells == 20
    assert all(set(controls) <= set(range(20, 40)) for _, _, controls in sets_of(plan_of(sampler)))
    weights = {label: float(label == day[0]) for label in column.unique()}
    assert {row for _, rows, _ in sets_of(plan_of(bound(obs, "day", 4, weights=weights))) for row in rows} <= set(
        range(20, 40)
    )


# --- Wrong arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"by": None}, WrongTypeError, "obs"),
        ({"by": 3}, WrongTypeError, "obs"),
        ({"control": CONTROL, "match": 3}, WrongTypeError, "obs"),
        ({"weights": pd.Series({"A": 1.0})}, WrongTypeError, r"weights.*weights.to_dict\(\)"),
        ({"weights": np.ones(5)}, WrongTypeError, "weights.*'cells'.*'groups'"),
        ({"weights": [1.0, 2.0]}, WrongTypeError, "weights.*'cells'.*'groups'"),
        ({"weights": None}, WrongTypeError, "weights.*'cells'.*'groups'"),
        ({"incomplete": np.ones(2)}, InputError, "incomplete must be one of"),
        ({"incomplete": None}, InputError, "incomplete must be one of"),
        ({"replace": "no"}, InputError, "'no'"),
        ({"replace": None}, InputError, "replace must be True or False; got None"),
        ({"control": CONTROL, "include_control": "no"}, InputError, "include_control.*'no'"),
        (
            {"control": {"gene": {"a": 1}}},
            WrongTypeError,
            "control=.*'gene'.*label",
        ),
        (
            {"control": {"gene": [["ctrl"]]}},
            WrongTypeError,
            "control=.*'gene'.*label",
        ),
        ({"control": {"gene": []}}, InputError, "control=.*label.*'gene'"),
        ({"control": {3: "ctrl"}}, WrongTypeError, "control.*obs"),
        ({"control": 3, "match": []}, InputError, "control"),
        ({"control": ["ctrl"], "match": []}, InputError, "control"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bound(screen(), **({"by": "gene", "set_size": 8} | options))


def test_a_continuous_column_is_refused_by_name() -> None:
    obs = screen().assign(dose=np.random.default_rng(0).random(2000))
    for options in ({"by": "dose"}, {"by": "gene", "control": CONTROL, "match": "dose"}):
        with pytest.raises(InputError, match="'dose'") as caught:
            bound(obs, **options, set_size=8)
        assert "labels=" not in str(caught.value)
        argument = "by" if "control" not in options else "match"
        assert caught.value.__notes__ == [f"The column 'dose' is given in {argument}= of CellSets."]


def test_a_collection_without_obs_is_refused_by_column() -> None:
    for data in (np.zeros((20, 3)), pd.DataFrame({"x": range(20)})):
        with pytest.raises(InputError, match="'gene'.* no obs") as caught:
            dasksc.scDataset(data, CellSets("gene", 4), 4)
        assert "label_key" not in str(caught.value)
    with pytest.raises(InputError, match="'gene'.* no obs"):
        CellSets("gene", 4).get_len(np.zeros((20, 3)))

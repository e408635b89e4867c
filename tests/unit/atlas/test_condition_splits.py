"""Splits by condition: disjoint conditions, held-out conditions kept out, controls in training, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.errors import InputError, MissingKeyError

pytestmark = pytest.mark.core

LINES = ["K562", "RPE1", "Jurkat"]
BY = ["line", "gene"]
CONTROL = {"gene": "non-targeting"}


def screen(n: int = 3000, n_genes: int = 20, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    genes = np.array(["non-targeting", *(f"G{i}" for i in range(n_genes))])
    # Every condition has at least one cell.
    every = pd.MultiIndex.from_product([LINES, genes], names=BY).to_frame(index=False)
    more = pd.DataFrame({"line": rng.choice(LINES, n), "gene": rng.choice(genes, n)})
    obs = pd.concat([every, more], ignore_index=True).sample(frac=1, random_state=seed).reset_index(drop=True)
    obs["line"] = pd.Categorical(obs["line"], categories=[*LINES, "none"])
    obs["plate"] = rng.choice(["p0", "p1"], len(obs))
    return obs


def conditions_of(obs: pd.DataFrame, rows: np.ndarray) -> set[tuple[str, str]]:
    part = obs.iloc[rows]
    return {(line, gene) for line, gene in zip(part.line, part.gene, strict=True) if gene != "non-targeting"}


def check_parts(obs: pd.DataFrame, parts: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Check that each row and each condition is in exactly one part, and all controls in the first."""
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 and len(part) for part in parts.values())
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), rows)
    seen = [conditions_of(obs, part) for part in parts.values()]
    assert sum(map(len, seen)) == len(set().union(*seen))
    for part in list(parts.values())[1:]:
        assert not (obs.gene.iloc[part] == "non-targeting").any()


@given(seed=st.integers(0, 2**64 - 1), few=st.floats(0, 0.9), share=st.sampled_from([None, 0.1, 0.3]))
def test_a_held_out_context_is_test_data_except_for_a_share_and_its_controls(
    seed: int, few: float, share: float | None
) -> None:
    obs = screen()
    options: Any = {} if share is None else {"fractions": (1 - share, share)}
    parts = dasksc.split(
        obs, conditions=BY, hold_out={"line": ["K562"]}, few_shot=few, control=CONTROL, seed=seed, **options
    )
    assert list(parts) == ["train", "test"] if share is None else ["train", "validation", "test"]
    check_parts(obs, parts, np.arange(len(obs)))
    n_seen = 0 if few == 0 else min(max(1, int(few * 20 + 0.5)), 19)
    assert {line for line, _ in conditions_of(obs, parts["test"])} == {"K562"}
    assert len(conditions_of(obs, parts["test"])) == 20 - n_seen
    assert sum(line == "K562" for line, _ in conditions_of(obs, parts["train"])) == n_seen
    if share is not None:
        held = conditions_of(obs, parts["validation"])
        # The two other lines have 20 conditions each. In each line, the number held out differs from the expected
        # number by less than one.
        for line in LINES[1:]:
            assert abs(sum(one == line for one, _ in held) - 20 * share) < 1
        assert not any(line == "K562" for line, _ in held)


@given(
    seed=st.integers(0, 2**64 - 1),
    fractions=st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.5), {"a": 0.7, "b": 0.2, "c": 0.1}]),
    n_genes=st.integers(12, 40),
)
def test_conditions_are_dealt_by_fractions_of_each_context(seed: int, fractions: Any, n_genes: int) -> None:
    obs = screen(n_genes=n_genes)
    parts = dasksc.split(obs, conditions=BY, control=CONTROL, fractions=fractions, seed=seed)
    check_parts(obs, parts, np.arange(len(obs)))
    expected = {
        (0.8, 0.1, 0.1): {"train": 0.8, "validation": 0.1, "test": 0.1},
        (0.5, 0.5): {"train": 0.5, "test": 0.5},
    }
    shares = fractions if isinstance(fractions, dict) else expected[fractions]
    assert list(parts) == list(shares)
    for name, share in shares.items():
        held = conditions_of(obs, parts[name])
        for line in LINES:
            assert abs(sum(one == line for one, _ in held) - share * n_genes) < 1


def test_every_condition_is_held_out_as_often_as_another() -> None:
    # Each of 300 seeds holds out 6 of 20 conditions. A condition is thus held out 90 times on average, with a standard
    # deviation of 7.9; the test allows five standard deviations.
    obs = screen(n=0)
    counts = dict.fromkeys([f"G{i}" for i in range(20)], 0)
    for seed in range(300):
        parts = dasksc.split(obs, conditions=BY, hold_out={"line": "K562"}, few_shot=0.7, control=CONTROL, seed=seed)
        for _, gene in conditions_of(obs, parts["test"]):
            counts[gene] += 1
    assert sum(counts.values()) == 300 * 6
    assert all(abs(count - 90) < 40 for count in counts.values())


@pytest.mark.parametrize(
    "control",
    ["gene == 'non-targeting'", {"gene": ["non-targeting"]}, {"plate": ["p0", "p1"], "gene": "non-targeting"}],
)
def test_the_table_says_what_landed_where(control: Any, tmp_path: Path) -> None:
    obs = screen()
    path = tmp_path / "screen.h5ad"
    AnnData(obs=obs.set_axis(np.arange(len(obs)).astype(str)), X=np.zeros((len(obs), 1), "f4")).write_h5ad(path)
    expected: Any = None
    for data in (obs, path):
        parts = dasksc.split(
            data,
            conditions=BY,
            hold_out={"line": ["K562"]},
            few_shot=0.25,
            control=control,
            fractions=(0.9, 0.1),
            seed=3,
        )
        table = parts.table
        if expected is not None:
            pd.testing.assert_frame_equal(table, expected)
        expected = table
    assert table.index.name == "line"
    assert sorted(table.index) == sorted(LINES)
    for line in LINES:
        for name, rows in parts.items():
            own = obs.iloc[rows][obs.line.iloc[rows] == line]
            own = own[own.gene != "non-targeting"]
            assert table.loc[line, f"{name} cells"] == len(own)
            assert table.loc[line, f"{name} conditions"] == own.gene.nunique()
        is_control = (obs.line == line) & (obs.gene == "non-targeting")
        assert table.loc[line, "control cells"] == is_control.sum()
    assert table.loc["K562", "train conditions"] == 5
    assert table.loc["K562", "test conditions"] == 15


HOLD = {"line": ["K562"]}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"conditions": BY, "groups": "plate", "stratify": "line"}, "groups=.*stratify=.*conditions="),
        ({"hold_out": HOLD}, "hold_out=.*conditions="),
        ({"few_shot": 0.1, "control": CONTROL}, "few_shot=.*control=.*conditions="),
        ({"conditions": {}}, "conditions={}"),
        ({"conditions": [], "hold_out": HOLD}, r"conditions=\[\]"),
        ({"conditions": ["line", "dose"]}, "obs.*'dose'"),
        ({"conditions": ["line", "gene", "hurt"]}, "'hurt'.* 2 .*3063"),
        ({"conditions": BY, "hold_out": ["K562"]}, "{'line'"),
        ({"conditions": BY, "hold_out": []}, r"hold_out=\[\]"),
        ({"conditions": BY, "hold_out": {"plate": "p0"}}, "hold_out.*'plate'.*conditions="),
        ({"conditions": BY, "hold_out": {"line": ["K652"]}}, "'K652'.*'K562'"),
        ({"conditions": BY, "hold_out": {"line": "none"}}, "63"),
        ({"conditions": BY, "hold_out": HOLD, "fractions": {"train": 0.5, "test": 0.5}}, "'test'.*hold_out="),
        ({"conditions": BY, "hold_out": HOLD, "fractions": (0.9, 0.2)}, "fractions="),
        ({"conditions": BY, "hold_out": HOLD, "few_shot": 1.0}, "few_shot.*1.0"),
        ({"conditions": BY, "few_shot": 0.1}, "few_shot=0.1.*hold_out="),
        ({"conditions": ["line"], "hold_out": HOLD, "few_shot": 0.5, "control": CONTROL}, "only one held-out"),
        ({"conditions": BY, "control": {"gene": "nontargeting"}}, "'nontargeting'.*non-target"),
        ({"conditions": BY, "control": "gene == 'x'"}, "control=.*3063"),
        ({"conditions": BY, "control": ["non-targeting"]}, "{'gene'.*'non-targeting'}"),
        ({"conditions": BY, "control": "ctrl"}, "obs.*'ctrl'.*control={'gene'"),
        ({"conditions": BY, "control": "genes == 'x'"}, "'genes'; did you mean 'gene'\\?$"),
        ({"conditions": BY, "seed": -1}, "seed"),
    ],
    ids=range(23),
)
def test_what_cannot_be_split_is_refused(options: dict[str, Any], match: str) -> None:
    obs = screen()
    obs["hurt"] = [None, None, *["a"] * (len(obs) - 2)]
    with pytest.raises((InputError, MissingKeyError), match=match):
        dasksc.split(obs, **options)

"""Parts of a split: disjoint, complete, of the stated sizes, and without a group in two of them."""

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

FRACTIONS = st.lists(st.integers(1, 20), min_size=2, max_size=5).map(
    lambda parts: {f"part{i}": part / sum(parts) for i, part in enumerate(parts)}
)


def check_parts(parts: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Check that every row is in exactly one part, in ascending order."""
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 and len(part) for part in parts.values())
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), rows)


def check_groups(parts: dict[str, np.ndarray], groups: np.ndarray) -> None:
    seen = [set(groups[part]) for part in parts.values()]
    assert sum(map(len, seen)) == len(set().union(*seen))


@given(fractions=FRACTIONS, n=st.integers(150, 2000), n_classes=st.integers(1, 12), seed=st.integers(0, 2**64 - 1))
def test_each_class_is_cut_less_than_a_row_from_its_fractions(
    fractions: Any, n: int, n_classes: int, seed: int
) -> None:
    rng = np.random.default_rng(n)
    kinds = rng.choice(n_classes, n, p=rng.dirichlet(np.ones(n_classes)))
    obs = pd.DataFrame(
        {"kind": pd.Categorical.from_codes(kinds - (kinds == 3) * 4, [str(i) for i in range(n_classes)])}
    )
    parts = dasksc.split(obs, fractions=fractions, stratify="kind", seed=seed)
    check_parts(parts, np.arange(n))
    for name, share in fractions.items():
        assert abs(len(parts[name]) - share * n) < len(fractions)
        for kind in np.unique(kinds):
            assert abs((kinds[parts[name]] == kind).sum() - share * (kinds == kind).sum()) < 1
    plain = dasksc.split(obs, fractions=fractions, seed=seed)
    check_parts(plain, np.arange(n))
    assert all(abs(len(plain[name]) - share * n) < 1 for name, share in fractions.items())


@given(
    fractions=FRACTIONS,
    n_donors=st.integers(6, 60),
    stratify=st.sampled_from([None, "kind", ["kind", "sex"]]),
    seed=st.integers(0, 2**64 - 1),
)
def test_no_group_is_in_two_parts_and_none_is_over_by_more_than_the_largest(
    fractions: Any, n_donors: int, stratify: Any, seed: int
) -> None:
    rng = np.random.default_rng(n_donors)
    donors = np.concatenate([np.arange(n_donors), rng.choice(n_donors, 900, p=rng.dirichlet(np.ones(n_donors)))])
    n = len(donors)
    obs = pd.DataFrame({"donor": donors.astype(str), "kind": rng.integers(0, 5, n), "sex": rng.choice(["f", "m"], n)})
    parts = dasksc.split(obs, fractions=fractions, groups="donor", stratify=stratify, seed=seed)
    check_parts(parts, np.arange(n))
    check_groups(parts, donors)
    largest = np.bincount(donors).max()
    assert all(len(parts[name]) <= share * n + largest for name, share in fractions.items())


@given(n_donors=st.integers(20, 80), seed=st.integers(0, 2**64 - 1))
def test_by_distributes_values_and_not_rows(n_donors: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # One donor has most of the rows, but counts no more than any other donor.
    donors = np.concatenate([np.arange(n_donors), np.zeros(2000, dtype=int), rng.integers(0, n_donors, 300)])
    status = (np.arange(n_donors) % 2)[donors]
    obs = pd.DataFrame({"donor": pd.Categorical(donors), "status": status})
    parts = dasksc.split(obs, fractions=(0.5, 0.5), by="donor", stratify="status", seed=seed)
    check_parts(parts, np.arange(len(donors)))
    check_groups(parts, donors)
    for part in parts.values():
        held = np.unique(donors[part])
        assert abs(len(held) - n_donors / 2) <= 1
        assert abs((held % 2).sum() - n_donors / 4) <= 1


@pytest.mark.parametrize("kind", ["integers", "nullable", "categories"])
def test_rows_without_a_label_are_split_and_do_not_outvote_those_with_one(kind: str) -> None:
    # Each donor has 3 labeled and 7 unlabeled rows. The latter alternate between -1 and -2. In nullable integers,
    # -2 is replaced by a missing value; in categories, both are.
    donor = np.repeat(np.arange(40), 10)
    labels = np.where(np.tile(np.arange(10), 40) < 3, donor % 2, -1 - np.tile(np.arange(10) % 2, 40)).astype(float)
    numbers = pd.Series(labels)
    status = {
        "integers": numbers.astype(int),
        "nullable": numbers.astype("Int64").mask(numbers == -2),
        "categories": numbers.map({0: "ill", 1: "well"}).astype("category"),
    }[kind]
    obs = pd.DataFrame({"donor": donor, "status": status})
    for seed in range(5):
        parts = dasksc.split(obs, fractions=(0.5, 0.5), by="donor", stratify="status", seed=seed)
        check_parts(parts, np.arange(400))
        assert [int((np.unique(donor[part]) % 2).sum()) for part in parts.values()] == [10, 10]
        # Rows without a label form one class, regardless of how the missing label is stored.
        parts = dasksc.split(obs, fractions=(0.25, 0.75), stratify="status", seed=seed)
        check_parts(parts, np.arange(400))
        assert [int((labels[part] < 0).sum()) for part in parts.values()] == [70, 210]
        assert len(dasksc.split(obs, fractions=(0.01, 0.99), stratify=["status", "donor"], seed=seed)) == 2


def test_groups_of_several_columns_are_joined_where_they_are_linked() -> None:
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 40, 3000)
    donor = batch * 2 + rng.integers(0, 2, 3000)
    lab = batch // 2  # 20 labs with two batches each, and two donors in each batch
    obs = pd.DataFrame({"batch": batch, "donor": donor, "lab": lab})
    parts = dasksc.split(obs, fractions=(0.6, 0.2, 0.2), groups=["donor", "batch", "lab"], seed=1)
    check_parts(parts, np.arange(3000))
    for column in obs:
        check_groups(parts, obs[column].to_numpy())
    chained = pd.DataFrame({"a": [0, 0, 1, 1, 2, 2], "b": [0, 1, 1, 2, 2, 3]})
    with pytest.raises(InputError, match=".1.*2"):
        dasksc.split(chained, fractions=(0.5, 0.5), groups=["a", "b"])


def test_what_cannot_be_split_is_refused() -> None:
    obs = pd.DataFrame({"donor": ["a", "b", None] * 10, "kind": [1, 2, 3] * 10})
    with pytest.raises(InputError, match="10.*30"):
        dasksc.split(obs, groups="donor")
    with pytest.raises(InputError, match=".3.*4"):
        dasksc.split(obs, fractions={"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}, groups="kind")
    with pytest.raises(MissingKeyError, match="donor"):
        dasksc.split(obs, groups="doner")
    with pytest.raises(InputError, match="too few"):
        dasksc.split(obs.iloc[:2])
    with pytest.raises(InputError, match="continuous"):
        dasksc.split(pd.DataFrame({"score": np.random.default_rng(0).random(600)}), stratify="score")
    with pytest.raises(InputError, match="repeat"):
        dasksc.split(obs, indices=[0, 1, 1, 5])
    with pytest.raises(InputError, match="too few"):
        dasksc.split(obs[:0], conditions=["donor", "kind"])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"seed": None}, r"seed.*2\*\*64"),
        ({"fractions": 0.8}, r"fractions=0\.8 .*\(0\.8, 0\.1, 0\.1\)"),
        ({"fractions": (0.5, [0.5])}, "fractions="),
        ({"fractions": (float("nan"), 0.5)}, "fractions="),
        ({"fractions": (0.5, 0.4)}, "fractions="),
        ({"fractions": {"all": 1.0}}, "fractions="),
        ({"by": ["donor", "batch"]}, r"by=\['donor', 'batch'\] .*groups="),
        ({"by": "donor", "groups": "batch"}, "groups="),
        ({"groups": ["donor", 3]}, "groups="),
        ({"stratify": {"kind": 1}}, "stratify="),
    ],
)
def test_an_invalid_argument_is_refused_before_anything_is_read(wrong: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        dasksc.split("atlas that does not exist.h5ad", **wrong)


def test_leaks_counts_shared_cells_donors_and_conditions_of_every_pair_of_parts():
    obs = pd.DataFrame({"donor": ["a", "a", "b", "c", None], "gene": pd.Categorical(["x", "y", "x", "x", "y"])})

    found = dasksc.leaks(obs, {"train": [0, 2, 4], "test": [1, 2, 3]}, by=["donor", ["donor", "gene"]])

    assert found["what"].tolist() == ["cells", "donor", "donor, gene"]
    assert found["shared"].tolist() == [1, 2, 1]
    assert found["first cells"].tolist() == found["second cells"].tolist() == [1, 2, 1]
    assert found["examples"].tolist() == [[2], ["a", "b"], ["b, x"]]
    found = dasksc.leaks(obs, {"train": [0], "test": [3]}, ["donor"])
    assert found[["shared", "examples"]].to_numpy().tolist() == [[0, []]] * 2
    for parts, by in ({"train": [0]}, ()), ({"a": [0], "b": [9]}, ()), ({"a": [0], "b": [1]}, "donor"):
        with pytest.raises(InputError):
            dasksc.leaks(obs, parts, by)


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


def check_condition_parts(obs: pd.DataFrame, parts: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Check that each row and each condition is in exactly one part, and all controls in the first."""
    check_parts(parts, rows)
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
    check_condition_parts(obs, parts, np.arange(len(obs)))
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
    check_condition_parts(obs, parts, np.arange(len(obs)))
    names = ["train", *(["validation"] if len(fractions) == 3 else []), "test"]
    shares = fractions if isinstance(fractions, dict) else dict(zip(names, fractions, strict=True))
    assert list(parts) == list(shares)
    for name, share in shares.items():
        held = conditions_of(obs, parts[name])
        for line in LINES:
            assert abs(sum(one == line for one, _ in held) - share * n_genes) < 1


@pytest.mark.parametrize(
    "control",
    ["gene == 'non-targeting'", {"gene": ["non-targeting"]}, {"plate": ["p0", "p1"], "gene": "non-targeting"}],
)
def test_the_table_says_what_landed_where(control: Any, tmp_path: Path) -> None:
    obs = screen()
    path = tmp_path / "screen.h5ad"
    AnnData(obs=obs.set_axis(np.arange(len(obs)).astype(str)), X=np.zeros((len(obs), 1), "f4")).write_h5ad(path)
    options = {"hold_out": {"line": ["K562"]}, "few_shot": 0.25, "fractions": (0.9, 0.1), "seed": 3}
    parts, again = (dasksc.split(data, conditions=BY, control=control, **options) for data in (obs, path))
    table = parts.table
    pd.testing.assert_frame_equal(table, again.table)
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
        ({"conditions": [], "hold_out": HOLD}, r"conditions=\[\]"),
        ({"conditions": ["line", "dose"]}, "obs.*'dose'"),
        ({"conditions": ["line", "gene", "hurt"]}, "'hurt'.* 2 .*3063"),
        ({"conditions": BY, "hold_out": ["K562"]}, "{'line'"),
        ({"conditions": BY, "hold_out": {"plate": "p0"}}, "hold_out.*'plate'.*conditions="),
        ({"conditions": BY, "hold_out": {"line": ["K652"]}}, "'K652'.*'K562'"),
        ({"conditions": BY, "hold_out": {"line": "none"}}, "63"),
        ({"conditions": BY, "hold_out": HOLD, "fractions": {"train": 0.5, "test": 0.5}}, "'test'.*hold_out="),
        ({"conditions": BY, "hold_out": HOLD, "few_shot": 1.0}, "few_shot.*1.0"),
        ({"conditions": BY, "few_shot": 0.1}, "few_shot=0.1.*hold_out="),
        ({"conditions": ["line"], "hold_out": HOLD, "few_shot": 0.5, "control": CONTROL}, "only one held-out"),
        ({"conditions": BY, "control": {"gene": "nontargeting"}}, "'nontargeting'.*non-target"),
        ({"conditions": BY, "control": "gene == 'x'"}, "control=.*3063"),
        ({"conditions": BY, "control": ["non-targeting"]}, "{'gene'.*'non-targeting'}"),
        ({"conditions": BY, "control": "ctrl"}, "obs.*'ctrl'"),
    ],
)
def test_conditions_that_cannot_be_split_are_refused(options: dict[str, Any], match: str) -> None:
    obs = screen()
    obs["hurt"] = [None, None, *["a"] * (len(obs) - 2)]
    with pytest.raises((InputError, MissingKeyError), match=match):
        dasksc.split(obs, **options)

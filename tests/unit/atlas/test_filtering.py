"""Filters of rows: the rows selected, the syntax allowed, and strategies that draw only selected rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.errors import InputError, MissingKeyError
from tests.support.sets import Own

pytestmark = pytest.mark.core

N = 120


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    kinds = pd.Categorical(rng.choice(["T cell", "B cell", "NK"], N), categories=["B cell", "NK", "T cell"])
    kinds[::10] = np.nan
    score = pd.array(rng.integers(0, 9, N), dtype="Int64")
    score[5] = pd.NA
    return pd.DataFrame(
        {
            "cell_type": kinds,
            "n_genes": rng.integers(0, 1000, N),
            "is doublet": rng.random(N) < 0.2,
            "score": score,
            "note": rng.choice(["it's `so`", "a b"], N),
        },
        index=[f"cell{i}" for i in range(N)],
    )


def atlas() -> AnnData:
    rows = sp.csr_matrix(np.arange(1, N + 1, dtype=np.float32)[:, None] * np.ones((1, 3), dtype=np.float32))
    return AnnData(X=rows, obs=table(), var=pd.DataFrame(index=list("abc")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filter") / "atlas.h5ad"
    atlas().write_h5ad(path)
    return path


def rows_read(dataset: dasksc.scDataset) -> np.ndarray:
    """Return the row numbers of an epoch; X holds them, starting from 1."""
    return np.concatenate([batch.numpy()[:, 0] for batch in dataset]).astype(int) - 1


OBS = table()
CASES: dict[str, Any] = {
    "cell_type == 'T cell' and n_genes > 500": (OBS.cell_type == "T cell") & (OBS.n_genes > 500),
    "cell_type == 'T cell' & n_genes > 500 | n_genes < 10": (OBS.cell_type == "T cell") & (OBS.n_genes > 500)
    | (OBS.n_genes < 10),
    "cell_type in ['T cell', 'NK'] and not `is doublet`": OBS.cell_type.isin(["T cell", "NK"]) & ~OBS["is doublet"],
    "cell_type != 'NK'": OBS.cell_type != "NK",  # includes missing values, as in pandas
    "score > 3": (OBS.score > 3).fillna(False),
    "score != 3": (OBS.score != 3).fillna(False),
    "100 <= n_genes < 300": (OBS.n_genes >= 100) & (OBS.n_genes < 300),
    "n_genes.between(100, 300)\n  or `is doublet`": OBS.n_genes.between(100, 300) | OBS["is doublet"],
    "n_genes / 2 + 1 > -n_genes % 7": OBS.n_genes / 2 + 1 > -OBS.n_genes % 7,
    'note == "it\'s `so`"': OBS.note == "it's `so`",
    # For missing text, neither the condition nor its negation is true.
    "cell_type.str.startswith('T')": OBS.cell_type == "T cell",
    "not cell_type.str.startswith('T')": OBS.cell_type.isin(["B cell", "NK"]),
    "cell_type.str.startswith(('T', 'N'))": OBS.cell_type.isin(["T cell", "NK"]),
    # In pandas, | has lower precedence than comparisons; in Python, higher. The brackets must be preserved.
    "(note.str.startswith('a') | n_genes > 500) == `is doublet`": (OBS.note.str.startswith("a") | (OBS.n_genes > 500))
    == OBS["is doublet"],
    "'ü' != note and not note.str.contains('`so`')": OBS.note == "a b",
}


@pytest.mark.parametrize("expression", CASES)
def test_a_filter_holds_where_pandas_says_so(expression: str, path: Path) -> None:
    expected = np.flatnonzero(CASES[expression].to_numpy(dtype=bool))
    assert 0 < len(expected) < N
    np.testing.assert_array_equal(dasksc.rows_where(path, expression), expected)
    np.testing.assert_array_equal(dasksc.rows_where(atlas(), expression), expected)
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), 8, filter=expression, seed=0)
    np.testing.assert_array_equal(np.sort(rows_read(dataset)), expected)


@pytest.mark.parametrize(
    "expression",
    [
        "@n > 3",
        "__import__('os').system('true')",
        "n_genes.map(print)",
        "[x for x in n_genes]",
        "f'{n_genes}' == '1'",
        "n_genes.isin(values=[1])",
        "n_genes = 3",
        "note.str.startswith(cell_type)",
        "note.str.contains()",
        "n_genes.str.contains('1')",
        "n_genes >",
        "",
        "1 == 1",
        "`n_genes",
    ],
)
def test_expressions_other_than_comparisons_of_columns_are_refused(expression: str) -> None:
    with pytest.raises(InputError, match="filter"):
        dasksc.rows_where(atlas(), expression)


TEXTS = [None, "T cell", "B cell", "T reg", None]
KINDS: dict[str, Any] = {
    "categorical": pd.Categorical(TEXTS),
    "object": np.array(TEXTS, dtype=object),
    "nan": np.array([np.nan if text is None else text for text in TEXTS], dtype=object),
    "string": pd.array(TEXTS, dtype="string"),
    "default": pd.Series(TEXTS).array,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_text_is_no_match_and_no_mismatch_whatever_its_type(kind: str) -> None:
    obs = pd.DataFrame({"kind": KINDS[kind], "n": range(5)})
    for expression, expected in (
        ("kind.str.startswith('T')", [1, 3]),
        ("not kind.str.startswith('T')", [2]),
        ("~(kind.str.contains('cell|reg'))", []),
        ("not kind.str.endswith('cell') or n == 0", [0, 3]),
        ("not (kind.str.endswith('cell') and n < 2)", [2, 3, 4]),  # n >= 2 decides, even if kind is missing
        ("kind.isna() or kind.str.contains('reg')", [0, 3, 4]),
        ("kind.str.contains('t', False, 0, True)", [0, 1, 3, 4]),  # pandas receives na=True for missing values
    ):
        assert dasksc.rows_where(obs, expression).tolist() == expected, expression
    obs = pd.DataFrame({"ob": np.array([True, None, False, np.nan], dtype=object), "n": range(4)})
    for expression, expected in (("ob", [0]), ("not ob", [2]), ("ob or n > 1", [0, 2, 3]), ("ob.isna()", [1, 3])):
        assert dasksc.rows_where(obs, expression).tolist() == expected, expression


def test_rows_of_an_atlas_that_lacks_a_column_match_nothing(tmp_path: Path) -> None:
    whole, lacking = atlas(), atlas()
    lacking.obs = lacking.obs.drop(columns=["cell_type", "is doublet"])
    for name, adata in (("a", whole), ("b", lacking)):
        adata.obs_names = [f"{name}{i}" for i in range(N)]
        adata.write_h5ad(tmp_path / f"{name}.h5ad")
    opened = dasksc.open([tmp_path / "a.h5ad", tmp_path / "b.h5ad"], join="outer")
    for expression in ("cell_type.str.startswith('T')", "not cell_type.str.contains('T|B')", "not `is doublet`"):
        expected = dasksc.rows_where(whole, expression)
        np.testing.assert_array_equal(dasksc.rows_where(opened, expression), expected)


def test_a_missing_column_is_reported_with_similar_names(path: Path) -> None:
    for data in (path, atlas()):
        with pytest.raises(MissingKeyError, match="cell_type"):
            dasksc.rows_where(data, "cell_typ == 'NK'")
        with pytest.raises(MissingKeyError, match="n_genes"):
            dasksc.scDataset(data, dasksc.Streaming(), 8, filter="n_gene > 3")


ROWS = st.sampled_from([None, slice(10, 90), OBS.n_genes.to_numpy() % 2 == 0, [5, 3, 3, 90, 7, *range(20, 70)]])


@given(indices=ROWS, per_entry=st.booleans(), kind=st.sampled_from(["streaming", "weighted", "balanced"]))
def test_a_filter_keeps_the_matching_indices_of_a_strategy(indices: Any, per_entry: bool, kind: str) -> None:
    every = np.arange(N)
    chosen = every if indices is None else np.asarray(every[indices])
    fits = OBS.n_genes.to_numpy() > 400
    # Whether weights and labels are given per row of the atlas or per entry of `indices`, the same rows can be drawn.
    values = chosen % 3 if per_entry else every % 3
    strategy: Any = {
        "streaming": dasksc.Streaming(indices),
        "weighted": dasksc.BlockWeightedSampling(4, indices, weights=(values > 0).astype(float), total_size=300),
        "balanced": dasksc.ClassBalancedSampling(np.where(values > 0, values, -1), 4, indices, total_size=300),
    }[kind]
    dataset = dasksc.scDataset(atlas(), strategy, 64, filter="n_genes > 400", seed=0)
    kept = chosen[fits[chosen]]
    got = rows_read(dataset)
    if kind == "streaming":
        np.testing.assert_array_equal(got, np.sort(kept))
    else:
        assert set(got) <= set(kept[kept % 3 > 0])
        assert len(set(got)) > 0.9 * len(set(kept[kept % 3 > 0]))


def test_a_filter_without_matches_or_without_obs_is_refused() -> None:
    with pytest.raises(InputError, match=" 120 "):
        dasksc.scDataset(atlas(), dasksc.Streaming(), 8, filter="n_genes < 0")
    with pytest.raises(InputError, match="n_genes < 0.*obs"):
        dasksc.scDataset(np.ones((9, 2)), dasksc.Streaming(), 3, filter="n_genes < 0")

    with pytest.raises(InputError, match="rows_where"):
        dasksc.scDataset(atlas(), Own(np.arange(3)), 8, filter="n_genes > 0")


def test_a_state_of_another_filter_does_not_fit() -> None:
    first, second = (
        dasksc.scDataset(atlas(), dasksc.Streaming(), 8, filter=f"n_genes > {n}", seed=0) for n in (100, 300)
    )
    with pytest.raises(InputError, match="filter.*n_genes.*300"):
        second.load_state_dict(first.state_dict())

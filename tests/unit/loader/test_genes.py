"""Genes matched by name, by a vocabulary or by another column of var: the content of each column of a batch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import anndata
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.errors import DaskscError, InputError, MissingKeyError, StorageError
from dasksc.tokens import Vocabulary

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:Variable names are not unique")]

N_OBS = 13
HELD = ["a", "b", "c", "b", "d", "a", "b"]
KEYS = ["E1", "E2", "E3", None, "E2", "E5", "E6"]


def values(dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.where(rng.random((N_OBS, len(HELD))) < 0.5, rng.integers(1, 90, (N_OBS, len(HELD))), 0).astype(dtype)


def atlas(layout: str, dtype: str = "float32", names: list[str] | None = None) -> AnnData:
    dense = values(dtype)
    var = pd.DataFrame({"key": KEYS, "place": np.arange(7)}, index=HELD if names is None else names)
    x = sp.csr_matrix(dense) if layout == "csr" else dense
    return AnnData(X=x, var=var, obs=pd.DataFrame(index=np.arange(N_OBS).astype(str)), layers={"half": x})


def batch(adata: Any, **options: Any) -> Any:
    (one,) = dasksc.scDataset(adata, dasksc.Streaming(), N_OBS, scheduler="synchronous", **options)
    return one.to_dense().numpy() if hasattr(one, "to_dense") else one


def expected(wanted: list[str], held: list[Any], dtype: str, *, drop: bool = False) -> np.ndarray:
    """Return the expected columns, computed by NumPy in float64."""
    wide = values(dtype).astype("f8")
    columns = [wide[:, [name == one for one in held]].sum(axis=1) for name in wanted if not drop or name in held]
    return np.stack(columns, axis=1)


@given(
    data=st.data(),
    stored=st.sampled_from(["csr", "dense"]),
    layout=st.sampled_from(["csr", "dense"]),
    missing=st.sampled_from(["zero", "drop"]),
)
def test_any_choice_of_names_is_what_numpy_selects(data: Any, stored: str, layout: str, missing: str) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdefg"), min_size=7, max_size=7))
    wanted = data.draw(st.lists(st.sampled_from("abcdefghij"), min_size=1, unique=True))
    adata = atlas(stored, names=names)
    options = {"genes": wanted, "layout": layout, "genes_missing": missing, "genes_repeated": "sum"}
    if not set(wanted) & set(names):
        with pytest.raises(MissingKeyError):
            batch(adata, **options)
        return
    np.testing.assert_array_equal(batch(adata, **options), expected(wanted, names, "float32", drop=missing == "drop"))


@pytest.mark.parametrize("stored", ["csr", "dense"])
def test_atlases_that_lack_genes_are_aligned_like_one(stored: str, tmp_path: Path) -> None:
    # The parts order their columns differently. One lacks "d", and both lack "x"; fill_value sets these to 0.
    first, second = (
        atlas(stored, names=list("abcdefg")),
        atlas(stored, names=list("gfedcba"))[:, [0, 1, 2, 4, 5, 6]].copy(),
    )
    paths = [tmp_path / "1.h5ad", tmp_path / "2.h5ad"]
    for one, path in zip((first, second), paths, strict=True):
        one.write_h5ad(path)
    joined = anndata.concat([first, second], join="outer", fill_value=0, index_unique="-")
    assert joined.n_vars == 7
    table = joined.to_df()
    opened = dasksc.open(paths, join="outer", fill_value=0, index_unique="-")
    opened.var["group"] = ["A", "B", "A", "B", "C", "A", "D"]
    grouped = table.T.groupby(dict(zip(joined.var_names, opened.var["group"][joined.var_names], strict=True))).sum().T
    for layout in ("csr", "dense"):
        (one,) = dasksc.scDataset(
            *(opened, dasksc.Streaming(), 2 * N_OBS),
            genes=["D", "A", "x", "B"],
            genes_key="group",
            genes_missing="zero",
            genes_repeated="sum",
            layout=layout,
        )
        found = pd.DataFrame(one.to_dense().numpy(), columns=list("DAxB"), index=table.index)
        np.testing.assert_array_equal(found[["A", "B", "D"]], grouped[["A", "B", "D"]])
        assert not found["x"].any()


@pytest.mark.parametrize(("stored", "layout"), [("csr", "dense"), ("dense", "csr")])
def test_sums_that_the_wanted_type_cannot_hold_are_refused(stored: str, layout: str) -> None:
    adata = AnnData(X=np.full((4, 3), 200, "u1"), var=pd.DataFrame(index=["a", "b", "a"]))
    if stored == "csr":
        adata.X = sp.csr_matrix(adata.X)
    options = {"genes": ["a"], "genes_repeated": "sum", "layout": layout}
    (found,) = dasksc.scDataset(adata, dasksc.Streaming(), 4, **options)
    assert found.to_dense().flatten().tolist() == [400.0] * 4
    with pytest.raises((InputError, StorageError), match=r"holds 400|from 400 to 400"):
        list(dasksc.scDataset(adata, dasksc.Streaming(), 4, dtype="uint8", **options))


@pytest.mark.parametrize("ones", [np.ones((4, 3), "?"), np.ones((4, 3), ">f2"), sp.csr_matrix(np.ones((4, 3), "?"))])
def test_values_in_memory_of_any_type_add_up(ones: Any) -> None:
    adata = AnnData(ones, var=pd.DataFrame(index=["a", "b", "a"]))
    for layout in ("dense", "csr"):
        (found,) = dasksc.scDataset(adata, "stream", 4, genes=["a", "b"], genes_repeated="sum", layout=layout)
        assert found.to_dense().tolist() == [[2.0, 1.0]] * 4


def test_vocabularies_give_columns_by_ascending_id_without_their_special_tokens(tmp_path: Path) -> None:
    ids = {"<pad>": 0, "c": 7, "d": 3, "<cls>": 1, "z": 5, "<eoc>": 9}
    as_json, pickled, listed = tmp_path / "vocab.json", tmp_path / "token_dictionary.pkl", tmp_path / "genes.txt"
    as_json.write_text(json.dumps(ids))
    pickled.write_bytes(pickle.dumps(ids))
    listed.write_text("<pad>\nd\nz\nc\n")
    for genes in (Vocabulary(ids), as_json, pickled, listed):
        dataset = dasksc.scDataset(atlas("csr"), dasksc.Streaming(), 4, genes=genes, genes_missing="zero")
        assert dataset.gene_match.names == ("d", "z", "c")
        assert str(dataset.gene_match) == "2 of 3 genes matched by var_names (66.7%); 1 missing, filled with zeros: z"
        assert "2 of 3 genes matched" in dasksc.check(dataset).genes[0]
        np.testing.assert_array_equal(
            batch(atlas("csr"), genes=genes, genes_missing="zero"), expected(["d", "z", "c"], HELD, "float32")
        )


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"a": Runs()}),
        pickle.dumps({"a": 1.5}),
        pickle.dumps({"a": 1})[:-3],
        b"\x80\x04r\xff\xff\xff\x7f.",
        pickle.dumps({"a": np.int64(1)}),
    ],
    ids=range(5),
)
def test_pickles_of_anything_else_are_refused_and_run_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokens.pkl").write_bytes(content)
    with pytest.raises(InputError, match=r"tokens\.pkl"):
        Vocabulary.read("tokens.pkl")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"genes": ["a"]}, r"var_names repeats \['a'\].*genes_repeated='sum'"),
        ({"genes": ["c", "x", "y"]}, "var_names.*'x'.*genes_missing='zero'"),
        ({"genes": ["x", "y"], "genes_missing": "zero"}, "var_names.*'a'.*'b'"),
        ({"genes": ["E2"], "genes_key": "kez"}, "var.*'kez'.*'key'"),
        ({"genes": ["c", "d", "c"]}, "genes=.*'c'"),
        ({"genes": ["c"], "genes_missing": "zeros"}, "genes_missing.*'error'.*'zero'"),
        ({"genes": [0, 1], "genes_key": "key"}, "genes_key=.*genes="),
        ({"genes": [-1]}, "-1"),
        ({"genes": Path("nowhere.json")}, "there is no vocabulary file"),
        ({"genes": ["c"], "genes_key": 3}, "genes_key"),
        ({"genes": {"c", "d"}}, "set, which does not define an order of columns"),
        ({"genes": [0.0, 1.0]}, "genes has dtype float64"),
        ({"genes": [[0], [1, 2]]}, "genes cannot be converted to an array"),
        ({"genes": np.array([2**64 - 1], "u8")}, "genes contains position 18446744073709551615"),
        ({"genes": np.ma.masked_array([0, 1], mask=[False, True])}, "genes has 1 masked entries"),
    ],
)
def test_genes_that_cannot_be_matched_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(DaskscError, match=match):
        dasksc.scDataset(atlas("csr"), dasksc.Streaming(), 4, **options)


def test_a_key_of_an_array_is_refused() -> None:
    with pytest.raises(InputError, match="var"):
        dasksc.scDataset(da.ones((4, 3)), dasksc.Streaming(), 4, genes=["a"], genes_key="key")

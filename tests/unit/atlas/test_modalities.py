"""Several modalities opened as one: the same cells in each, regardless of their stored order."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata import AnnData
from anndata.io import write_elem

import dasksc
from dasksc.errors import InputError, MissingKeyError, MissingPathError

pytestmark = pytest.mark.core

N = 60


def modality(seed: int, n_vars: int, cells: np.ndarray, *, is_sparse: bool) -> AnnData:
    """Return an atlas with the number of the cell in the first column of X."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 5, (len(cells), n_vars)).astype(np.float32)
    x[:, 0] = cells + 1
    matrix = sp.csr_matrix(x) if is_sparse else x
    obs = pd.DataFrame(
        {"score": cells * 10 + seed, "kind": pd.Categorical(rng.choice(list("ab"), len(cells)))},
        index=[f"cell{cell}" for cell in cells],
    )
    var = pd.DataFrame(index=[f"v{seed}-{i}" for i in range(n_vars)])
    return AnnData(matrix, obs=obs, var=var, layers={"twice": matrix * 2}, obsm={"pca": x[:, :2] / 2})


def parts() -> dict[str, AnnData]:
    rng = np.random.default_rng(0)
    return {
        "rna": modality(1, 12, rng.permutation(N)[:50], is_sparse=True),
        "prot": modality(2, 5, rng.permutation(N)[:55], is_sparse=False),
        "atac": modality(3, 9, rng.permutation(N), is_sparse=True),
    }


COMMON = sorted(set.intersection(*(set(adata.obs_names) for adata in parts().values())))


def store(folder: Path, kind: str, own: dict[str, Any] | None = None) -> Any:
    """Store the modalities in the format `kind`; `own` holds additional columns for their obs."""
    mod = parts()
    if kind == "dict":
        return mod
    if kind == "paths":
        paths = {}
        for name, adata in mod.items():
            paths[name] = folder / f"{name}.h5ad"
            adata.write_h5ad(paths[name])
        return paths
    # MuData stores the union of the cells of all modalities.
    cells = sorted(set().union(*(adata.obs_names for adata in mod.values())))
    obs = pd.DataFrame({"site": pd.Categorical(["x", "y"] * (len(cells) // 2))}, index=cells)
    path = folder / f"atlas.{kind}"
    # h5mu files begin with a user block of 512 bytes.
    root = h5py.File(path, "w", userblock_size=512) if kind == "h5mu" else zarr.open_group(path, mode="w")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_elem(root, "obs", obs if own is None else obs.assign(**own))
        write_elem(
            root, "obsm", {"X_mofa": np.arange(2.0 * len(cells)).reshape(-1, 2), "rna": np.ones(len(cells), bool)}
        )
        root.create_group("mod").attrs["mod-order"] = list(mod)
        for name, adata in mod.items():
            write_elem(root["mod"], name, adata)
    if kind == "h5mu":
        root.close()
    return path


def check_batches(dataset: dasksc.scDataset, mod: dict[str, AnnData], order: list[str]) -> None:
    """Check that in every batch, each row of each modality belongs to the cell given by its index."""
    seen = []
    for batch in dataset:
        cells = [order[i] for i in batch.index.tolist()]
        seen += cells
        for name, adata in mod.items():
            expected = adata[cells]
            for got, there in (
                (batch[name].X, expected.X),
                (batch[name].layers.get("twice"), expected.layers["twice"]),
                (batch[name].obsm.get("pca"), expected.obsm["pca"]),
            ):
                if got is not None:
                    there = there.toarray() if sp.issparse(there) else there
                    np.testing.assert_array_equal(got.to_dense() if got.is_sparse_csr else got, there)
            if f"{name}:score" in batch.obs:
                assert batch.obs[f"{name}:score"].tolist() == expected.obs["score"].tolist()
    assert sorted(seen) == COMMON


# Every kind of input, and both layouts of batches.
@pytest.mark.parametrize(("kind", "layout"), [("dict", "dense"), ("paths", "csr"), ("h5mu", "dense"), ("zarr", "csr")])
def test_each_batch_holds_the_same_cells_of_every_modality(tmp_path: Path, kind: str, layout: Any) -> None:
    data = store(tmp_path, kind)
    opened = dasksc.Modalities(data)
    assert list(opened) == ["rna", "prot", "atac"]
    assert sorted(opened.obs_names) == COMMON
    assert all(adata.obs_names.equals(opened.obs_names) for adata in opened.mod.values())
    has_own = kind in ("h5mu", "zarr")
    assert has_own == ("site" in opened.obs)
    dataset = dasksc.scDataset(
        data if has_own else opened,
        dasksc.BlockShuffling(4),
        8,
        2,
        obs=["rna:score", "prot:kind", *(["site"] if has_own else [])],
        layers=["rna:twice"],
        obsm=["prot:pca"],
        layout=layout,
        seed=0,
    )
    check_batches(dataset, parts(), list(opened.obs_names))
    batch = next(iter(dataset))
    assert set(batch) == {"rna", "prot", "atac", "obs", "index"}
    assert (set(batch.rna.layers), set(batch.prot.layers), set(batch.prot.obsm)) == ({"twice"}, set(), {"pca"})
    assert set(batch.obs) == {"rna:score", "prot:kind", *(["site"] if has_own else [])}
    assert isinstance(batch.to("cpu").rna, dasksc.Batch)
    assert dataset.categories["prot:kind"] == ["a", "b"]


def test_filters_splits_genes_and_copies_work_as_for_one(tmp_path: Path) -> None:
    opened = dasksc.Modalities(store(tmp_path, "paths"))
    rows = dasksc.split(opened, fractions=(0.5, 0.5), stratify="rna:kind")["train"]
    dataset = dasksc.scDataset(
        opened,
        dasksc.BlockShuffling(4, indices=rows),
        8,
        genes={"rna": ["v1-3", "v1-0"]},
        filter="`prot:kind` == 'a'",
        seed=0,
    )
    expected = set(rows) & set(np.flatnonzero(opened.obs["prot:kind"] == "a"))
    batches = list(pickle.loads(pickle.dumps(dataset)))
    assert {int(i) for batch in batches for i in batch.index} == expected
    for batch in batches:
        assert (batch.rna.X.shape[1], batch.prot.X.shape[1]) == (2, 5)
        cells = opened.obs_names[batch.index.numpy()]
        np.testing.assert_array_equal(batch.rna.X, parts()["rna"][cells, ["v1-3", "v1-0"]].X.toarray())
    assert dasksc.check(dataset).process_bytes > 0
    balanced = dasksc.scDataset(opened, dasksc.ClassBalancedSampling(label_key="rna:kind"), 8, seed=0)
    assert len(list(balanced)) == len(balanced)


def test_a_mudata_is_taken_as_it_is(tmp_path: Path) -> None:
    mudata = pytest.importorskip("mudata")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = mudata.MuData(parts())
        data.obs["site"] = np.arange(data.n_obs)
        data.write(tmp_path / "atlas.h5mu")
        backed = mudata.read_h5mu(tmp_path / "atlas.h5mu", backed="r")
        for given in (data, tmp_path / "atlas.h5mu", backed):
            opened = dasksc.Modalities(given)
            dataset = dasksc.scDataset(given, dasksc.Streaming(), 8, obs=["site", "rna:score"], seed=0)
            check_batches(dataset, parts(), list(opened.obs_names))
            assert opened.obs["site"].tolist() == data.obs["site"][opened.obs_names].tolist()


REFUSED: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (dasksc.open, InputError, "dasksc.Modalities"),
    (lambda path: dasksc.Modalities(path.with_name("atlsa.h5mu")), MissingPathError, r"atlas\.h5mu"),
    (lambda _: dasksc.Modalities({"a": parts()["rna"], "b": AnnData(np.ones((2, 2)))}), InputError, "share no name"),
    (lambda _: dasksc.Modalities({"sets": parts()["rna"]}), InputError, "'sets'"),
    (lambda _: dasksc.Modalities({"": parts()["rna"]}), InputError, "empty"),
    (lambda _: dasksc.Modalities({1: parts()["rna"], "1": parts()["prot"]}), InputError, "1, '1'"),
    (lambda _: dasksc.Modalities({}), InputError, "no modality"),
    (lambda _: dasksc.Modalities({"a": ad.concat([parts()["rna"]] * 2)}), InputError, "obs_names"),
    (lambda path: dasksc.scDataset(path, obs=["rna:scor"]), MissingKeyError, "rna:score"),
    (lambda path: dasksc.scDataset(path, layers=["twice"]), InputError, "modality"),
    (lambda path: dasksc.scDataset(path, layers=["rna:twic"]), MissingKeyError, "twice"),
    (lambda path: dasksc.scDataset(path, genes=[0]), InputError, "dict"),
    (lambda p: dasksc.scDataset((m := dasksc.Modalities(p)).mod.update(rna=m["rna"][::-1]) or m), InputError, "Align"),
    (lambda path: dasksc.scDataset(path, batch_transform=lambda batch: batch), InputError, "hooks"),
]


@pytest.mark.filterwarnings("ignore:Observation names are not unique")
@pytest.mark.parametrize(("use", "error", "fact"), REFUSED)
def test_what_does_not_fit_is_refused(tmp_path: Path, use: Any, error: type[Exception], fact: str) -> None:
    path = store(tmp_path, "h5mu")
    with pytest.raises(error, match=fact):
        use(path)


@pytest.mark.parametrize("kind", ["zarr", "memory"])
def test_columns_and_obsm_of_the_mudata_itself_are_available(tmp_path: Path, kind: str) -> None:
    own = {"rna:leiden": "own", "batch:1": "own", "rna:score": "a copy"}
    path = store(tmp_path, "h5mu" if kind == "memory" else kind, own)
    given: Any = path
    if kind == "memory":
        mudata = pytest.importorskip("mudata")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = mudata.read_h5mu(path)
    opened = dasksc.Modalities(given)
    assert set(own) | {"site", "prot:kind"} <= set(opened.obs)
    assert opened.obs.columns.is_unique
    assert set(opened.obs["rna:leiden"]) == set(opened.obs["batch:1"]) == {"own"}
    assert opened.obs["rna:score"].tolist() == parts()["rna"].obs["score"][opened.obs_names].tolist()
    some = dasksc.Modalities(given, obs=["rna:leiden", "batch:1", "rna:score"])
    pd.testing.assert_frame_equal(some.obs, opened.obs[["rna:leiden", "batch:1", "rna:score"]])
    with pytest.raises(MissingKeyError, match="scor"):
        dasksc.Modalities(given, obs=["rna:scor"])
    assert set(opened.obsm) == {"X_mofa"}
    everyone = sorted(set().union(*(adata.obs_names for adata in parts().values())))
    expected = [[2.0 * i, 2.0 * i + 1] for i in map(everyone.index, opened.obs_names)]
    assert opened.obsm["X_mofa"].compute().tolist() == expected
    opened["rna"].obsm["X_mofa"] = opened.obsm["X_mofa"]
    batch = next(iter(dasksc.scDataset(opened, dasksc.Streaming(), 8, obsm=["rna:X_mofa"], seed=0)))
    assert batch.rna.obsm["X_mofa"].tolist() == expected[:8]

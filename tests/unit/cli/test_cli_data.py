"""Commands `dasksc info`, `check` and `suggest`, and `describe`, on which `info` is based."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData
from anndata.io import write_elem

import dasksc
from tests.support.commands import run_command

pytestmark = pytest.mark.core

N, GENES = 300, 30


def atlas(seed: int, genes: slice = slice(None)) -> AnnData:
    rng = np.random.default_rng(seed)
    kinds = pd.Categorical(np.repeat(["B cell", "T cell"], [60, N - 60]))
    kinds[:5] = np.nan
    obs = pd.DataFrame(
        {"cell_type": kinds, "n_genes": rng.integers(0, 99, N)}, index=[f"c{seed}-{i}" for i in range(N)]
    )
    x = sp.random(N, GENES, 0.3, format="csr", dtype=np.float32, random_state=seed)
    full = AnnData(
        x, obs=obs, var=pd.DataFrame(index=[f"g{i}" for i in range(GENES)]), obsm={"pca": rng.random((N, 2))}
    )
    return full[:, genes].copy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    atlas(0).write_h5ad(folder / "plain.h5ad")
    atlas(1, slice(5, None)).write_h5ad(folder / "gzip.h5ad", compression="gzip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        atlas(2).write_zarr(folder / "third.zarr")
    by_columns = atlas(3)
    by_columns.X = by_columns.X.tocsc()
    (folder / "other").mkdir()
    by_columns.write_h5ad(folder / "other" / "columns.h5ad")
    return folder


def run_json(*arguments: Any) -> dict[str, Any]:
    return json.loads(run_command(*arguments, "--json").stdout)


def matrices(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["key"]: one for one in report["matrices"]}


def test_info_tells_what_is_in_a_file_and_how_it_is_stored(folder: Path) -> None:
    report = run_json("info", folder / "plain.h5ad", "--seconds", 0)
    assert (report["n_obs"], report["n_vars"], report["n_files"], report["rates"]) == (N, GENES, 1, [])
    assert report["obs"] == [
        {"name": "cell_type", "dtype": "category", "n_classes": 2, "n_missing": 5},
        {"name": "n_genes", "dtype": "int64", "n_classes": None, "n_missing": 0},
    ]
    found = matrices(report)
    assert set(found) == {"X", "obsm/pca"}
    with h5py.File(folder / "plain.h5ad") as file:
        stored = [file[f"X/{name}"] for name in ("data", "indices", "indptr")]
        assert found["X"]["nbytes"] == sum(one.nbytes for one in stored)
        assert found["X"]["stored_bytes"] == sum(one.id.get_storage_size() for one in stored)
    assert (found["X"]["encoding"], found["X"]["dtype"], found["X"]["codec"]) == ("csr", "float32", None)
    assert found["obsm/pca"]["encoding"] == "dense"
    text = run_command("info", folder / "plain.h5ad", "--seconds", 0).stdout
    assert ["cell_type", "category", "2", "5"] in [line.split() for line in text.splitlines()]


def test_check_is_what_dasksc_check_says(folder: Path) -> None:
    options = ["--label-key", "cell_type", "--world-size", 3, "--batch-size", 16, "--block-size", 4]
    report = run_json("check", folder / "plain.h5ad", *options)
    dataset = dasksc.scDataset(folder / "plain.h5ad", dasksc.BlockShuffling(4), 16, obs=["cell_type"], seed=0)
    expected = dasksc.check(dataset, 3, label_key="cell_type")
    assert [rank["n_batches"] for rank in report["ranks"]] == [rank.n_batches for rank in expected.ranks]
    assert report["world_size"] == 3
    assert report["name"] == f"{folder / 'plain.h5ad'} by BlockShuffling"
    assert {one["name"]: one["stored"] for one in report["classes"]} == {
        one.name: one.stored for one in expected.classes
    }


def test_check_exits_with_a_status(folder: Path) -> None:
    path = folder / "plain.h5ad"
    empty = ["check", path, "--batch-size", 500, "--drop-last"]
    assert "\nwarnings\n  - " in run_command(*empty).stdout
    run_command(*empty, "--strict", exit_code=1)
    run_command("check", path, "--batch-size", 30, "--strict", "--block-size", 1)
    assert "label_key" in run_command("check", path, "--strategy", "balance", exit_code=1).stderr
    run_command("check", exit_code=2)


@pytest.fixture(scope="module")
def cite(folder: Path) -> Path:
    """Write an .h5mu file in which each modality lacks some of the cells."""
    path = folder / "other" / "cite.h5mu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = {"rna": atlas(4)[20:].copy(), "prot": atlas(4, slice(9))[:280].copy()}
        with h5py.File(path, "w") as file:
            write_elem(file, "obs", pd.DataFrame(index=atlas(4).obs_names))
            file.create_group("mod").attrs["mod-order"] = list(parts)
            for name, adata in parts.items():
                write_elem(file["mod"], name, adata)
    return path


def test_options_of_open_reach_every_command(folder: Path) -> None:
    joined = [folder / "plain.h5ad", folder / "gzip.h5ad", "--join", "outer", "--label", "plate", "--keys", "a,b"]
    assert run_json("info", *joined, "--seconds", 0)["n_vars"] == GENES
    assert "plate" in [column["name"] for column in run_json("info", *joined, "--seconds", 0)["obs"]]
    assert [one["name"] for one in run_json("check", *joined, "--label-key", "plate")["classes"]] == ["a", "b"]
    assert "fetch_factor" in run_json("suggest", *joined, "--fill_value", "0", "--index-unique", "-")


def test_modalities_take_no_options_of_open(cite: Path) -> None:
    assert [one["name"] for one in run_json("info", cite, "--seconds", 0)["modalities"]] == ["rna", "prot"]
    run_json("check", cite, "--label-key", "rna:cell_type")
    assert "label" in run_command("check", cite, "--label", "x", exit_code=1).stderr
    assert "several modalities" in run_command("suggest", cite, exit_code=1).stderr


def test_an_anndata_in_memory_is_described_too() -> None:
    found = dasksc.describe(atlas(0), seconds=0.01)
    assert (found.n_obs, found.matrices, len(found.rates)) == (N, [], 4)
    assert all(rate.rows_per_s > 0 for rate in found.rates)
    for seconds in (-1, float("nan")):
        with pytest.raises(dasksc.InputError, match="seconds="):
            dasksc.describe(atlas(0), seconds=seconds)

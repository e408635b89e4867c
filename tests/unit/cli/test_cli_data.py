"""Commands `dasksc info`, `check` and `suggest`, and `describe`, on which `info` is based."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import click.testing
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata import AnnData
from dask.utils import format_bytes

import dasksc
from dasksc import InputError, cli
from tests.support.cell_ranger import make_counts, write_v2

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


def run(*arguments: Any, exit_code: int = 0) -> click.testing.Result:
    done = click.testing.CliRunner().invoke(cli.group, [str(one) for one in arguments])
    assert done.exit_code == exit_code, (done.output, done.exception)
    return done


def run_json(*arguments: Any) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json").stdout)


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
    text = run("info", folder / "plain.h5ad", "--seconds", 0).output
    assert ["cell_type", "category", "2", "5"] in [line.split() for line in text.splitlines()]


def test_check_is_what_dasksc_check_says(folder: Path) -> None:
    options = ["--label-key", "cell_type", "--world-size", 3, "--batch-size", 16, "--block-size", 4]
    report = run_json("check", folder / "plain.h5ad", *options)
    dataset = dasksc.scDataset(folder / "plain.h5ad", dasksc.BlockShuffling(4), 16, obs=["cell_type"], seed=0)
    expected = dasksc.check(dataset, 3, label_key="cell_type")
    assert [rank["n_batches"] for rank in report["ranks"]] == [rank.n_batches for rank in expected.ranks]
    assert report["world_size"] == 3
    assert {one["name"]: one["stored"] for one in report["classes"]} == {
        one.name: one.stored for one in expected.classes
    }
    assert (
        f"request_bytes      {format_bytes(report['request_bytes'])}\n"
        in run("check", folder / "plain.h5ad", *options).output
    )


def test_check_exits_with_a_status(folder: Path) -> None:
    path = folder / "plain.h5ad"
    dropping = ["check", path, "--batch-size", 250, "--drop-last"]
    assert "\nwarnings\n  - " in run(*dropping).output
    run(*dropping, "--strict", exit_code=1)
    run("check", path, "--batch-size", 30, "--strict", "--block-size", 1)
    assert "--label-key" in run("check", path, "--strategy", "balance", exit_code=2).stderr
    run("check", exit_code=2)


def test_errors_are_told_on_stderr_with_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, near in (
        (["info", folder / "plane.h5ad"], "plain.h5ad"),
        (["check", folder / "plain.h5ad", "--filter", "n_gene > 3"], "'n_genes'"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (1, "")
        assert err.startswith("dasksc: ")
        assert near in err


def test_suggest_prints_or_dumps_the_suggestions(folder: Path) -> None:
    path = folder / "plain.h5ad"
    report = run_json("suggest", path, "--batch-size", 8)
    assert report["fetch_factor"] >= 1
    assert "measured" not in report
    measured = run_json("suggest", path, folder / "gzip.h5ad", "--batch-size", 8, "--label-key", "cell_type")
    assert [one["block_size"] for one in measured["measured"]] == [1, 4, 16, 64, 256, 1024]
    assert "block_size_balanced" in run("suggest", path).stdout


@pytest.fixture
def two_genomes(tmp_path: Path) -> Path:
    return write_v2(tmp_path / "two.h5", {"hg19": make_counts(30, 12), "mm10": make_counts(20, 9)})


def test_the_genome_of_a_10x_file_is_chosen(two_genomes: Path, tmp_path: Path) -> None:
    for arguments in (["info", "--seconds", 0], ["check"], ["suggest"], ["stats"]):
        failed = click.testing.CliRunner().invoke(cli.group, [*map(str, arguments), str(two_genomes)])
        assert isinstance(failed.exception, InputError), failed.output
        assert "choose one: --genome 'hg19'" in str(failed.exception)
        report = run_json(*arguments, two_genomes, "--genome", "mm10")
        assert report.get("n_obs", report.get("n_cells", 20)) == 20
    run("convert", two_genomes, tmp_path / "mm10.zarr", "--genome", "mm10")
    assert dasksc.open(tmp_path / "mm10.zarr").shape == (20, 9)
    code = run("suggest", two_genomes, "--genome", "mm10").stdout.partition("Code to paste:\n\n")[2]
    named: dict[str, Any] = {}
    exec(compile(code, "suggested", "exec"), named)
    assert named["batch"].shape[1] == 9


def test_stats_writes_names_of_cells_and_refuses_a_prefix_of_no_gene(tmp_path):
    path, out = tmp_path / "a.h5ad", tmp_path / "out.h5ad"
    stored = AnnData(np.ones((3, 2), np.float32), pd.DataFrame(index=list("abc")), pd.DataFrame(index=["MT-1", "g"]))
    stored.write_h5ad(path)
    run("stats", path, "--qc", "mito=MT-", "--out", out)
    with h5py.File(out) as file:
        columns: list[Any] = []
        file.visititems(lambda _, item: columns.append(item[()].tolist()) if isinstance(item, h5py.Dataset) else None)
    assert [b"a", b"b", b"c"] in columns
    refused = click.testing.CliRunner().invoke(cli.group, ["stats", str(path), "--qc", "mito=mt-"])
    assert isinstance(refused.exception, InputError)
    assert "'mt-'" in str(refused.exception)


def test_an_anndata_in_memory_is_described_too() -> None:
    found = dasksc.describe(atlas(0), seconds=0.01)
    assert (found.n_obs, found.matrices, len(found.rates)) == (N, [], 4)
    assert all(rate.rows_per_s > 0 for rate in found.rates)
    with pytest.raises(dasksc.InputError, match="negative"):
        dasksc.describe(atlas(0), seconds=-1)

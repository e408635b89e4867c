"""Tests that run the benchmarks at tiny sizes, at which the measurements are meaningless."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import anndata as ad
import distributed
import numpy as np
import pytest
from distributed.deploy.spec import SpecCluster

import dasksc
from tests.support import programs
from tests.support.programs import ROOT

BENCHMARKS = ROOT / "benchmarks"
CELLS, GENES = 1500, 200
SIZES = ["--block", "16", "--batch", "32", "--fetch", "512"]
PEER_PYTHON = os.environ.get("DASKSC_PEER_PYTHON")


pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("modules"), pytest.mark.xdist_group("benchmarks")]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return the folder of the atlases, which are written once."""
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture
def modules(monkeypatch):
    """Make the modules of the benchmarks importable; close the Dask clusters that contenders in this process start."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    clients, clusters = set(distributed.Client._instances), set(SpecCluster._instances)
    yield
    for started in [*set(distributed.Client._instances) - clients, *set(SpecCluster._instances) - clusters]:
        started.close()


class Here:
    """Contender that runs in this process, for tests that do not need a separate one."""

    def __init__(self, name, *, script, spec, label=None, drop=None, **_):
        import _harness

        module = importlib.import_module(script.stem)
        self._build = module.CONTENDERS[name] if hasattr(module, "CONTENDERS") else module.build
        self.name, self._spec, self._drop = label or name, spec, drop
        self._epoch = self._build(spec)
        self.cold_start = _harness.begin(self._epoch, spec) | {"total_s": 0}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._epoch = None

    def work(self, *, seconds):
        self.run(seconds=seconds, consume=True)

    def run(self, *, seconds, consume):
        import _harness

        dropped = {}
        if self._drop is not None:
            self._epoch = None
            dropped = self._drop()
            self._epoch = self._build(self._spec)
        total = _harness._total if consume else None
        done = _harness.measure(
            self._epoch,
            seconds=seconds,
            fetch_rows=self._spec["fetch"],
            consume=total,
            whole_epochs=self._spec.get("whole_epochs", False),
        )
        rate = {"rows_per_s": done.rows_per_s, "cores": 1.0, "n_rows": done.n_rows, "checksum": done.checksum}
        return rate | dropped


def run(program: str, work: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark as a program, at a tiny size."""
    command = [sys.executable, BENCHMARKS / program, "--work", work, *options]
    return programs.ended([*command, "--cells", CELLS, "--genes", GENES], is_preloaded=True)


def call(program: str, work: Path, *options: str) -> dict:
    """Call the `main` of a benchmark at a tiny size, with contenders in this process; return its report."""
    module = importlib.import_module(program)
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "Contender"):
            patch.setattr(module, "Contender", Here)
        return module.main(["--work", str(work), *options, "--cells", str(CELLS), "--genes", str(GENES)])


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# Pairs of file and layout; the second pair runs in this process.
@pytest.mark.parametrize(("files", "layout", "is_program"), [("gzip", "dense", True), ("zarr", "csr", False)])
def test_compare_writes_a_table_json_and_a_picture(work, tmp_path, capsys, files, layout, is_program):
    pytest.importorskip("matplotlib")
    out = tmp_path / "results" / "compare"
    contenders = ["dasksc threads", "anndata backed", *(["AnnLoader"] if layout == "dense" else [])]
    options = [*SIZES, "--files", files, "--layout", layout, "--rounds", "1", "--seconds", "0.05", "--warm-up", "0"]
    options += ["--out", str(out), "--contenders", *contenders]
    if is_program:
        done = run("compare.py", work, *options)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        call("compare", work, *options)
        printed = capsys.readouterr().out
    report = json.loads(out.with_suffix(".json").read_text())
    assert {result["name"] for result in report["results"]} == set(contenders), printed
    assert (report["n_rows"], report["n_vars"], report["fetch"]) == (CELLS, GENES, 512)
    for result in report["results"]:
        assert result["produced"] > 0
        assert result["consumed"] > 0
        assert result["cold_start"]["shape"] == [32, GENES]
        assert result["cold_start"]["dtype"] == "torch.float32"
        assert f"| {result['name']} |" in printed
    assert report["limits"]["memcpy_cells_per_s"] > 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_targets_measures_pairs_and_says_what_it_skips(work, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scdataset")
    out = tmp_path / "targets"
    names = ["h5ad cold", "sharded csr", "dask gzip", "ranks h5ad dense"]
    options = ["--targets", "--rounds", "1", "--seconds", "0.05", "--warm-up", "0", "--out", str(out)]
    call("compare", work, *SIZES, *options, "--rows", *names)
    printed = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(out.with_suffix(".json").read_text())["rows"]}
    assert list(rows) == names
    assert rows["sharded csr"]["not_measured"] == "skipped: requires --peer-python with annbatch"
    assert "| sharded csr | skipped: requires --peer-python with annbatch |" in printed
    if len(os.sched_getaffinity(0)) < 2:
        assert rows.pop("ranks h5ad dense")["not_measured"].startswith("skipped: requires 2 cores")
    for row in rows.values():
        if row["name"] == "sharded csr":
            continue
        assert row["ratio"] == row["ours_cells_per_s"] / row["theirs_cells_per_s"] > 0, printed
    assert {name: list(row.get("limits", [])) for name, row in rows.items()} == {
        name: limits
        for name, limits in zip(names, [["disk"], [], ["decode", "fill"], ["fill"]], strict=True)
        if name in rows
    }
    assert rows["h5ad cold"]["sides"]["ours"]["dropped"][0].startswith("posix_fadvise")
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_peer_is_credited_with_its_better_rate_and_we_are_not():
    from _harness import Result
    from _targets import ROWS, report_of

    def result(name, produced, consumed):
        start = {"total_s": 1.0, "fetch": 512}
        return Result(name=name, cold_start=start, produced=produced, consumed=consumed, cores=[1.0] * len(produced))

    rows = {row.name: row for row in ROWS}
    ours, theirs = result("ours", [90.0, 100.0, 80.0], [50.0] * 3), result("theirs", [10.0] * 3, [20.0, 15.0, 30.0])
    limits = {"decode": {"is": "a", "cells_per_s": 600.0}, "fill": {"is": "b", "cells_per_s": 300.0}}
    against_peer = report_of(rows["gzip dense"], ours, theirs, limits)
    assert (against_peer["ratio"], against_peer["theirs_credited"]) == (90 / 20, "consumed")
    assert against_peer["ratio_range"] == [80 / 30, 100 / 15]
    assert not against_peer["met"]
    # Sequential limits combine to 1 / (1 / 600 + 1 / 300).
    assert against_peer["limit_cells_per_s"] == pytest.approx(200)
    assert against_peer["share_of_limit"] == pytest.approx(0.45)
    against_ourselves = report_of(rows["dask gzip"], ours, theirs, limits)
    assert (against_ourselves["ratio"], against_ourselves["met"]) == (90 / 10, True)


def test_compare_refuses_sizes_that_do_not_fit(work):
    done = run("compare.py", work, "--block", "48", "--batch", "32", "--fetch", "512")
    assert done.returncode != 0
    assert "--fetch 512 must be a multiple of --batch and of --block" in done.stderr


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dasksc threads", "dense"),
        ("dasksc threads", "csr"),
        ("dasksc synchronous", "dense"),
        ("dasksc client", "dense"),
        ("dasksc without Dask", "dense"),
        ("dasksc without Dask", "csr"),
        ("scDataset", "dense"),
        ("scDataset", "csr"),
        ("scDataset per fetch", "dense"),
        ("annbatch own store", "dense"),
        ("annbatch own store", "csr"),
        ("annbatch AnnData zarr", "dense"),
        ("anndata backed", "dense"),
        ("anndata backed", "csr"),
    ],
)
def test_every_contender_hands_over_every_value_once_an_epoch(work, tmp_path, name, layout):
    from _harness import Contender
    from compare import main_options, prepare

    if name.startswith("scDataset"):
        pytest.importorskip("scdataset")
    python, more = sys.executable, []
    if name.startswith("annbatch"):
        if PEER_PYTHON is None:
            pytest.skip("DASKSC_PEER_PYTHON names no interpreter with annbatch")
        python, more = PEER_PYTHON, ["--peer-python", PEER_PYTHON]
    options = [*SIZES, "--work", str(work), "--cells", str(CELLS), "--genes", str(GENES), "--layout", layout]
    spec = prepare(main_options([*options, *more]))
    where = Contender if name.startswith("annbatch") else Here
    with where(name, python=python, script=BENCHMARKS / "_contenders.py", spec=spec, log=tmp_path / "log") as contender:
        epoch = contender.run(seconds=0, consume=True)
    total = ad.read_h5ad(spec["path"]).X.sum(dtype=np.float64)
    assert epoch["n_rows"] == CELLS
    assert epoch["checksum"] == pytest.approx(total, rel=1e-5)


def test_overlap_prints_the_ratio_and_the_wait_and_sets_the_exit_status(work):
    done = run("overlap.py", work, *SIZES, "--rounds", "1", "--ranks", "2", "--epochs", "2")
    report = last_json(done)
    assert done.returncode == (report["ratio"] > 1.25 or report["wait_share"] >= 0.05)
    alone = call("overlap", work, *SIZES, "--rounds", "1", "--epochs", "2")
    for one, n_ranks in ((report, 2), (alone, 1)):
        assert (one["n_ranks"], one["n_batches"]) == (n_ranks, -(-CELLS // (32 * n_ranks)))
        [only] = one["rounds"]
        assert only["ratio"] == only["both_s"] / max(only["loading_s"], only["stepping_s"])
        assert 0 < only["wait_share"] < 1


def test_remote_prints_the_share(work, tmp_path, capsys):
    pytest.importorskip("obstore")
    out = tmp_path / "remote"
    report = call("remote", work, *SIZES, "--rounds", "1", "--fetches", "2", "--latency", "0.005", "--out", str(out))
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    # Bytes in transit at the start or end of the measurement count as sent, so the share can exceed 1.
    assert 0 < report["share"] < 1.1
    assert 0 < report["useful"] <= 1
    assert f"{report['useful']:.0%} of the bytes in delivered rows" in capsys.readouterr().out


def test_memory_prints_every_peak_and_compares_it_with_the_projection(work):
    done = run("memory.py", work, *SIZES, "--epochs", "2")
    report = last_json(done)
    assert len(report["peaks"]) == 2
    assert report["before"] > 0
    assert report["projected"] > 0
    assert done.returncode == (not report["is_ok"])


def test_cluster_prints_every_ratio_and_what_a_scheduler_carries(work):
    pytest.importorskip("scanpy")
    options = ["--rounds", "1", "--seconds", "0.05", "--warm-up", "0", "--ranks", "3", "--tasks", "4"]
    report = call("cluster", work, *SIZES, *options)
    assert len(report["cells_per_s"]) == 6
    assert len(report["ratios"]) == 4
    assert all(row["met"] == (row["ratio"] >= row["target"]) for row in report["ratios"])
    assert report["shared"]["n_tasks"] == 12
    assert report["shared"]["ranks_at_100_ms"] == pytest.approx(100 / report["shared"]["cpu_ms_per_task"])


def test_plans_measures_every_case_beside_reading_and_the_peer(work, tmp_path, monkeypatch, capsys):
    pytest.importorskip("scdataset")
    out = tmp_path / "plans"
    cases = ["blocks", "balanced", "a tenth, each once"]
    import plans

    assert plans.run("ours", "blocks", 1_000, 64, 1, repeats=1)["first_fetch_s"] > 0  # in a separate process
    here = {"ours": plans.child, "peer": plans.peer, "reading": plans.reading}
    monkeypatch.setattr(plans, "run", lambda kind, *arguments, repeats: here[kind](*arguments))
    call("plans", work, "--rows", "40000", "--repeats", "1", "--out", str(out), "--cases", *cases)
    printed = capsys.readouterr().out
    report = json.loads(out.with_suffix(".json").read_text())
    results = {(one["case"], one["block"]): one for one in report["results"]}
    assert {case for case, _ in results} == set(cases)
    for one in results.values():
        assert one["first_fetch_s"] >= one["construct_s"] > 0
        for layout, share in one["share_of_reading"].items():
            rate = report["reading_rows_per_s"][f"{layout} {one['block']}"]
            assert share == pytest.approx(one["fetch_s"] / (64 * 256 / rate))
        assert f"| {one['case']} | {one['block']} |" in printed
    for case in ("blocks", "balanced"):
        one = results[case, 64]
        assert one["ratio"] == one["peer"]["scaled_s"] / one["first_fetch_s"] > 0


def test_plans_names_the_targets_that_are_missed():
    from plans import missed

    good = {"first_fetch_s": 0.001, "peak_bytes": 5e5, "ratio": 600, "share_of_reading": {"dense": 0.01, "csr": 0.02}}
    assert missed({"case": "blocks", "block": 64, **good}) == []
    bad = {"first_fetch_s": 0.006, "peak_bytes": 5e5, "ratio": 499, "share_of_reading": {"dense": 0.01, "csr": 0.021}}
    assert missed({"case": "blocks", "block": 64, **bad}) == ["first_fetch_s", "ratio", "share of reading csr"]
    assert missed({"case": "one huge weight", "block": 1, "share_of_reading": {"dense": 0.05, "csr": 0.07}}) == [
        "share of reading csr"
    ]


def test_diversity_measures_entropy_and_throughput_and_draws_both(work, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "diversity"
    sizes = ["--batch", "32", "--blocks", "1", "64", "--fetch-factors", "4", "16"]
    call("diversity", work, *sizes, "--rounds", "1", "--seconds", "0.02", "--out", str(out))
    rows = json.loads(out.with_suffix(".json").read_text())["results"]
    assert [(row["fetch_factor"], row["block_size"]) for row in rows] == [(4, 1), (4, 64), (16, 1), (16, 64)]
    assert all(row["rows_per_s"] > 0 for row in rows)
    share = {(row["fetch_factor"], row["block_size"]): row["share"] for row in rows}
    # Blocks of one row mix like random rows. With larger blocks, a fetch mixes better if it spans more batches.
    assert share[4, 1] == pytest.approx(1, abs=0.05)
    assert share[4, 64] < share[16, 64] < share[16, 1]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_balanced_scores_both_strategies_by_type_and_draws_them(work, tmp_path):
    pytest.importorskip("matplotlib")
    import balanced

    out = tmp_path / "balanced"
    sizes = ["--work", str(work), "--cells", str(CELLS), "--genes", str(GENES), "--batch", "32"]
    report = balanced.main([*sizes, "--steps", "20", "--seeds", "1", "--out", str(out)])
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    rare = report["scores"]["rare_balanced_accuracy"]
    assert report["is_better"] == (rare["balanced"]["median"] > rare["shuffled"]["median"])
    types = report["types"]
    sizes = np.array([one["n_training"] for one in types])
    assert sizes.sum() == pytest.approx(0.8 * CELLS, abs=len(types))
    assert 0 < report["n_rare_types"] == sum(one["is_rare"] for one in types) < report["n_types"] == len(types)
    for strategy in ("shuffled", "balanced"):
        recall = np.array([one["recall"][strategy] for one in types])
        rare = np.array([one["is_rare"] for one in types])
        scores = {name: one[strategy]["median"] for name, one in report["scores"].items()}
        assert scores["balanced_accuracy"] == pytest.approx(recall.mean())
        assert scores["rare_balanced_accuracy"] == pytest.approx(recall[rare].mean())
        assert 0 < scores["accuracy"] < 1
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_recall_counts_each_type_by_itself():
    import balanced

    recall, labels, is_rare = np.array([1.0, 0.5, 0.0]), np.array([0, 0, 0, 0, 1, 1, 2]), np.array([False, True, True])
    scores = balanced.scores_of(recall, labels, is_rare)
    assert scores == {"balanced_accuracy": 0.5, "rare_balanced_accuracy": 0.25, "accuracy": pytest.approx(5 / 7)}


def test_tokens_compares_transforms_with_plain_functions(work, tmp_path, capsys):
    import tokens

    out = tmp_path / "tokens"
    sizes = ["--work", str(work), "--cells", str(CELLS), "--genes", str(GENES), *SIZES]
    report = tokens.main([*sizes, "--rounds", "1", "--seconds", "0.05", "--out", str(out)])
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    assert len(report["cells_per_s"]) == 5
    assert all(rate > 0 for rate in report["cells_per_s"].values())
    assert set(report["one_thread_us"]) == {"sparse batches", "RankTokens", "ValueBins"}
    assert all(us > 0 for us in report["one_thread_us"].values())
    assert "| NumPy, in the loop |" in capsys.readouterr().out


def test_predict_compares_writing_with_the_loop_alone(work, tmp_path, capsys):
    import predict

    out = tmp_path / "predict"
    sizes = ["--work", str(work), "--cells", str(CELLS), "--genes", str(GENES), "--batch", "64"]
    report = predict.main([*sizes, "--rounds", "1", "--out", str(out)])
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    assert {layout: set(rates) for layout, rates in report["cells_per_s"].items()} == {
        "dense": {"loop", "predict"},
        "csr": {"loop", "predict"},
    }
    assert report["least_share"] > 0
    assert [one["n_obs"] for one in report["memory"]][:2] == [CELLS // 4, CELLS]
    # With so few cells, the libraries take more memory than the batches, and the projection covers only the batches.
    assert all(one["projected_bytes"] > 0 for one in report["memory"])
    assert [one["limit"] for one in report["memory"]] in ([None, None], [None, None, "1GiB"])
    assert "| dense |" in capsys.readouterr().out


def test_flat_compares_the_memory_of_passes_over_several_sizes(work, tmp_path, capsys):
    import flat

    out = tmp_path / "flat"
    sizes = ["--work", str(work), "--sizes", str(CELLS // 2), str(CELLS), "--genes", str(GENES)]
    report = flat.main([*sizes, "--rounds", "1", "--out", str(out)])
    assert set(json.loads(out.with_suffix(".json").read_text())) == {"machine", *report}
    assert list(report["peak_bytes"]) == ["statistics", "seurat_v3", "predict"]
    assert all(list(of) == [CELLS // 2, CELLS] for of in report["peak_bytes"].values())
    assert all(report["is_flat"].values())
    assert "| predict |" in capsys.readouterr().out


def test_summaries_compares_passes_with_reading_and_scanpy(work, tmp_path, capsys):
    import summaries

    out = tmp_path / "summaries"
    sizes = ["--work", str(work), "--cells", str(CELLS), "--genes", str(GENES)]
    options = ["--rounds", "1", "--top", "50", "--batches", "1", "--groups", "3", "--out", str(out)]
    report = summaries.main([*sizes, *options])
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    assert all(seconds > 0 for seconds in report["seconds"].values())
    assert report["n_differ"] <= 2
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert "| statistics, 3 groups |" in capsys.readouterr().out


def test_augmentation_compares_transforms_with_none(work, tmp_path, capsys):
    import augmentation

    out = tmp_path / "augmentation"
    sizes = ["--work", str(work), "--cells", str(CELLS), "--genes", str(GENES), *SIZES]
    report = augmentation.main([*sizes, "--rounds", "1", "--seconds", "0.05", "--out", str(out)])
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    rows = [f"{kind}, batches of {size}" for kind in ("CSR", "dense from CSR", "dense") for size in report["batch"]]
    assert list(report["found"]) == rows
    assert all(value > 0 for row in report["found"].values() for one in row.values() for value in one.values())
    assert all(row["as they are"]["rate"] == row["as they are"]["cpu"] == 1 for row in report["found"].values())
    assert f"| {rows[-1]} |" in capsys.readouterr().out


def test_plain_tokens_are_the_genes_of_a_cell_by_descending_value():
    import tokens
    import torch

    X = torch.tensor([[0.0, 2.0, 5.0, 2.0], [1.0, 0.0, 0.0, 0.0]])
    like = dasksc.tokens.RankTokens(["a", "b", "c", "d"], max_genes=3)
    for made in (tokens.by_numpy(X.to_sparse_csr(), np.arange(3, 7), like), tokens.by_topk(X, np.arange(3, 7), like)):
        ids, values = made
        assert values.tolist() == [[5, 2, 2], [1, 0, 0]]
        assert [sorted(row) for row in ids.tolist()] == [[4, 5, 6], [0, 0, 3]]
        assert ids[0, 0] == 5


class Clock:
    """Clock that advances only when a batch is created."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "n_rows"),
    [
        (0, 100),  # one epoch
        (1, 40),  # a fetch of 40 rows takes 4 s, so the measurement ends after the first fetch
        (5, 80),
        (9, 100),  # the third fetch ends with the epoch, after 20 rows
        (11, 140),  # the measurement ends in the second epoch
    ],
)
def test_measure_counts_whole_fetches_and_goes_on_with_the_next_epoch(monkeypatch, seconds, n_rows):
    import _harness

    clock = Clock()
    closed = []
    monkeypatch.setattr(_harness.time, "perf_counter", clock)

    def epoch():
        try:
            for _ in range(10):
                clock.now += 1
                yield np.ones(10)
        finally:
            closed.append(clock.now)

    result = _harness.measure(epoch, seconds=seconds, fetch_rows=40, consume=lambda batch: batch.sum())
    assert (result.n_rows, result.checksum) == (n_rows, n_rows)
    assert result.elapsed_s == n_rows / 10
    assert result.rows_per_s == 10
    assert closed[-1] == clock.now


def test_a_contender_that_fails_is_dropped_and_reported(tmp_path):
    from _harness import Contender, compete

    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such loader')")
    messages = []
    results = compete(
        [lambda: Contender("broken", python=sys.executable, script=script, spec={}, log=tmp_path / "broken.log")],
        rounds=1,
        seconds=1,
        warm_up_s=0,
        say=messages.append,
    )
    assert results == []
    assert "broken ended" in messages[0]
    assert "no such loader" in messages[0]


def test_the_machine_is_measured(tmp_path):
    import _machine

    file = tmp_path / "data"
    file.write_bytes(bytes(1 << 24))
    assert _machine.size_bytes(tmp_path) == 1 << 24
    assert _machine.memcpy_bytes_per_s(1 << 20, repeats=1) > 0
    disk = _machine.disk_bytes_per_s(file)
    assert disk is None or disk > 0
    assert _machine.rss_anon_bytes() > 1 << 20
    _machine.read_through(tmp_path)
    assert _machine.cached_share([file]) == 1
    dropped = _machine.drop_from_cache(file)
    assert dropped["dropped"].startswith("posix_fadvise")
    assert 0 <= dropped["cached_share"] <= 1
    assert _machine.rate_on_threads(lambda thread: lambda: 1, n_threads=2, seconds=0.01) > 0


def test_upper_bounds_of_the_machine_are_measured(monkeypatch):
    import _limits

    monkeypatch.setattr(_limits._machine.rate_on_threads, "__kwdefaults__", {"seconds": 0.01})
    spec = {"batch": 32, "n_vars": 200, "nnz": 20_000, "n_rows": 1_000}
    for kind in ("fill", "copy"):
        assert _limits.LIMITS[kind][1](spec) > 0


def test_soak_compares_every_epoch_on_all_ranks(work):
    done = run("soak.py", work, "--minutes", "0.1", "--ranks", "2", "--batch", "32", "--stalls", "0.05")
    assert done.returncode == 0, done.stderr
    report = last_json(done)
    assert report["is_ok"]
    assert report["n_epochs"] >= 1
    assert len(report["ranks"]) == 2
    # 1,500 cells, two ranks, batches of 32.
    assert report["n_steps"] == 24 * report["n_epochs"]


def test_soak_finds_cells_that_are_lost_repeated_or_in_the_same_order(monkeypatch):
    import soak
    import torch

    monkeypatch.setattr(soak.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(soak.dist, "all_reduce", lambda counts: None)
    epoch = soak.Epoch(mode="threads", n_steps=3, digest="a", n_padded=1, anon_bytes=0, n_files=0)
    steps = [3, 3]

    def gather(everyone, one):
        everyone[:] = [soak.dataclasses.replace(one, n_steps=n) for n in steps]

    monkeypatch.setattr(soak.dist, "all_gather_object", gather)
    seen: set[str] = set()

    def problems(counts, digest):
        one = soak.dataclasses.replace(epoch, digest=digest)
        return soak.compare(one, torch.tensor(counts, dtype=torch.int32), seen, 7)

    assert problems([1, 1, 2], "a") == []
    assert problems([1, 1, 2], "a") == ["epoch 7 repeats another"]
    assert problems([1, 0, 2], "b") == ["epoch 7: 1 cells not seen, 1 more than once, 1 padded"]
    assert problems([1, 2, 2], "c") == ["epoch 7: 0 cells not seen, 2 more than once, 1 padded"]
    steps[1] = 2
    assert problems([1, 1, 2], "d") == ["epoch 7: steps [3, 2]"]


def test_files_compares_joined_files_and_some_genes_and_counts_handles(work):
    options = ["--rounds", "1", "--seconds", "0.05", "--warm-up", "0", "--small-files", "12", "--layouts", "csr"]
    report = call("files", work, *SIZES, *options)
    assert list(report["formats"]["csr"]) == ["10x", "zipped"]
    for one in (*report["joined"].values(), report["genes"], *report["formats"]["csr"].values()):
        first, second = one["cells_per_s"].values()
        assert one["ratio"] == first / second > 0
    assert report["opening"]["n_files"] == 12
    assert report["opening"]["handles"] < 5
    parts = sorted((work / f"parts-of-atlas-{CELLS}x{GENES}.h5ad").glob("part*.h5ad"))
    genes = [set(ad.read_h5ad(part).var_names) for part in parts]
    assert len(genes) == 4
    assert all(len(one) < GENES for one in genes)
    whole = ad.read_h5ad(parts[0].with_name("whole.h5ad"))
    assert whole.shape == (CELLS, GENES)


def test_epochs_compares_whole_short_epochs_with_long_ones(work, capsys):
    options = ["--short", "150", "--rounds", "1", "--seconds", "0.05", "--warm-up", "0", "--layouts", "csr"]
    found = call("epochs", work, *SIZES, *options)["csr"]
    short, spread, long = found["cells_per_s"].values()
    assert found["ratios"] == {"first": short / long, "spread": spread / long}
    assert all(rate > 0 for rate in found["first_epoch_cells_per_s"].values())
    assert "| csr, spread |" in capsys.readouterr().out
    store = dasksc.open(work / f"atlas-{CELLS}x{GENES}-converted.zarr")
    assert store.shape == (CELLS, GENES)


def test_whole_epochs_are_measured_to_their_end():
    import _harness

    n_begun = 0

    def epoch():
        nonlocal n_begun
        n_begun += 1
        yield from [np.zeros((10, 1))] * 7

    options = {"seconds": 1e-9, "fetch_rows": 10, "consume": None}
    assert _harness.measure(epoch, **options).n_rows == 10
    assert _harness.measure(epoch, **options, whole_epochs=True).n_rows == 70
    assert n_begun == 2


def test_convert_measures_both_ways_and_leaves_nothing_behind(work, tmp_path):
    out = tmp_path / "convert"
    more = [] if PEER_PYTHON is None else ["--peer-python", PEER_PYTHON]
    options = ["--rounds", "1", "--seconds", "0.05", "--warm-up", "0", "--out", str(out), *more]
    report = call("convert", work, *SIZES, *options)
    assert json.loads(out.with_suffix(".json").read_text()).items() > report.items()
    rows = {row["what"]: row for row in report["rows"]}
    assert set(rows) == {"time", "peak memory", "size", "loading csr", "loading dense"}
    for row in rows.values():
        assert row["ours"] > 0
        assert ("ratio" in row) == (PEER_PYTHON is not None)
    assert report["runs"]["dasksc"][0]["rss_bytes"] >= report["runs"]["dasksc"][0]["anon_bytes"] > 1e6
    assert not list(work.glob("converted*"))


def test_opening_measures_each_work_in_a_process_of_its_own(tmp_path, capsys):
    opening = importlib.import_module("opening")
    report = opening.main(
        ["--cells", "5000", "--rounds", "1", "--work", str(tmp_path), "--works", "block-shuffled batch", "dasksc.open"]
    )
    assert [row["work"] for row in report["rows"]] == ["block-shuffled batch", "dasksc.open"]
    assert all(row["seconds"][0] > 0 and row["bytes"][0] >= 0 for row in report["rows"])
    assert "| 5,000 cells |" in capsys.readouterr().out
    adata = dasksc.open(tmp_path / "names-5000.h5ad")
    assert adata.shape == (5000, 2000)
    assert adata.X.compute().sum() == 50
    assert adata.obs_names[-1] == "AAACCTGAG000004999-1"


def test_out_of_core_compares_limits_with_none(work, capsys):
    sizes = ["--work", str(work), "--cells", str(CELLS), "--genes", str(GENES), *SIZES]
    out_of_core = importlib.import_module("out_of_core")
    limits = ["--rounds", "1", "--limits", "1GiB", "--layouts", "csr", "--no-peer"]
    report = out_of_core.main([*sizes, *limits, "--pread", "2"])
    rows = {row["label"]: row for row in report["rows"]}
    if any("skipped" in row for row in rows.values()):
        pytest.skip(next(row["skipped"] for row in rows.values() if "skipped" in row))
    assert list(rows) == ["dasksc", "dasksc 1GiB", "pread 2 threads"]
    assert rows["dasksc 1GiB"]["n_killed"] == 0
    assert all(row["rows_per_s"][0] > 0 and row["needed_bytes_per_row"] > 0 for row in rows.values())
    assert "| csr | dasksc 1GiB |" in capsys.readouterr().out

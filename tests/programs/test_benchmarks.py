"""Tests that run the benchmarks at tiny sizes, at which the measurements are meaningless.

Programs that mostly start other processes (predict, cluster, out_of_core, overlap) run before a release only.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import distributed
import numpy as np
import pytest
from distributed.deploy.spec import SpecCluster

from tests.support import programs
from tests.support.programs import ROOT

BENCHMARKS = ROOT / "benchmarks"
CELLS, GENES = 1500, 200
SIZES = ["--block", "16", "--batch", "32", "--fetch", "512"]
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


QUICK = ["--rounds", "1", "--seconds", "0.05", "--warm-up", "0"]
# Options of each program that runs in this process.
HERE = {
    "compare": [
        *SIZES,
        *QUICK,
        "--files",
        "zarr",
        "--layout",
        "csr",
        "--contenders",
        "dasksc threads",
        "anndata backed",
    ],
    "remote": [*SIZES, "--rounds", "1", "--fetches", "2", "--latency", "0.005"],
    "diversity": ["--batch", "32", "--blocks", "1", "64", "--fetch-factors", "4", *QUICK[:4]],
    "balanced": ["--batch", "32", "--steps", "20", "--seeds", "1"],
    "tokens": [*SIZES, *QUICK[:4]],
    "gpu": ["--device", "cpu", *SIZES, *QUICK[:4], "--steps", "3"],
    "summaries": ["--rounds", "1", "--top", "50", "--batches", "1", "--groups", "3"],
    "augmentation": [*SIZES, *QUICK[:4]],
    "convert": [*SIZES, *QUICK],
    "files": [*SIZES, *QUICK, "--small-files", "12", "--layouts", "csr"],
    "epochs": [*SIZES, *QUICK, "--short", "150", "--layouts", "csr"],
    "plans": ["--rows", "40000", "--repeats", "1", "--cases", "blocks", "balanced"],
}
# Programs that start ranks or measure their own process, with the statuses that they may end with.
PROGRAMS = {
    "memory.py": ([*SIZES, "--epochs", "2"], {0, 1}),
    "soak.py": (["--minutes", "0.1", "--ranks", "2", "--batch", "32", "--stalls", "0.05"], {0}),
}


def figures(report: object) -> Iterator[float]:
    """Yield every number of a report."""
    if isinstance(report, dict):
        report = list(report.values())
    if isinstance(report, list):
        for one in report:
            yield from figures(one)
    elif isinstance(report, int | float) and not isinstance(report, bool):
        yield report


@pytest.mark.parametrize("program", HERE)
def test_a_benchmark_prints_and_reports_finite_figures(program, work, capsys):
    report = call(program, work, *HERE[program])
    found = list(figures(report))
    assert len(found) > 4
    assert np.isfinite(found).all()
    assert max(found) > 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_of_whole_processes_ends_with_a_report(program, work):
    options, statuses = PROGRAMS[program]
    done = run(program, work, *options)
    assert done.returncode in statuses, done.stderr
    assert np.isfinite(list(figures(last_json(done)))).all()


def test_opening_measures_each_work_in_a_process_of_its_own(tmp_path):
    opening = importlib.import_module("opening")
    works = ["block-shuffled batch", "dasksc.open"]
    report = opening.main(["--cells", "5000", "--rounds", "1", "--work", str(tmp_path), "--works", *works])
    assert [row["work"] for row in report["rows"]] == works
    assert all(row["seconds"][0] > 0 and row["bytes"][0] >= 0 for row in report["rows"])

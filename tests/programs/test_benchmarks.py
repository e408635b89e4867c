"""Tests that run the benchmarks at tiny sizes, at which the measurements are meaningless.

Programs that mostly start other processes (convert, epochs, plans, files, predict, cluster, out_of_core, overlap, soak)
run before a release.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.programs import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("benchmarks")]

SIZES = ["--block", "16", "--batch", "32", "--fetch", "512"]
QUICK = ["--rounds", "1", "--seconds", "0.05", "--warm-up", "0"]
# Options of each program in addition to the sizes of its atlas.
OPTIONS = {
    "compare": [*SIZES, *QUICK, "--files=zarr", "--layout=csr", "--contenders", "dasksc threads", "anndata backed"],
    "remote": [*SIZES, "--rounds", "1", "--fetches", "2", "--latency", "0.005"],
    "diversity": ["--batch", "32", "--blocks", "1", "64", "--fetch-factors", "4", *QUICK[:4]],
    "balanced": ["--batch", "32", "--steps", "20", "--seeds", "1"],
    "tokens": [*SIZES, *QUICK[:4]],
    "gpu": ["--device", "cpu", *SIZES, *QUICK[:4], "--steps", "3"],
    "summaries": ["--rounds", "1", "--top", "50", "--batches", "1", "--groups", "3"],
    "augmentation": [*SIZES, *QUICK[:4]],
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Return the folder of the atlases, which are written once."""
    return tmp_path_factory.mktemp("benchmarks")


def figures(report: object) -> Iterator[float]:
    """Yield every number of a report."""
    if isinstance(report, dict):
        report = list(report.values())
    if isinstance(report, list):
        for one in report:
            yield from figures(one)
    elif isinstance(report, int | float) and not isinstance(report, bool):
        yield report


@pytest.mark.parametrize("program", OPTIONS)
def test_a_benchmark_prints_and_reports_finite_figures(program, work, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(program)
    report = module.main(["--work", str(work), *OPTIONS[program], "--cells", "1500", "--genes", "200"])
    found = list(figures(report))
    assert len(found) > 4
    assert np.isfinite(found).all()
    assert max(found) > 0
    assert capsys.readouterr().out

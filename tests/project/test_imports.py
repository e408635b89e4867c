"""Modules that dasksc imports in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.programs

IMPORTED = """
import sys
before = set(sys.modules)
import dasksc
imported = set(sys.modules) - before
assert "dasksc" in imported
found = imported & {"importlib.metadata", "torch", "dask", "numpy", "anndata"}
assert not found, f"import dasksc imports {found}"
assert "importlib.metadata" not in before
assert dasksc.__version__ and "importlib.metadata" in sys.modules
import importlib
importlib.import_module("dasksc._compat")
found = set(sys.modules) & {"dask", "distributed", "torch", "anndata", "zarr", "numba", "fsspec"}
assert not found, f"adapters of optional libraries import {found}"
"""

USED = """
import sys
import dasksc
from dasksc import cli
from dasksc.plan.binding import bind

def without_torch(what):
    assert "torch" not in sys.modules, f"{what} imports torch"

without_torch("import dasksc")
path = sys.argv[1]
adata = dasksc.open(path)
assert adata.obs["cell_type"].notna().all()
without_torch("open")
sampler = bind(dasksc.BlockShuffling(4), adata.obs, adata.n_obs, adata.obs.__getitem__)
plan = dasksc.EpochPlan(sampler=sampler, batch_size=8, seed=0)
assert sum(len(plan.fetch(k).rows) for k in range(plan.n_fetches)) == adata.n_obs
without_torch("a plan")
assert dasksc.describe(path, seconds=0)
without_torch("describe")
assert cli.main(["info", path, "--seconds", "0"]) == 0
without_torch("dasksc info")
import dasksc.loader
assert "torch" in sys.modules
"""

MISTAKEN = """
import contextlib
import sys
from dasksc import cli

for arguments in (["info", "no.h5ad", "--joyn", "outer"], ["convert", "no.h5ad", "b.zarr"], ["check", "--help"]):
    with contextlib.suppress(SystemExit):
        assert cli.main(arguments) == 1
found = set(sys.modules) & {"anndata", "dask", "h5py", "numba", "numpy", "pandas", "torch"}
assert not found, f"checking a command line imports {found}"
for options in ([], ["--training.max_step", "3"]):
    with contextlib.suppress(SystemExit):
        assert cli.main(["train", "--config", sys.argv[1], *options]) == 1
found = set(sys.modules) & {"anndata", "numba", "torch"}
assert not found, f"checking a training imports {found}"
"""


def run(program: str, *arguments: str) -> None:
    # Without the standard module ``site`` (option -S), no other package is imported at the start.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-S", "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_heavy_module() -> None:
    run(IMPORTED)


def test_opening_planning_and_describing_import_no_torch(tmp_path: Path) -> None:
    run(USED, str(write_store(make_adata(), tmp_path, "h5ad")))


def test_a_command_line_is_checked_before_heavy_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {path: nowhere.h5ad}\nmodel: vae\n")
    run(MISTAKEN, str(tmp_path / "c.yaml"))

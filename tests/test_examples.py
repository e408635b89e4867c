"""The examples run as they are, and learn something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from make_atlas import make_atlas

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(*command: object, timeout_s: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def atlas(tmp_path_factory) -> Path:
    return make_atlas(tmp_path_factory.mktemp("atlas") / "atlas.h5ad", 8_000)


def accuracy(printed: str, of: str) -> float:
    return float(re.search(rf"{of}\s+loss [\d.]+\s+accuracy ([\d.]+)%", printed)[1])


def test_make_atlas_writes_what_it_says(atlas):
    adata = ad.read_h5ad(atlas)
    assert adata.shape == (8_000, 20_000)
    assert sp.issparse(adata.X)
    assert adata.X.format == "csr"
    assert adata.X.dtype == np.float32
    assert adata.X.has_canonical_format
    assert (adata.X.data == np.round(adata.X.data)).all()
    assert (adata.X.data > 0).all()
    types = adata.obs["cell_type"].cat
    assert len(types.categories) == 50
    assert 1_200 < adata.X.nnz / adata.n_obs < 1_700
    assert (np.diff(types.codes) >= 0).all()  # sorted on disk
    sizes = np.sort(np.bincount(types.codes))[::-1]
    assert sizes[0] > 10 * sizes[-1]  # a few common types, many rare ones
    assert adata.obs["plate"].nunique() == 14


def test_make_atlas_is_a_program_of_any_format(tmp_path):
    run(EXAMPLES / "make_atlas.py", "--cells", 500, "--genes", 100, "--out", tmp_path / "a.zarr", "--zarr")
    run(
        EXAMPLES / "make_atlas.py",
        "--cells",
        500,
        "--genes",
        100,
        "--out",
        tmp_path / "a.h5ad",
        "--compression",
        "gzip",
    )
    stored, packed = ad.read_zarr(tmp_path / "a.zarr"), ad.read_h5ad(tmp_path / "a.h5ad")
    assert (stored.X != packed.X).nnz == 0


def test_quickstart_recognises_real_cells():
    printed = run(EXAMPLES / "quickstart.py")
    right, held_out = map(int, re.search(r"(\d+) of (\d+) held-out cells", printed).groups())
    assert right > held_out / 2


def test_train_ddp_learns_on_two_ranks(atlas):
    printed = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(EXAMPLES / "train_ddp.py", atlas, "--epochs", 2, "--batch-size", 32),
    )
    assert re.search(r"epoch 1: [\d,]+ cells/s on 2 ranks \(cpu\)", printed)
    # Of 50 types, the commonest makes up less than a quarter.
    assert accuracy(printed, "epoch 1.*\n.*\n  validation") > 40


def test_train_dp_learns(atlas):
    printed = run(EXAMPLES / "train_dp.py", atlas, "--epochs", 2, "--batch-size", 32)
    assert accuracy(printed, "epoch 1:") > 60


@pytest.mark.parametrize("options", [[], ["--cluster"]], ids=["threads", "cluster"])
def test_incremental_fit_learns_from_the_chunks_of_an_epoch(atlas, options):
    printed = run(EXAMPLES / "incremental_fit.py", atlas, *options)
    # Of 50 types, the commonest makes up less than a quarter.
    assert float(re.search(r"accuracy ([\d.]+)%", printed)[1]) > 50

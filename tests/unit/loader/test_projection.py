"""Projected memory: it bounds the measured memory from above and reflects the cost of each layout."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from tests.support.data import write_store
from tests.support.programs import ROOT, ended

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("projection")]

N_OBS, N_VARS, FETCH = 4_000, 3_000, 1_024


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projection")
    csr = sp.random(N_OBS, N_VARS, density=0.4, format="csr", dtype=np.float32, random_state=0)
    paths = {name: folder / name for name in ("plain.h5ad", "gzip.h5ad", "dense.h5ad", "scaled.h5ad")}
    obs = pd.DataFrame({"cell_type": np.resize(list("abc"), N_OBS)}, index=np.arange(N_OBS).astype(str))
    sparse, dense = anndata.AnnData(X=csr, obs=obs), anndata.AnnData(X=csr.toarray(), obs=obs)
    sparse.write_h5ad(paths["plain.h5ad"])
    sparse.write_h5ad(paths["gzip.h5ad"], compression="gzip", compression_opts=1)
    dense.write_h5ad(paths["dense.h5ad"], compression="gzip", compression_opts=1)
    shutil.copyfile(paths["plain.h5ad"], paths["scaled.h5ad"])
    with h5py.File(paths["scaled.h5ad"], "r+") as file:
        # The scale-offset filter can be read only through h5py.
        del file["X/indices"]
        file["X"].create_dataset("indices", data=csr.indices, chunks=(50_000,), scaleoffset=0)
    return paths | {"csr.zarr": write_store(sparse, folder, "zarr3", "csr")}


SETS = ["--control", "a", "--fetch", str(FETCH // 2)]
# All ways of storing rows, all ways of reading them (mapped, read or decoded), and both layouts of batches.
CASES = [
    # Mapped pages do not count as anonymous memory; only batches are held.
    ("plain.h5ad", [], 0),
    ("plain.h5ad", ["--no-mmap", "--layout", "csr"], FETCH * N_VARS * 0.4 * 8),
    ("gzip.h5ad", [], FETCH * N_VARS * 0.4 * 8),
    ("dense.h5ad", [], FETCH * N_VARS * 4),
    ("csr.zarr", ["--layout", "csr"], FETCH * N_VARS * 0.4 * 8),
    ("scaled.h5ad", [], FETCH * N_VARS * 0.4 * 4),
    # A fetch holds as many control cells as targets.
    ("plain.h5ad", [*SETS, "--no-mmap", "--layout", "csr"], FETCH * N_VARS * 0.4 * 8),
    ("gzip.h5ad", SETS, FETCH * N_VARS * 0.4 * 8),
]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells anonymous memory from mapped pages")
@pytest.mark.parametrize(("name", "more", "least"), CASES, ids=str)
def test_the_peak_of_anonymous_memory_is_below_the_projection(
    files: dict[str, Path], name: str, more: list[str], least: float
) -> None:
    program = [sys.executable, ROOT / "benchmarks" / "memory.py", "--atlas", files[name], "--fetch", FETCH]
    done = ended([*program, "--epochs", 2, *more], is_preloaded=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert least <= max(report["peaks"]) <= report["projected"], report

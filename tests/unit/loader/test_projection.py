"""Memory of epochs in separate processes: below the projection, and in control groups smaller than the atlas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from tests.support.cgroups import Cgroup, NoCgroupError, memory_cgroup
from tests.support.data import write_store
from tests.support.programs import PROGRAMS, ROOT, ended

pytestmark = pytest.mark.faults

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


@pytest.mark.xdist_group("projection")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells anonymous memory from mapped pages")
@pytest.mark.parametrize(("name", "more", "least"), CASES, ids=str)
def test_the_peak_of_anonymous_memory_is_below_the_projection(
    files: dict[str, Path], name: str, more: list[str], least: float
) -> None:
    program = [sys.executable, ROOT / "benchmarks" / "memory.py", "--atlas", files[name], "--fetch", FETCH]
    done = ended([*program, "--epochs", 2, *more], is_preloaded=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert least <= max(report["peaks"]) <= report["projected"], report


MIB = 2**20
N_ATLAS = 30_000  # 350 MB


def epoch(path: Path, group: Cgroup | None = None) -> dict[str, Any]:
    """Read an epoch in a separate process."""
    os.sync()
    with path.open("rb") as file:  # pages read by other processes are not charged to a control group
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run(
        [sys.executable, PROGRAMS / "limited_epoch.py", path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=None if group is None else group.enter,
        timeout=600,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.xdist_group("out of core")
def test_an_epoch_in_a_small_group_reads_what_it_needs_and_yields_the_same(atlas_of: Callable[..., Path]) -> None:
    atlas = atlas_of(N_ATLAS, 20_000)
    expected = epoch(atlas)
    assert expected["is_mapped"]
    assert expected["n_rows"] == N_ATLAS
    try:
        # This suffices for the process and its fetches, but not for the mapped file as well.
        with memory_cgroup(int(expected["anon"]) + 350 * MIB) as group:
            limited = epoch(atlas, group)
            assert group.n_killed() == 0
    except NoCgroupError as error:
        pytest.skip(str(error))
    assert not limited["is_mapped"]
    assert limited["digest"] == expected["digest"]
    # A page on the boundary of two blocks is read twice.
    assert limited["read"] <= 1.2 * atlas.stat().st_size

"""Conversions that are killed at many moments, meet a full disk, or have little memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import dasksc
from tests.support.conversions import contents, read, same, write_gzipped
from tests.support.programs import PROGRAMS, ROOT, ended

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def gzipped(tmp_path_factory):
    return write_gzipped(tmp_path_factory.mktemp("input"))


@pytest.mark.parametrize("how", ["steps", "moments"])
def test_a_killed_conversion_goes_on_to_the_same_store(tmp_path, gzipped, how):
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "convert_kills.py"), str(gzipped), str(tmp_path), how, "12"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["n_kills"] >= 12
    stores = sorted(tmp_path.glob("*.zarr"))
    whole = contents(stores[0])
    differing = {store.name: sorted(dict(contents(store).items() ^ whole.items())) for store in stores}
    assert {name: files for name, files in differing.items() if files} == {}
    # A kill after the last step may leave the lock file of a completed conversion.
    assert [file for folder in tmp_path.glob("*.partial") for file in os.listdir(folder) if file != "lock"] == []
    same(read(stores[-1]), ad.read_h5ad(gzipped))


SMALL_DISK_PROGRAM = """
import sys, dasksc
try:
    dasksc.convert(sys.argv[1], sys.argv[2], overwrite=True)
except dasksc.StorageError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_disk_of_any_size_that_fills_up_ends_no_conversion_by_a_signal(small_disk, tmp_path, compression):
    disk, resize = small_disk
    rng, out = np.random.default_rng(0), disk / "out.zarr"
    # The rows are so short that their descriptions (see `dasksc.conversion.scanning`) take most of the disk space.
    X = sp.random(20_000, 50, density=0.05, format="csr", rng=rng, dtype=np.float32)
    source = ad.AnnData(X=X, obs=pd.DataFrame(index=[f"c{i}" for i in range(20_000)]))
    source.write_h5ad(tmp_path / "atlas.h5ad", compression=compression)
    dasksc.convert(tmp_path / "atlas.h5ad", tmp_path / "whole.zarr")
    dasksc.convert(source[:500].copy(), tmp_path / "old.zarr")
    old, whole = contents(tmp_path / "old.zarr"), contents(tmp_path / "whole.zarr")

    codes = set()
    for kilobytes in (150, 600, 1200, 1500, 1800, 3500):
        assert resize("64m").returncode == 0
        for path in disk.iterdir():
            shutil.rmtree(path)
        shutil.copytree(tmp_path / "old.zarr", out)
        assert resize(f"{kilobytes}k").returncode == 0
        first = ended([sys.executable, "-c", SMALL_DISK_PROGRAM, tmp_path / "atlas.h5ad", out], is_preloaded=True)
        codes.add(first.returncode)
        if first.returncode:
            assert first.returncode == 3, (kilobytes, first.returncode, first.stderr)
            assert f"no space is left for {out}: " in first.stdout
            assert contents(out) == old
            assert resize("64m").returncode == 0
            dasksc.convert(tmp_path / "atlas.h5ad", out, overwrite=True)
            assert os.listdir(disk) == ["out.zarr"]
        assert contents(out) == whole
    assert codes == {0, 3}


MEMORY_PROGRAM = """
import sys, threading
from pathlib import Path
import numpy as np
import dasksc
from _machine import rss_anon_bytes

tiny, source, folder, limit = *map(Path, sys.argv[1:4]), int(sys.argv[4])
dasksc.convert(tiny, folder / "tiny.zarr", verify=True)
before = rss_anon_bytes()
peak, stop = before, threading.Event()

def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, rss_anon_bytes())

thread = threading.Thread(target=watch)
thread.start()
dasksc.convert(source, folder / "out.zarr", verify=True, memory_limit=limit)
stop.set()
thread.join()
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells anonymous memory from mapped pages")
def test_memory_stays_within_the_limit_whatever_the_size_of_the_input(tmp_path):
    limit = 40_000_000
    X = sp.random(6_000, 3_000, density=0.4, format="csr", dtype=np.float32, random_state=0)
    names = np.arange(6_000).astype(str)
    source = ad.AnnData(X=X, obs=pd.DataFrame(index=names), var=pd.DataFrame(index=names[:3_000]))
    source.write_h5ad(tmp_path / "atlas.h5ad", compression="gzip", compression_opts=1)
    source[:100].write_h5ad(tmp_path / "tiny.h5ad", compression="gzip")
    paths = [tmp_path / "tiny.h5ad", tmp_path / "atlas.h5ad", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, *map(str, paths), str(limit)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])},
    )
    assert done.returncode == 0, done.stderr
    n_bytes = X.nnz * 8
    # The interpreter and the tables need some memory, too; an unbounded conversion would hold the whole matrix.
    assert int(done.stdout.splitlines()[-1]) < limit * 1.25 < n_bytes

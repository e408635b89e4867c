"""Ranks that `jax.distributed` starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, ROOT

pytestmark = pytest.mark.programs

PROGRAM = PROGRAMS / "jax_ranks.py"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_two_processes_of_jax_share_every_epoch(tmp_path):
    pytest.importorskip("jax", reason="jax is not installed")
    n_obs = 203
    adata = make_adata(n_obs)
    path = write_store(adata, tmp_path, "h5ad")
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, address, "2", str(process), path, tmp_path / "found"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for process in processes:
        _, complaints = process.communicate(timeout=600)
        assert process.returncode == 0, complaints
    found = [json.loads((tmp_path / f"found.{process}").read_text()) for process in range(2)]
    assert [(one["source"], one["rank"], one["size"]) for one in found] == [
        ("jax.distributed", 0, 2),
        ("jax.distributed", 1, 2),
    ]
    for epoch in range(2):
        seen = Counter(row for one in found for row in one["epochs"][epoch])
        assert set(seen) == set(range(n_obs))
        assert sum(seen.values()) == n_obs + 1
    assert found[0]["epochs"][0] != found[0]["epochs"][1]
    rows = np.concatenate([row for one in found for row in one["epochs"]]).astype(int)
    assert sum(one["sum"] for one in found) == pytest.approx(adata.X[rows].sum(dtype=np.float64), rel=1e-5)

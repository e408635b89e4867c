"""Tests of ranks that share a Dask cluster, under torchrun and on several machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.dask_processes import NOT_LOOPBACK, secret_file
from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, ROOT, torchrun

pytestmark = pytest.mark.programs


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    return write_store(make_adata(n_obs=101), tmp_path, "h5ad")


def test_ranks_of_torchrun_share_the_cluster_of_rank_0_or_receive_its_error(atlas: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    secret = secret_file(tmp_path)
    whats = ("port", "dashboard", "127.0.0.1", NOT_LOOPBACK)
    torchrun(2, "shared_cluster.py", atlas, tmp_path / "seen.json", secret, *whats)
    *wrong, plain, encrypted = zip(*json.loads((tmp_path / "seen.json").read_text()), strict=True)
    for (mine, received), expected in zip(wrong, ["InputError: port=-5", "RuntimeError: Cluster failed"], strict=True):
        assert mine.startswith(expected)
        assert received.startswith("StartError: rank 0 could not start the Dask cluster")
    for ranks, kind in ((plain, "tcp://127.0.0.1:"), (encrypted, f"tls://{NOT_LOOPBACK}:")):
        assert [rank["starts"] for rank in ranks] == [True, False]
        assert len({rank["address"] for rank in ranks}) == 1
        assert ranks[0]["address"].startswith(kind)
        assert {row for rank in ranks for row in rank["rows"]} == set(range(101))
        assert len({len(rank["rows"]) for rank in ranks}) == 1


@pytest.fixture
def two_machines() -> Iterator[list[tuple[list[str], str]]]:
    """Connect two network namespaces; yield the command prefix and the address of each."""
    names = [f"dasksc-{os.getpid()}-{i}" for i in range(2)]
    wires = [f"w{os.getpid()}-{i}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    if shutil.which("ip") is None:
        pytest.skip("there is no program ip to make network namespaces with")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
        for i, (name, wire) in enumerate(zip(names, wires, strict=True)):
            ip("link", "set", wire, "netns", name)
            for words in (["addr", "add", f"10.77.0.{i + 1}/24", "dev", wire], ["link", "set", wire, "up"]):
                ip("-n", name, *words)
            ip("-n", name, "link", "set", "lo", "up")
        yield [
            (["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={wire}"], f"10.77.0.{i + 1}")
            for i, (name, wire) in enumerate(zip(names, wires, strict=True))
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_ranks_on_two_machines_share_an_encrypted_cluster(
    two_machines: list[tuple[list[str], str]], atlas: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    secret = secret_file(tmp_path)
    host = two_machines[0][1]
    settled = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    settled |= {"MASTER_ADDR": host, "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            [*enter, sys.executable, PROGRAMS / "shared_cluster.py", atlas, tmp_path / "seen.json", secret, host],
            env={**os.environ, **settled, "RANK": str(i), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, (enter, _) in enumerate(two_machines)
    ]
    try:
        printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)[-4000:]
    seen = [rank for (rank,) in json.loads((tmp_path / "seen.json").read_text())]
    assert [rank["starts"] for rank in seen] == [True, False]
    assert {rank["address"].rpartition(":")[0] for rank in seen} == {f"tls://{host}"}
    assert {row for rank in seen for row in rank["rows"]} == set(range(101))

"""Certificates of a Dask cluster that listens beyond loopback: distribution, and rejection of peers without one."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest
import torch.distributed
import torch.utils.data
from distributed.security import Security

import dasksc
from dasksc.executor.cluster import rendezvous
from dasksc.executor.cluster import starting as start
from dasksc.executor.cluster.security import SECRET_FILE, secured
from tests.support.dask_processes import NOT_LOOPBACK, listening, rows_of_epoch, secret_file
from tests.support.data import make_adata, write_store

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("encrypted cluster")]


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(make_adata(n_obs=101), tmp_path_factory.mktemp("atlas"), "h5ad")


@pytest.fixture(scope="module")
def encrypted() -> Iterator[dasksc.StartedCluster]:
    pytest.importorskip("cryptography")
    with dasksc.start_cluster(1, threads_per_worker=1, processes=True, host=NOT_LOOPBACK) as cluster:
        yield cluster


def test_off_loopback_connections_are_encrypted_and_the_epoch_is_the_same(
    encrypted: dasksc.StartedCluster, atlas: Path
) -> None:
    assert encrypted.address.startswith(f"tls://{NOT_LOOPBACK}:")
    assert all(address.startswith("tls://") for address in encrypted.client.nthreads())
    assert listening() <= {NOT_LOOPBACK, "127.0.0.1"}
    assert rows_of_epoch(atlas) == rows_of_epoch(atlas, scheduler="threads")


@pytest.mark.parametrize("has", ["no certificate", "another certificate", "no encryption"])
def test_a_client_without_the_certificates_is_refused(encrypted: dasksc.StartedCluster, has: str) -> None:
    address = encrypted.address
    options: dict[str, Any] = {"timeout": 2, "set_as_default": False}
    if has == "another certificate":
        options["security"] = Security.temporary()
    elif has == "no encryption":
        address = address.replace("tls://", "tcp://")
    with pytest.raises((OSError, TypeError, ValueError)), distributed.Client(address, **options) as client:
        client.submit(os.getpid).result()
    # Garbage-collect the refused Client now. Otherwise, the thread of the next Client might close it while starting.
    gc.collect()


def test_keys_are_in_no_command_line_and_no_environment(encrypted: dasksc.StartedCluster) -> None:
    for process in psutil.Process().children(recursive=True):
        assert "PRIVATE KEY" not in " ".join(process.cmdline())
        assert not any("PRIVATE KEY" in value for value in process.environ().values())


def test_a_child_has_the_certificates(encrypted: dasksc.StartedCluster, atlas: Path) -> None:
    dataset = dasksc.scDataset(atlas, dasksc.Streaming(), batch_size=8, scheduler=encrypted.client, seed=0)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn", timeout=300
    )
    assert sum(len(batch) for batch in loader) == 101
    assert b"PRIVATE KEY" not in pickle.dumps(dataset)


def test_ranks_share_a_secret_that_never_goes_through_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.HashStore()
    monkeypatch.setattr(start, "shared_store", lambda prefix: store)
    secret = secret_file(tmp_path)
    cluster = dasksc.start_cluster(1, processes=False, host=NOT_LOOPBACK, security=secret)
    try:
        stored = store.get("address").decode()
        assert "PRIVATE KEY" not in stored
        assert "CERTIFICATE" not in stored
        with rendezvous.join_cluster(store, security=secured(secret), timeout_s=60) as joined:
            assert joined.client.submit(os.getpid).result() == os.getpid()
        with pytest.raises(dasksc.StartError, match="security="):
            rendezvous.join_cluster(store, security=Security.temporary(), timeout_s=1)
        gc.collect()
    finally:
        cluster.close(wait_s=0)


def test_the_command_that_errors_advise_makes_a_secret(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no program openssl")
    command = SECRET_FILE.partition("made by ")[2].split()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert secured(tmp_path / "ranks.pem").require_encryption

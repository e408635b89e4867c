"""Certificates of a Dask cluster that listens beyond loopback: distribution, and rejection of peers without one."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest
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
    security = encrypted.client.security
    with distributed.Client(encrypted.address, security=security, set_as_default=False) as client:
        assert client.submit(os.getpid).result() > 0


def test_certificates_never_lie_where_others_can_read_them(encrypted: dasksc.StartedCluster) -> None:
    security = encrypted.client.security
    for name in ("tls_client_key", "tls_scheduler_key", "tls_worker_key"):
        assert getattr(security, name).startswith("-----BEGIN")  # held in memory, not a path
    # No command line or environment, which other users may see, contains the keys.
    for process in psutil.Process().children(recursive=True):
        assert "PRIVATE KEY" not in " ".join(process.cmdline())
        assert not any("PRIVATE KEY" in value for value in process.environ().values())


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_child_has_the_certificates(encrypted: dasksc.StartedCluster, atlas: Path, start: str) -> None:
    import torch.utils.data

    dataset = dasksc.scDataset(atlas, dasksc.Streaming(), batch_size=8, scheduler=encrypted.client, seed=0)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context=start, timeout=60
    )
    assert sum(len(batch) for batch in loader) == 101
    assert b"PRIVATE KEY" not in pickle.dumps(dataset)


def test_the_error_without_cryptography_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def temporary() -> Security:
        raise ImportError("no cryptography")

    monkeypatch.setattr(Security, "temporary", temporary)
    with pytest.raises(dasksc.InputError, match=re.escape("pip install 'dasksc[cluster]'")):
        dasksc.start_cluster(host=NOT_LOOPBACK)


# Several ranks, and the store of their addresses


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the store of a run of two ranks on this machine, with this process as rank 0."""
    import torch.distributed

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(start, "shared_store", lambda prefix: store)
    return store


def secret_of(kind: str, folder: Path) -> Any:
    pytest.importorskip("cryptography")
    return secret_file(folder) if kind == "a file" else Security.temporary()


@pytest.mark.parametrize("host", [NOT_LOOPBACK, "127.0.0.1"])
@pytest.mark.parametrize("kind", ["a file", "in memory"])
def test_ranks_share_a_secret_that_never_goes_through_the_store(
    store: Any, tmp_path: Path, kind: str, host: str
) -> None:
    secret = secret_of(kind, tmp_path)
    cluster = dasksc.start_cluster(1, processes=False, host=host, security=secret)
    try:
        stored = store.get("address").decode()
        assert "PRIVATE KEY" not in stored
        assert "CERTIFICATE" not in stored
        assert cluster.address.startswith(f"tls://{host}:")
        with rendezvous.join_cluster(store, security=secured(secret), timeout_s=60) as joined:
            assert joined.address == cluster.address
            assert joined.client.submit(os.getpid).result() == os.getpid()
        with pytest.raises(dasksc.StartError, match="every rank the same security="):
            rendezvous.join_cluster(store, security=Security.temporary(), timeout_s=1)
        gc.collect()
    finally:
        cluster.close(wait_s=0)


def test_several_ranks_off_loopback_need_a_secret(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "LocalCluster", lambda **_: pytest.fail("a cluster was started"))
    with pytest.raises(dasksc.InputError, match=r"needs security=.*openssl req.*omit host="):
        dasksc.start_cluster(host=NOT_LOOPBACK)
    assert "needs security=" in store.get("address").decode()


@pytest.mark.parametrize(
    ("address", "has_secret", "complaint"),
    [
        ("tcp://10.77.0.1:8786", False, "not on loopback"),
        ("tls://10.77.0.1:8786", False, "not on loopback"),
        ("tcp://[2001:db8::1]:8786", False, "not on loopback"),
        ("tcp://example.org:8786", False, "not on loopback"),
        ("tcp://10.77.0.1:8786", True, "requires encryption"),
        ("tcp://127.0.0.1:8786", True, "requires encryption"),
    ],
)
def test_a_rank_does_not_go_where_a_forged_address_leads(
    store: Any, monkeypatch: pytest.MonkeyPatch, address: str, has_secret: bool, complaint: str
) -> None:
    security = secret_of("in memory", Path()) if has_secret else None
    monkeypatch.setattr(rendezvous, "connected", lambda *_, **__: pytest.fail("it has connected"))
    store.set("address", json.dumps({"address": address, "dashboard": None, "token": "forged"}))
    with pytest.raises(dasksc.StartError, match=complaint):
        rendezvous.join_cluster(store, security=security, timeout_s=5)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_have_access_to_is_no_secret(tmp_path: Path, mode: int) -> None:
    path = secret_of("a file", tmp_path)
    path.chmod(mode)
    with pytest.raises(dasksc.InputError, match=rf"is not secret: other users have access to it \(mode {mode:03o}\)"):
        dasksc.start_cluster(security=path)


@pytest.mark.parametrize("content", ["", "not a key", "-----BEGIN CERTIFICATE-----\n", "certificate alone", None])
def test_a_file_without_key_and_certificate_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ranks.pem"
    if content is not None:
        path.touch(mode=0o600)
        alone = content == "certificate alone"
        path.write_text(secret_of("in memory", tmp_path).tls_client_cert if alone else content)
    with pytest.raises(dasksc.InputError, match=r"ranks\.pem.*openssl req"):
        dasksc.start_cluster(security=str(path))


@pytest.mark.parametrize("given", [Security(), True, 3])
def test_security_without_certificates_is_refused(given: Any) -> None:
    with pytest.raises(dasksc.InputError, match=r"security.*openssl req"):
        dasksc.start_cluster(security=given)


def test_the_command_that_errors_advise_makes_a_secret(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no program openssl")
    command = SECRET_FILE.partition("made by ")[2].split()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    security = secured(tmp_path / "ranks.pem")
    assert security is not None
    assert security.require_encryption

"""Certificates of a Dask cluster that listens off loopback: who gets them, and who is refused without."""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed
import psutil
import pytest
from distributed.security import Security

import dasksc
from tests.support.dask_processes import NOT_LOOPBACK, listening, rows_of_epoch
from tests.support.data import make_adata, write_store

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("encrypted cluster")]


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
    # It must not be collected, and close itself, in the thread of the next one while that is starting.
    gc.collect()
    security = encrypted.client.security
    with distributed.Client(encrypted.address, security=security, set_as_default=False) as client:
        assert client.submit(os.getpid).result() > 0


def test_certificates_never_lie_where_others_can_read_them(encrypted: dasksc.StartedCluster) -> None:
    security = encrypted.client.security
    for name in ("tls_client_key", "tls_scheduler_key", "tls_worker_key"):
        assert getattr(security, name).startswith("-----BEGIN")  # held in memory, not a path
    # Neither a command line nor an environment, which other users may see, has them.
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


def test_without_cryptography_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def temporary() -> Security:
        raise ImportError("no cryptography")

    monkeypatch.setattr(Security, "temporary", temporary)
    with pytest.raises(dasksc.InputError, match=re.escape("pip install dasksc[cluster]")):
        dasksc.start_cluster(host=NOT_LOOPBACK)

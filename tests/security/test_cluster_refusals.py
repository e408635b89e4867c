"""What `start_cluster` refuses before anything listens, and addresses to which a rank does not connect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch.distributed
from distributed.security import Security

import dasksc
from dasksc.executor.cluster import rendezvous
from dasksc.executor.cluster import starting as start
from dasksc.executor.schedulers import resolve_scheduler

pytestmark = pytest.mark.core

HERE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ELSEWHERE = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


# Environment of rank 0, arguments, and a fact of the error.
@pytest.mark.parametrize(
    ("ranks", "options", "fact"),
    [
        ({}, {"dashboard_address": 8787}, "dashboard_address=8787"),
        ({}, {"n_workers": -1}, "n_workers=-1"),
        ({}, {"n_workers": 1.5}, "n_workers=1.5"),
        ({}, {"threads_per_worker": 0}, "threads_per_worker=0"),
        ({}, {"port": -5}, "port=-5"),
        ({}, {"port": "8786"}, "port='8786'"),
        ({}, {"timeout_s": 0}, "timeout_s=0"),
        ({}, {"host": None}, "host=None"),
        ({}, {"host": "no such host"}, "host='no such host'"),
        ({}, {"security": 3}, "security=3"),
        ({}, {"security": True}, "security=True"),
        ({}, {"security": Security()}, "certificates"),
        ({}, {"security": "missing.pem"}, "missing.pem"),
        ({}, {"security": "empty.pem"}, "empty.pem"),
        ({}, {"security": "no key.pem"}, "no key.pem"),
        ({}, {"security": "readable.pem"}, "644"),
        (HERE, {"host": "127.0.0.2"}, "security="),
        (ELSEWHERE, {}, "127.0.0.1"),
        (ELSEWHERE, {"host": "localhost"}, "localhost"),
        (ELSEWHERE, {"host": "127.0.0.5"}, "127.0.0.5"),
        (ELSEWHERE, {"host": "::1"}, "::1"),
    ],
    ids=str,
)
def test_a_cluster_that_cannot_be_used_or_trusted_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: dict[str, str], options: dict[str, Any], fact: str
) -> None:
    monkeypatch.setattr(distributed, "LocalCluster", lambda **_: pytest.fail("a cluster was started"))
    store = torch.distributed.HashStore()
    monkeypatch.setattr(start, "shared_store", lambda prefix: store)
    monkeypatch.chdir(tmp_path)
    for name, text, mode in (("empty", "", 0o600), ("no key", "not a key", 0o600), ("readable", "", 0o644)):
        (tmp_path / f"{name}.pem").write_text(text)
        (tmp_path / f"{name}.pem").chmod(mode)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dasksc.InputError) as caught:
        dasksc.start_cluster(**options)
    assert fact in str(caught.value)
    # The other ranks receive the error.
    assert not ranks or fact in json.loads(store.get("address"))["error"]


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(dasksc.InputError, match="process group"):
        dasksc.start_cluster()


@pytest.mark.parametrize(
    ("address", "security"),
    [
        ("tcp://10.77.0.1:8786", None),
        ("tls://10.77.0.1:8786", None),
        ("tcp://[2001:db8::1]:8786", None),
        ("tcp://example.org:8786", None),
        ("tcp://10.77.0.1:8786", Security()),
        ("tcp://127.0.0.1:8786", Security()),
    ],
)
def test_a_rank_does_not_go_where_a_forged_address_leads(
    monkeypatch: pytest.MonkeyPatch, address: str, security: Security | None
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(rendezvous, "connected", lambda *_, **__: pytest.fail("it has connected"))
    store.set("address", json.dumps({"address": address, "dashboard": None, "token": "forged"}))
    with pytest.raises(dasksc.StartError):
        rendezvous.join_cluster(store, security=security, timeout_s=5)


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", None])
def test_a_scheduler_file_without_an_address_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "scheduler.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(dasksc.InputError, match="scheduler"):
        resolve_scheduler(str(path))

"""Limits on memory, divided among the ranks of a node and their DataLoader workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dasksc
from dasksc.loader import projection
from dasksc.loader.rank_session import RankSession
from dasksc.memory.limits import Limit
from dasksc.memory.model import MemoryModel
from dasksc.plan.ranks import World

pytestmark = pytest.mark.core

MIB = 2**20
LIMIT = Limit(n_bytes=2**35, held=0, source="a test")


@pytest.fixture
def dataset(tmp_path: Path) -> dasksc.scDataset:
    path = dasksc.datasets.synthetic(tmp_path / "atlas.h5ad", n_obs=500, n_vars=200)
    return dasksc.scDataset(path, batch_size=50, seed=0, memory_limit=900 * MIB)


def limit_memory(monkeypatch: pytest.MonkeyPatch, limit: Limit) -> None:
    monkeypatch.setattr(projection.process_memory, "memory_limit", lambda: limit)


@pytest.mark.parametrize(("n_ranks", "n_workers"), [(1, None), (2, None), (1, 3), (2, 3)])
def test_ranks_and_workers_divide_the_memory_and_the_page_cache(
    dataset: dasksc.scDataset, monkeypatch: pytest.MonkeyPatch, n_ranks: int, n_workers: int | None
) -> None:
    world = World(rank=0, world_size=n_ranks, local_world_size=n_ranks)
    worker = None if n_workers is None else SimpleNamespace(num_workers=n_workers, id=0)
    shares: list[dict[str, Any]] = []
    given: list[dict[str, Any]] = []
    original = MemoryModel.reading_mode

    def share_of(limit: Limit, **options: Any) -> int:
        shares.append(options)
        return 7_000 * MIB

    def reading_mode(self: MemoryModel, **options: Any) -> Any:
        given.append(options)
        return original(self, **options)

    limit_memory(monkeypatch, LIMIT)
    monkeypatch.setattr(RankSession, "detect", lambda self: world)
    monkeypatch.setattr(projection, "get_worker_info", lambda: worker)
    monkeypatch.setattr(projection.process_memory, "share_of", share_of)
    monkeypatch.setattr(MemoryModel, "reading_mode", reading_mode)
    assert dataset.memory.reading_mode().fits
    n_processes = n_ranks * (n_workers or 1)
    assert [one["n_processes"] for one in shares] == [n_processes] * len(shares)
    assert given
    for one in given:
        assert one["n_sharing"] == n_processes
        assert one["available"] == 7_000 * MIB
        assert one["limit"] == 900 * MIB // (n_workers or 1)

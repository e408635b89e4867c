"""Sets from any source, in any process and from any step; and functions applied to their batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest

import dasksc
from dasksc.executor.tasks import part_of
from dasksc.memory import model as memory_model
from dasksc.storage.matrices import CSRMatrix
from tests.support.screens import dataset, screen, sets

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "screen.h5ad"
    screen().write_h5ad(path)
    return path


@pytest.mark.parametrize("layout", ["csr", "dense"])
@pytest.mark.parametrize("part_bytes", [2**25, 5_000])
def test_targets_and_controls_are_read_together_in_ascending_order(
    path: Path, part_bytes: int, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []
    fetch = CSRMatrix.fetch

    def recorded(self: CSRMatrix, rows: Any) -> Any:
        read.append(rows.tolist())
        return fetch(self, rows)

    monkeypatch.setattr(CSRMatrix, "fetch", recorded)
    monkeypatch.setattr(memory_model, "_PART_BYTES", part_bytes)
    data = dataset(path, sets(n_controls=2), scheduler="synchronous", layout=layout)
    yielded = [row for batch in data for part in (batch, batch.control) for row in part.index.tolist()]
    plan, n_parts = data.plan(0), data.memory.reading_mode().n_parts
    assert (n_parts > 1) == (part_bytes < 2**25)
    fetches = [plan.fetch(k).rows for k in range(plan.n_fetches)]
    assert len(fetches) > 2
    assert read == [part_of(rows, part, n_parts).tolist() for rows in fetches for part in range(n_parts)]
    assert all(rows == sorted(rows) for rows in read)
    assert sorted(row for rows in read for row in rows) == sorted(yielded)


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "Downsample": lambda: dasksc.transforms.Downsample(0.5),
    "MaskGenes": lambda: dasksc.transforms.MaskGenes(0.5),
    "tokens": lambda: dasksc.tokens.RankTokens(map(str, range(30))),
    "bins": lambda: dasksc.tokens.ValueBins(map(str, range(30))),
    "list": lambda: [dasksc.transforms.Downsample(0.5), dasksc.tokens.RankTokens(map(str, range(30)))],
}


def counted() -> anndata.AnnData:
    adata = screen()
    adata.X.data = np.ceil(adata.X.data * 5)
    return adata


@pytest.mark.parametrize(("name", "layout"), [*zip(TRANSFORMS, ["csr", "dense", "csr", "dense", "csr"], strict=True)])
def test_groups_and_controls_survive_every_transform(name: str, layout: Any) -> None:
    plain = dataset(counted(), layout=layout)
    changed = dataset(counted(), layout=layout, transform=TRANSFORMS[name]())
    for before, after in zip(plain, changed, strict=True):
        assert after.sets.tolist() == before.sets.tolist()
        assert after.index.tolist() == before.index.tolist()
        assert after.control.index.tolist() == before.control.index.tolist()
        assert len(after.control.X) == len(before.control.X)
        if name != "tokens" and name != "bins":
            assert after.control.X.sum() < before.control.X.sum()

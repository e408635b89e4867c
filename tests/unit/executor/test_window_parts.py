"""Large fetches read in parts and assembled in order."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np
import pytest

import dasksc
from dasksc.executor.tasks import AssembledFetches, FetchedMatrices, part_of
from dasksc.memory import model as memory_model
from dasksc.storage import as_matrix, join
from tests.support.data import make_values

pytestmark = pytest.mark.core

N_OBS, N_VARS = 90, 11


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_joined_fetches_gather_as_one(layout: str) -> None:
    matrix = as_matrix(make_values(N_OBS, N_VARS, layout=layout, dtype=np.float32), "m")
    rows = np.sort(np.random.default_rng(0).integers(0, N_OBS, 40))
    whole = matrix.fetch(rows)
    joined = join([matrix.fetch(part_of(rows, part, 4)) for part in range(4)])
    assert (joined.shape, joined.dtype, joined.nbytes) == (whole.shape, whole.dtype, whole.nbytes)
    order = np.random.default_rng(1).permutation(40)
    for fetched in (joined, joined.compact()):
        out, expected = np.empty((2, 40, N_VARS), dtype=np.float32)
        fetched.gather(order, out=out)
        whole.gather(order, out=expected)
        np.testing.assert_array_equal(out, expected)
        for one, other in zip(fetched.gather_csr(order), whole.gather_csr(order), strict=True):
            np.testing.assert_array_equal(one, other)


class FakeWindow:
    """Window whose results arrive when a test increases ``n_arrived``."""

    def __init__(self, results: list[Any]) -> None:
        self.results = deque(results)
        self.n_arrived = 0

    def next_is_done(self) -> bool:
        return self.n_arrived > 0 or not self.results

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if not self.results:
            raise StopIteration
        self.n_arrived -= 1
        i, result = self.results.popleft()
        if isinstance(result, Exception):
            raise result
        return i, result


def part(i: int) -> FetchedMatrices:
    return FetchedMatrices({"X": as_matrix(np.full((2, 3), i), "m").fetch(np.arange(2))})


def test_a_fetch_is_ready_when_its_last_part_has_arrived() -> None:
    window = FakeWindow([(i, part(i)) for i in range(6, 12)])
    fetches = AssembledFetches(window, 3)
    assert not fetches.is_ready()
    window.n_arrived = 2
    assert not fetches.is_ready()
    assert len(window.results) == 4, "what is there is taken, so that the window goes on"
    window.n_arrived = 2
    assert fetches.is_ready()
    k, fetched = next(iter(fetches))
    assert k == 2
    out = np.empty((6, 3))
    fetched.parts["X"].gather(np.arange(6), out=out)
    assert out[:, 0].tolist() == [6, 6, 7, 7, 8, 8]


def test_the_error_of_a_part_comes_when_its_fetch_is_asked_for() -> None:
    window = FakeWindow([(0, part(0)), (1, part(1)), (2, OSError("part 2")), (3, part(3))])
    window.n_arrived = 4
    fetches = AssembledFetches(window, 2)
    results = iter(fetches)
    assert next(results)[0] == 0
    assert fetches.is_ready()
    with pytest.raises(OSError, match="part 2"):
        next(results)


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_batches_do_not_depend_on_the_parts(tmp_path: Any, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import anndata

    values = make_values(N_OBS, N_VARS, layout="csr", dtype=np.float32)
    path = tmp_path / "x.h5ad"
    anndata.AnnData(X=values).write_h5ad(path, compression="gzip")

    def epoch(part_bytes: int) -> tuple[int, list[Any]]:
        monkeypatch.setattr(memory_model, "_PART_BYTES", part_bytes)
        dataset = dasksc.scDataset(
            path, dasksc.BlockShuffling(4), 8, 3, scheduler=scheduler, rank=0, world_size=1, seed=0
        )
        first = [batch.clone() for batch in islice(dataset, 4)]
        state = dataset.state_dict()
        dataset.load_state_dict({**state, "epoch": 0})
        return dataset.memory.reading_mode().n_parts, first + [batch.clone() for batch in dataset]

    (one, expected), (several, batches) = epoch(2**25), epoch(500)
    assert one == 1
    assert several == 3
    assert len(batches) == len(expected) > 10
    assert all(batch.equal(other) for batch, other in zip(batches, expected, strict=True))

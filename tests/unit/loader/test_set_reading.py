"""Sets from any source, in any process and from any step; and functions applied to their batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest

import dasksc
from dasksc.executor.tasks import part_of
from dasksc.memory import model as memory_model
from dasksc.storage.matrices import CSRMatrix
from tests.support.data import write_store, zip_of
from tests.support.screens import dataset, numbers, screen, sets

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "screen.h5ad"
    screen().write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    return [numbers(batch) for batch in dataset(path)]


# --- Sources ----------------------------------------------------------------------------------------


def as_strings() -> anndata.AnnData:
    adata = screen()
    adata.obs = adata.obs.astype({"gene": object, "line": object})
    return adata


def dense(adata: anndata.AnnData) -> anndata.AnnData:
    adata.X = adata.X.toarray()
    return adata


WAYS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "strings in memory": lambda path, folder: {"data": as_strings()},
    "strings in h5ad": lambda path, folder: {"data": write_store(as_strings(), folder, "h5ad")},
    "strings in Zarr": lambda path, folder: {"data": write_store(as_strings(), folder, "zarr3")},
    "dense in h5ad": lambda path, folder: {"data": write_store(dense(screen()), folder, "h5ad")},
    "dense in memory": lambda path, folder: {"data": dense(screen())},
    "a zipped Zarr store": lambda path, folder: {"data": zip_of(write_store(screen(), folder, "zarr3"))},
    "several": lambda path, folder: {
        "data": [
            write_store(screen()[:500].copy(), folder, "h5ad"),
            write_store(as_strings()[500:].copy(), folder, "zarr2"),
        ]
    },
    "synchronous": lambda path, folder: {"data": path, "scheduler": "synchronous"},
    "read, not mapped": lambda path, folder: {"data": path, "mmap": False},
    "in memory": lambda path, folder: {"data": screen()},
    "lazy": lambda path, folder: {"data": dasksc.open(path)},
    "other fetches": lambda path, folder: {"data": path, "fetch_factor": 7},
    "prefetched": lambda path, folder: {"data": path, "prefetch": 5},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_reading_the_same_cells_yields_the_same_batches(
    way: str, path: Path, expected: list[Any], tmp_path: Path
) -> None:
    assert [numbers(batch) for batch in dataset(**WAYS[way](path, tmp_path))] == expected


# --- Reads ------------------------------------------------------------------------------------------


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


# --- Sizes, processes and states --------------------------------------------------------------------


def sets_of(batch: Any) -> Counter[tuple[Any, ...]]:
    """Return the multiset of the sets of a batch: group, rows and rows of controls."""
    rows, controls = (part.index.reshape(len(batch.sets), -1).tolist() for part in (batch, batch.control))
    return Counter(zip(batch.sets.tolist(), map(tuple, rows), map(tuple, controls), strict=True))


@pytest.mark.parametrize(
    ("before", "after", "equal_ranks", "replace"), [(1, 2, True, True), (3, 2, True, False), (3, 2, False, True)]
)
def test_ranks_of_another_number_resume_with_the_rest_of_the_sets(
    path: Path, before: int, after: int, equal_ranks: bool, replace: bool
) -> None:
    def ranks_of(world_size: int) -> list[dasksc.scDataset]:
        options = {"batch_size": 16, "world_size": world_size, "equal_ranks": equal_ranks}
        return [dataset(path, sets(replace=replace), rank=rank, **options) for rank in range(world_size)]

    def read(ranks: list[dasksc.scDataset], n_batches: int | None = None) -> Counter[tuple[Any, ...]]:
        found: Counter[tuple[Any, ...]] = Counter()
        for rank in ranks:
            with closing(iter(rank)) as iterator:
                for batch in islice(iterator, n_batches):
                    found += sets_of(batch)
                states.append(rank.state_dict())
        return found

    states: list[Any] = []
    (every,) = ranks_of(1)
    expected = read([every])
    for n_batches in (1, 5, len(every) // before - 1):
        states.clear()
        found = read(ranks_of(before), n_batches)
        assert states == states[:1] * before
        resumed = ranks_of(after)
        for rank in resumed:
            rank.load_state_dict(states[0])
        found += read(resumed)
        assert not expected - found
        # Before and after resuming, each rank but one may repeat a set, so that all ranks yield equally many.
        assert (found - expected).total() <= (before - 1 + after - 1 if equal_ranks else 0)


# --- Functions of batches ---------------------------------------------------------------------------


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


def test_hooks_receive_sets_as_neighbouring_rows_with_their_labels() -> None:
    def groups_of(batches: Iterator[Any], by_index: bool) -> list[list[tuple[Any, ...]]]:
        obs = screen().obs
        found = []
        for batch in batches:
            own = obs.iloc[batch.index.numpy()] if by_index else batch.obs
            found.append(list(zip(own.line, own.gene, strict=True)))
        return found

    alone = sets(control=None)
    hooked = dataset(screen(), alone, batch_transform=lambda adata: adata)
    assert groups_of(iter(hooked), by_index=False) == groups_of(iter(dataset(screen(), alone)), by_index=True)

"""Memory model: a pure function, tested on synthetic cases."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.loader.projection import MemoryProjection, ReadingMode
from dasksc.loader.source import MatrixSource
from dasksc.plan.ranks import World
from dasksc.plan.strategies import BlockShuffling
from dasksc.storage import FetchCost

pytestmark = pytest.mark.core

MIB = 2**20
ROW = 11_600.0
# An uncompressed X with 1,450 values per row, and a compressed layer.
MAPPED = {"X": FetchCost(row=ROW, held=32), "layers/raw": FetchCost(row=400, held=400, fixed=MIB)}
READ = {"X": FetchCost(row=ROW, held=ROW), "layers/raw": FetchCost(row=400, held=400, fixed=MIB)}


def model(*, mapped: Any = MAPPED, read: Any = READ, in_process: bool = True, **options: Any) -> MemoryProjection:
    spec = {"batch_size": 64, "fetch_factor": 256, "prefetch": None, "memory_limit": 2**31} | options
    source = Mock(spec=MatrixSource, n_obs=200_000, costs=(mapped, read, frozenset()))
    source.batch_row_bytes.return_value = 5e6 / 64, 0
    world = World(rank=0, world_size=1, local_world_size=1)
    return MemoryProjection(
        SimpleNamespace(**spec, is_pinned=False, is_on_device=False),  # type: ignore[arg-type]
        source,
        SimpleNamespace(detect=lambda: world),  # type: ignore[arg-type]
        lambda: SimpleNamespace(in_process=in_process, n_threads=None),  # type: ignore[arg-type, return-value]
        strategy=BlockShuffling(64),
        sampler=SimpleNamespace(n_controls=0),  # type: ignore[arg-type]
    )


def n_parts(one: MemoryProjection, unmapped: Collection[str]) -> int:
    return one.n_parts(one.fetch_factor, one.held_row_bytes(unmapped))


def reading_mode(available: int, *, limit: int = 2**31, prefetch: int | None = None) -> ReadingMode:
    return model(prefetch=prefetch).mode_within(n_threads=2, limit=limit, available=available)


def test_pages_of_mapped_fetches_count_until_their_batches_are_made() -> None:
    one = model()
    assert one.mappable == {"X"}
    mapped, mapped_pages = one.demand((), n_parts(one, ()), n_threads=2)
    assert mapped_pages == pytest.approx(1.1 * 2 * 64 * 256 * ROW, rel=0.05)
    read, read_pages = one.demand({"X"}, n_parts(one, {"X"}), n_threads=2)
    assert read - mapped == pytest.approx(mapped_pages, rel=0.05)
    # Reads in progress pass through the page cache.
    assert read_pages == pytest.approx(1.1 * 2 / n_parts(one, {"X"}) * 64 * 256 * ROW, rel=0.01)


@pytest.mark.parametrize(
    ("mib", "unmapped", "depth", "fits"),
    [(4096, set(), 4, True), (1024, {"X"}, 9, True), (500, {"X"}, range(1, 9), True), (100, set(), 1, False)],
)
def test_with_less_memory_files_are_read_then_fetches_shrink_and_finally_do_not_fit(mib, unmapped, depth, fits) -> None:
    found = reading_mode(mib * MIB)
    assert found.unmapped == unmapped
    assert found.depth in depth if isinstance(depth, range) else found.depth == depth
    assert found.fits is fits


def test_a_prefetch_that_was_asked_for_is_kept() -> None:
    assert reading_mode(500 * MIB, prefetch=3).depth == 3
    assert not reading_mode(500 * MIB, prefetch=3).fits


def test_what_other_processes_read_is_held_here_and_not_mapped() -> None:
    anonymous, pages = model(in_process=False).demand((), 9, n_threads=0)
    assert pages == 0
    assert anonymous > model().demand((), 9, n_threads=0)[0]


def test_the_size_of_a_fetch_depends_on_the_limit_given_only() -> None:
    def factor(limit: int, prefetch: int | None = None, **costs: Any) -> int:
        one = model(fetch_factor=1, prefetch=prefetch, **costs)
        one.limit = limit
        return one.fitting_fetch_factor()

    factors = [factor(gib * 2**30) for gib in (1, 2, 4)]
    assert factors == sorted(factors)
    assert factors == [factor(gib * 2**30, mapped=READ) for gib in (1, 2, 4)]
    assert factor(1, prefetch=2) == 1


@given(
    available=st.integers(0, 2**34),
    more=st.integers(0, 2**34),
    prefetch=st.none() | st.integers(1, 5),
    n_threads=st.integers(1, 8),
    row=st.floats(1, 1e6),
    factor=st.integers(1, 512),
)
def test_more_memory_never_reads_less_at_a_time_in_the_same_way(
    available, more, prefetch, n_threads, row, factor
) -> None:
    one = model(
        mapped={"X": FetchCost(row=row, held=32)},
        read={"X": FetchCost(row=row, held=row + 32)},
        fetch_factor=factor,
        prefetch=prefetch,
        memory_limit=2**40,
    )
    less, greater = (
        one.mode_within(n_threads=n_threads, limit=2**40, available=n) for n in (available, available + more)
    )
    for found, n in ((less, available), (greater, available + more)):
        assert found.n_parts == n_parts(one, found.unmapped)
        assert 1 <= found.depth <= one.depth(found.n_parts, n_threads)
        if found.fits:
            assert found.anonymous + found.pages <= n
    assert greater.fits or not less.fits
    if less.unmapped == greater.unmapped and less.fits:
        assert greater.depth >= less.depth

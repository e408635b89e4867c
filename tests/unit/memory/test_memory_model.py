"""Memory model: a pure function, tested on synthetic cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasksc.memory import MemoryModel
from dasksc.storage import FetchCost

pytestmark = pytest.mark.core

MIB = 2**20
ROW = 11_600.0
# An uncompressed X with 1,450 values per row, and a compressed layer.
MAPPED = {"X": FetchCost(row=ROW, held=32), "layers/raw": FetchCost(row=400, held=400, fixed=MIB)}
READ = {"X": FetchCost(row=ROW, held=ROW), "layers/raw": FetchCost(row=400, held=400, fixed=MIB)}


def model(**changes: object) -> MemoryModel:
    made = MemoryModel(
        n_obs=200_000,
        mapped=MAPPED,
        read=READ,
        batch_size=64,
        fetch_factor=256,
        batch_bytes=5e6,
        n_batches=6,
        run_rows=64.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def reading_mode(available: int, *, limit: int = 2**31, **options: Any):
    return model().reading_mode(n_threads=2, limit=limit, available=available, **{"prefetch": None, **options})


def test_pages_of_mapped_fetches_count_until_their_batches_are_made() -> None:
    one = model()
    assert one.mappable == {"X"}
    mapped = one.demand(depth=one.n_parts(()), n_threads=2, unmapped=())
    assert mapped.pages == pytest.approx(1.1 * 2 * 64 * 256 * ROW, rel=0.05)
    read = one.demand(depth=one.n_parts({"X"}), n_threads=2, unmapped={"X"})
    assert read.anonymous - mapped.anonymous == pytest.approx(mapped.pages, rel=0.05)
    # Reads in progress pass through the page cache.
    assert read.pages == pytest.approx(1.1 * 2 / one.n_parts({"X"}) * 64 * 256 * ROW, rel=0.01)
    assert read.total == read.anonymous + read.pages


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
    travelling = model(is_interprocess=True)
    demand = travelling.demand(depth=9, n_threads=0, unmapped=())
    assert demand.pages == 0
    assert demand.anonymous > model().demand(depth=9, n_threads=0, unmapped=()).anonymous


def test_the_size_of_a_fetch_depends_on_the_limit_given_only() -> None:
    factors = [model(fetch_factor=1).fitting_fetch_factor(gib * 2**30, prefetch=None) for gib in (1, 2, 4)]
    assert factors == sorted(factors)
    assert factors == [
        model(mapped=READ, fetch_factor=1).fitting_fetch_factor(gib * 2**30, prefetch=None) for gib in (1, 2, 4)
    ]
    assert model(fetch_factor=1).fitting_fetch_factor(1, prefetch=2) == 1


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
        mapped={"X": FetchCost(row=row, held=32)}, read={"X": FetchCost(row=row, held=row + 32)}, fetch_factor=factor
    )
    less, greater = (
        one.reading_mode(prefetch=prefetch, n_threads=n_threads, limit=2**40, available=n)
        for n in (available, available + more)
    )
    for found, n in ((less, available), (greater, available + more)):
        assert 1 <= found.depth <= one.depth(found.unmapped, prefetch=prefetch, n_threads=n_threads)
        assert found.n_parts == one.n_parts(found.unmapped)
        if found.fits:
            assert found.demand.total <= n
    assert greater.fits or not less.fits
    if less.unmapped == greater.unmapped and less.fits:
        assert greater.depth >= less.depth

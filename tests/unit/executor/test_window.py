"""Bounded, ordered window of fetches in flight, on every kind of scheduler, and large fetches read in parts."""

from __future__ import annotations

import asyncio
import io
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pytest
from dask.callbacks import Callback
from dask.diagnostics import Profiler, ProgressBar

import dasksc
from dasksc.errors import FetchError
from dasksc.executor.schedulers import default_threads
from dasksc.executor.tasks import FetchedMatrices, assembled
from dasksc.executor.window import Window
from dasksc.loader import projection
from dasksc.storage import as_matrix
from tests.support.data import make_values
from tests.support.waiting import WAIT_S, eventually

pytestmark = pytest.mark.core


@pytest.fixture(params=["synchronous", "threads"])
def any_scheduler(request: pytest.FixtureRequest) -> str:
    return request.param


def our_threads() -> list[threading.Thread]:
    # Threads for disk reads and requests belong to the process, and persist.
    staying = ("dasksc-direct-read", "dasksc-request")
    names = {thread: thread.name for thread in threading.enumerate()}
    return [t for t, name in names.items() if name.startswith("dasksc") and not name.startswith(staying)]


def double(k: int) -> int:
    return 2 * k


def double_late(k: int) -> int:
    time.sleep(random.Random(k).random() * 0.02)
    return 2 * k


def fail_at_5(k: int) -> int:
    if k == 5:
        raise OSError("the disk is gone")
    return k


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __reduce__(self) -> Any:
        raise TypeError("this result must not be serialised")


class Gauge:
    """Task that records the maximum number of calls that have started and whose results have not been taken."""

    def __init__(self, n_bytes: int = 0) -> None:
        self.n_bytes = n_bytes
        self.lock = threading.Lock()
        self.n_started = 0
        self.n_taken = 0
        self.most = 0

    def __call__(self, k: int) -> Sized:
        with self.lock:
            self.n_started += 1
            self.most = max(self.most, self.n_started - self.n_taken)
        return Sized(self.n_bytes)

    def drain(self, window: Window[Sized]) -> None:
        for _ in range(sys.maxsize):
            # All submitted tasks run ahead.
            assert eventually(lambda: self.n_started == window.n_submitted)
            with self.lock:
                self.n_taken += 1  # taking a result makes room before the caller receives it
            if next(window, None) is None:
                return


def test_results_come_in_order_whatever_the_delays(any_scheduler: Any) -> None:
    with Window(double_late, range(3, 40), name="w", depth=5, scheduler=any_scheduler) as window:
        assert list(window) == [(k, 2 * k) for k in range(3, 40)]
    assert eventually(lambda: not our_threads())


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_are_in_flight_or_unconsumed(depth: int) -> None:
    gauge = Gauge()
    with Window(gauge, range(30), name="w", depth=depth, scheduler="threads", n_threads=8) as window:
        gauge.drain(window)
    assert gauge.n_started == 30
    assert gauge.most == depth


def test_a_depth_that_changes_is_followed_in_the_middle(any_scheduler: Any) -> None:
    depths = {"now": 2}
    with Window(double, range(100), name="w", depth=lambda: depths["now"], scheduler=any_scheduler) as window:
        n_ahead = 0 if window.scheduler.kind == "synchronous" else 1
        results = iter(window)
        for depth in (2, 7, 3):
            depths["now"] = depth
            for _ in range(7):
                next(results)
            assert window.n_in_flight == n_ahead * depth
        assert [k for k, _ in results] == list(range(21, 100))


def test_no_more_than_n_threads_run_at_the_same_time() -> None:
    running = threading.Semaphore(2)

    def check(k: int) -> int:
        assert running.acquire(blocking=False)
        time.sleep(0.002)
        running.release()
        return k

    with Window(check, range(30), name="w", depth=8, scheduler="threads", n_threads=2) as window:
        assert len(list(window)) == 30


def test_synchronous_runs_in_the_asking_thread_and_never_ahead() -> None:
    ran: list[tuple[int, int]] = []

    def note(k: int) -> int:
        ran.append((k, threading.get_ident()))
        return k

    with Window(note, range(5), name="w", depth=4, scheduler="synchronous") as window:
        assert not window.are_done(1)
        for k, _ in window:
            assert ran[-1] == (k, threading.get_ident())
            assert len(ran) == k + 1


@pytest.mark.parametrize(("max_bytes", "expected"), [(99, 1), (399, 3)])
def test_the_byte_bound_holds_and_lets_one_fetch_through(max_bytes: int, expected: int) -> None:
    gauge, go = Gauge(n_bytes=100), threading.Event()

    def fetch(k: int) -> Sized:
        assert go.wait(WAIT_S)
        return gauge(k)

    with Window(fetch, range(20), name="w", depth=6, max_bytes=max_bytes, scheduler="threads") as window:
        assert window.n_in_flight == 1  # the size of a fetch is not known yet
        go.set()
        gauge.drain(window)
    assert gauge.n_started == 20
    assert gauge.most == expected


def test_the_window_holds_no_result_that_was_consumed() -> None:
    with Window(Gauge(), range(6), name="w", depth=2, scheduler="threads") as window:
        for _ in range(5):
            _, result = next(window)
            gone = weakref.ref(result)
            del result
            # The executor or the Dask worker releases its reference shortly after the result arrives.
            assert eventually(lambda gone=gone: gone() is None)


def test_an_error_comes_at_its_turn_and_says_what_failed(any_scheduler: Any) -> None:
    window = Window(
        fail_at_5,
        range(20),
        name="w",
        depth=4,
        scheduler=any_scheduler,
        describe=lambda k: f"/data/atlas.h5ad: fetch {k} of epoch 3",
    )
    came = []
    with pytest.raises(FetchError) as caught:
        came.extend(k for k, _ in window)
    assert came == [0, 1, 2, 3, 4]
    assert "/data/atlas.h5ad: fetch 5 of epoch 3" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert window.n_submitted < 20
    assert next(window, None) is None
    assert eventually(lambda: not our_threads())


def test_breaking_off_leaves_nothing_behind(any_scheduler: Any) -> None:
    before = set(threading.enumerate())
    with Window(double_late, range(1000), name="w", depth=4, scheduler=any_scheduler) as window:
        for k, _ in window:
            if k == 7:
                break
    if any_scheduler == "threads":
        assert set(threading.enumerate()) <= before
    assert next(window, None) is None
    window.close()
    assert window.n_submitted <= 12
    assert eventually(lambda: not our_threads())


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_every_callback_fires_for_every_fetch(scheduler: str) -> None:
    fired = {"start": 0, "start_state": 0, "pretask": 0, "posttask": 0, "finish": 0}

    def count(name: str) -> Callable[..., None]:
        def callback(*args: Any) -> None:
            fired[name] += 1

        return callback

    bar = io.StringIO()
    with Callback(**{name: count(name) for name in fired}), Profiler() as profiler, ProgressBar(dt=0.001, out=bar):
        values = list(Window(double, range(200), name="w", depth=8, scheduler=scheduler, n_threads=4))
    assert values == [(k, 2 * k) for k in range(200)]
    assert fired == dict.fromkeys(fired, 200)
    assert sorted(entry.key for entry in profiler.results) == [("w", k) for k in range(200)]
    assert "100% Completed" in bar.getvalue()


def test_figures_tell_running_from_ready_and_weigh_both() -> None:
    first, rest = threading.Event(), threading.Event()

    def fetch(k: int) -> np.ndarray:
        (rest if k else first).wait(WAIT_S)
        return np.zeros(100, dtype=np.uint8)

    with Window(fetch, range(5), name="w", depth=3, scheduler="threads", n_threads=3, max_bytes=10_000) as window:
        first.set()
        next(window)  # only one fetch is admitted until a size is known
        figures = window.figures()
        assert (figures.n_fetching, figures.n_ready, figures.n_fetched) == (3, 0, 1)
        assert (figures.in_flight_bytes, figures.limit_bytes) == (300, 10_000)
        rest.set()
        assert eventually(lambda: window.figures().n_ready == 3)
        assert window.figures().in_flight_bytes == 300
        assert len(list(window)) == 4
    figures = window.figures()
    assert (figures.n_fetching, figures.n_ready, figures.n_fetched, figures.in_flight_bytes) == (0, 0, 5, 0)


def test_closing_in_the_thread_of_an_event_loop_does_not_wait_for_fetches_that_may_need_it() -> None:
    begun, end = threading.Event(), threading.Event()
    window = Window(lambda _: (begun.set(), end.wait(WAIT_S)), range(9), name="w", depth=2, scheduler="threads")
    assert begun.wait(WAIT_S)

    async def close() -> None:
        window.close()

    closing = threading.Thread(target=lambda: asyncio.run(close()))
    closing.start()
    closing.join(WAIT_S / 2)
    assert not closing.is_alive()
    end.set()


def test_affinity_and_the_share_of_a_rank_limit_the_threads() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    n = default_threads()
    assert 1 <= n <= len(allowed)
    assert default_threads(local_world_size=n) == 1
    assert default_threads(local_world_size=10 * n, n_workers=3) == 1


def test_the_error_of_a_part_comes_when_its_fetch_is_asked_for(any_scheduler: Any) -> None:
    def fetch(k: int) -> FetchedMatrices:
        return FetchedMatrices({"X": as_matrix(np.full((2, 3), fail_at_5(k)), "m").fetch(np.arange(2))})

    with Window(fetch, range(9), name="w", depth=4, scheduler=any_scheduler) as window:
        results = assembled(window, 3)
        assert next(results)[0] == 0
        with pytest.raises(FetchError):
            next(results)


@pytest.mark.parametrize(
    ("scheduler", "stored", "layout"),
    [("threads", "csr", "dense"), ("synchronous", "csr", "csr"), ("synchronous", "dense", "dense")],
)
def test_batches_do_not_depend_on_the_parts(
    tmp_path: Path, scheduler: str, stored: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.h5ad"
    anndata.AnnData(X=make_values(90, 11, layout=stored)).write_h5ad(path, compression="gzip")

    def epoch(part_bytes: int) -> tuple[int, list[Any]]:
        monkeypatch.setattr(projection, "_PART_BYTES", part_bytes)
        dataset = dasksc.scDataset(
            path, dasksc.BlockShuffling(4), 8, 3, scheduler=scheduler, layout=layout, seed=0, return_index=True
        )
        first = list(islice(dataset, 4))
        state = dataset.state_dict()
        dataset.load_state_dict({**state, "epoch": 0})
        return dataset.memory.reading_mode().n_parts, first + list(dataset)

    (one, expected), (several, batches) = epoch(2**25), epoch(500)
    assert one == 1
    assert several > 1
    assert len(batches) == len(expected) > 10
    for batch, other in zip(batches, expected, strict=True):
        assert batch.index.equal(other.index)
        assert batch.X.to_dense().equal(other.X.to_dense())

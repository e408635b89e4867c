"""Bounded, ordered window of fetches in flight, on every kind of scheduler."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import dask
import distributed
import numpy as np
import pytest
from dask.callbacks import Callback
from dask.diagnostics import Profiler, ProgressBar

from dasksc.errors import FetchError, InputError
from dasksc.executor import local as window_local
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.cluster import plugin, worker_checks, worker_connections
from dasksc.executor.schedulers import FetchScheduler, cpu_count, default_threads, portable_scheduler, resolve_scheduler
from dasksc.executor.window import Window

pytestmark = pytest.mark.core

WAIT_S = 60.0  # timeout in seconds; only a failing test waits this long


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture(params=["synchronous", "threads", "in_process_client", "two_process_client"])
def any_scheduler(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param) if "client" in request.param else request.param


@pytest.fixture(params=["threads", "in_process_client"])
def here(request: pytest.FixtureRequest) -> Any:
    """Scheduler that runs ahead, and whose tasks share the memory of this process."""
    return request.getfixturevalue(request.param) if "client" in request.param else request.param


def our_threads() -> list[threading.Thread]:
    # Threads for disk reads and requests belong to the process, and persist.
    staying = ("dasksc-direct-read", "dasksc-request")
    names = {thread: thread.name for thread in threading.enumerate()}
    return [t for t, name in names.items() if name.startswith("dasksc") and not name.startswith(staying)]


def nothing_is_left(scheduler: Any) -> bool:
    """Return True if no thread, task, future or key remains."""
    if our_threads() or plugin.task_plugins:
        return False
    if not isinstance(scheduler, distributed.Client):
        return True
    dask_scheduler = scheduler.cluster.scheduler
    plugins = set(dask_scheduler.worker_plugins) - {"shuffle"}
    return not dask_scheduler.tasks and not plugins and not scheduler.futures


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
    """Result of a known size."""

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
            assert eventually(lambda: self.n_started == window.stats.n_submitted)
            with self.lock:
                self.n_taken += 1  # taking a result makes room before the caller receives it
            if next(window, None) is None:
                return


# Order and bounds


def test_results_come_in_order_whatever_the_delays(any_scheduler: Any) -> None:
    with Window(double_late, range(3, 40), name="w", depth=5, scheduler=any_scheduler) as window:
        assert list(window) == [(k, 2 * k) for k in range(3, 40)]
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_a_window_over_no_fetches_is_empty(any_scheduler: Any) -> None:
    with Window(double, range(0), name="w", depth=5, scheduler=any_scheduler) as window:
        assert window.next_is_done()
        assert list(window) == []
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_the_argument_is_made_in_this_process(any_scheduler: Any) -> None:
    made_in = []

    def argument(k: int) -> np.ndarray:
        made_in.append(os.getpid())
        return np.arange(k, k + 3)

    window = Window(np.sum, range(10), name="w", depth=3, scheduler=any_scheduler, argument=argument)
    assert [int(total) for _, total in window] == [3 * k + 3 for k in range(10)]
    assert made_in == [os.getpid()] * 10


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_more_than_depth_are_in_flight_or_unconsumed(here: Any, depth: int) -> None:
    gauge = Gauge()
    with Window(gauge, range(30), name="w", depth=depth, scheduler=here, n_threads=8) as window:
        gauge.drain(window)
    assert gauge.n_started == 30
    assert gauge.most == depth


def test_as_many_as_depth_run_at_the_same_time(here: Any) -> None:
    together = threading.Barrier(3, timeout=WAIT_S)

    def meet(k: int) -> int:
        together.wait()
        return k

    with Window(meet, range(9), name="w", depth=3, scheduler=here, n_threads=3) as window:
        assert [k for k, _ in window] == list(range(9))


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


def test_a_depth_that_changes_stays_within_max_bytes(here: Any) -> None:
    depths = {"now": 1}
    window = Window(np.ones, [10] * 40, name="w", depth=lambda: depths["now"], scheduler=here, max_bytes=3 * 80)
    with window:
        next(window)
        depths["now"] = 30
        for _ in range(9):
            next(window)
            assert window.n_in_flight <= 3


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
        assert not window.next_is_done()
        for k, _ in window:
            assert ran[-1] == (k, threading.get_ident())
            assert len(ran) == k + 1


@pytest.mark.parametrize(("max_bytes", "expected"), [(1, 1), (99, 1), (200, 2), (399, 3)])
def test_the_byte_bound_holds_and_lets_one_fetch_through(here: Any, max_bytes: int, expected: int) -> None:
    gauge = Gauge(n_bytes=100)
    with Window(gauge, range(20), name="w", depth=6, max_bytes=max_bytes, scheduler=here) as window:
        assert window.n_in_flight == 1  # the size of a fetch is not known yet
        gauge.drain(window)
    assert gauge.n_started == 20
    assert gauge.most == expected


def test_the_caller_can_ask_whether_the_next_result_is_there(here: Any) -> None:
    go = threading.Event()

    def wait_for_go(k: int) -> int:
        assert go.wait(WAIT_S)
        return k

    with Window(wait_for_go, range(2), name="w", depth=2, scheduler=here, n_threads=2) as window:
        assert not window.next_is_done()
        go.set()
        assert eventually(window.next_is_done)
        assert next(window) == (0, 0)
        assert eventually(window.next_is_done)
        assert next(window) == (1, 1)
        assert window.next_is_done()
        assert next(window, None) is None


def test_the_window_holds_no_result_that_was_consumed(here: Any) -> None:
    with Window(Gauge(), range(6), name="w", depth=2, scheduler=here) as window:
        for _ in range(5):
            _, result = next(window)
            gone = weakref.ref(result)
            del result
            # The executor or the Dask worker releases its reference shortly after the result arrives.
            assert eventually(lambda gone=gone: gone() is None)


def test_figures_add_up(any_scheduler: Any) -> None:
    with Window(np.zeros, range(1, 11), name="w", depth=3, scheduler=any_scheduler, argument=double) as window:
        next(window)
        assert window.stats.n_done == 1
        list(window)
    stats = window.stats
    assert stats.n_submitted == stats.n_done == 10
    assert stats.n_bytes == 8 * sum(2 * k for k in range(1, 11))
    assert stats.fetch_s > 0
    assert stats.wait_s > 0


@pytest.mark.parametrize("bad", [{"depth": 0}, {"depth": 1, "max_bytes": 0}, {"depth": 1, "n_threads": 0}])
def test_bounds_must_be_positive(bad: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        Window(double, range(3), name="w", scheduler="threads", **bad)


# Failures


def test_an_error_comes_at_its_turn_and_says_what_failed(any_scheduler: Any) -> None:
    window = Window(
        fail_at_5,
        range(20),
        name="w",
        depth=4,
        scheduler=any_scheduler,
        describe=lambda k: f"/data/atlas.h5ad: fetch {k} of epoch 3 (rows 7..9)",
    )
    came = []
    with pytest.raises(FetchError) as caught:
        came.extend(k for k, _ in window)
    assert came == [0, 1, 2, 3, 4]
    assert "/data/atlas.h5ad: fetch 5 of epoch 3 (rows 7..9) failed" in str(caught.value)
    assert "OSError: the disk is gone" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert "fail_at_5" in [entry.name for entry in caught.traceback] or any(
        entry.name == "fail_at_5" for entry in pytest.ExceptionInfo.from_exception(caught.value.__cause__).traceback
    )
    assert window.stats.n_submitted < 20
    assert next(window, None) is None
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_an_error_of_the_argument_comes_at_its_turn_too(any_scheduler: Any) -> None:
    window = Window(double, range(9), name="w", depth=8, scheduler=any_scheduler, argument={0: 5, 1: 6}.__getitem__)
    assert next(window) == (0, 10)
    assert next(window) == (1, 12)
    with pytest.raises(FetchError, match=r"fetch 2 failed.*KeyError"):
        next(window)
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_an_interrupt_in_the_asking_thread_is_not_wrapped() -> None:
    def interrupt(k: int) -> int:
        raise KeyboardInterrupt

    window = Window(interrupt, range(3), name="w", depth=2, scheduler="synchronous")
    with pytest.raises(KeyboardInterrupt):
        next(window)
    assert next(window, None) is None


def test_a_task_that_does_not_pickle_fails_before_the_first_fetch(
    two_process_client: distributed.Client,
) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        Window(lambda k: lock, range(3), name="w", depth=2, scheduler=two_process_client)
    assert eventually(lambda: nothing_is_left(two_process_client))


# Stopping early


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
    assert window.stats.n_submitted <= 12
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_a_forgotten_window_leaves_nothing_behind(any_scheduler: Any) -> None:
    window = Window(double_late, range(1000), name="w", depth=4, scheduler=any_scheduler)
    next(window)
    del window
    gc.collect()
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_after_close_nothing_runs_any_more() -> None:
    ended: list[int] = []
    begun = threading.Semaphore(0)

    def work(k: int) -> int:
        begun.release()
        time.sleep(0.05)
        ended.append(k)
        return k

    window = Window(work, range(100), name="w", depth=10, scheduler="threads", n_threads=2)
    assert begun.acquire(timeout=WAIT_S)
    assert begun.acquire(timeout=WAIT_S)
    window.close()
    assert sorted(ended) == [0, 1]
    assert not our_threads()


def test_closing_wakes_the_thread_that_waits(here: Any) -> None:
    go = threading.Event()
    waiting = threading.Event()
    came: list[Any] = []

    def wait_for_go(k: int) -> int:
        waiting.set()
        assert go.wait(WAIT_S)
        return k

    window = Window(wait_for_go, range(10), name="w", depth=2, scheduler=here)
    consumer = threading.Thread(target=lambda: came.extend(window))
    consumer.start()
    assert waiting.wait(WAIT_S)
    closer = threading.Thread(target=window.close)
    closer.start()
    go.set()
    for thread in (consumer, closer):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(came) <= 1
    assert eventually(lambda: nothing_is_left(here))


def test_threads_serve_until_the_last_window_is_closed() -> None:
    first = Window(double, range(9), name="first", depth=2, scheduler="threads", n_threads=2)
    second = Window(double, range(9), name="second", depth=2, scheduler="threads", n_threads=2)
    next(first)
    next(second)
    assert 1 <= len(our_threads()) <= 2
    first.close()
    assert [k for k, _ in second] == list(range(1, 9))
    assert not our_threads()


def test_a_window_collected_in_one_of_its_own_threads_does_not_wait_for_itself() -> None:
    held: list[Any] = []
    handed_over = threading.Event()

    def drop_the_window(k: int) -> int:
        assert handed_over.wait(WAIT_S)
        held.clear()
        return k

    window = Window(drop_the_window, range(3), name="w", depth=2, scheduler="threads", n_threads=2)
    held.append(window)
    del window
    handed_over.set()
    assert eventually(lambda: not our_threads())


# Processes and forks


def run_script(script: str, *, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import os, sys, threading, time\n"
        "from dasksc.executor.window import Window\n"
        "def cluster(protocol):\n"
        "    import distributed\n"
        "    return distributed.Client(n_workers=1, threads_per_worker=2, processes=False,\n"
        '                              protocol=protocol, dashboard_address=":0")\n'
        "def slow(k):\n"
        "    time.sleep(0.05)\n"
        "    return k\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prelude + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        if interrupt:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_threads_without_work_end_and_a_window_that_was_left_open_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_local, "_IDLE_S", 0.05)
    before = set(threading.enumerate())
    window = Window(double_late, range(20), name="w", depth=4, scheduler="threads", n_threads=2)
    taken = [next(window)]
    assert eventually(lambda: set(threading.enumerate()) <= before)
    taken += window
    assert taken == [(k, 2 * k) for k in range(20)]
    for _ in range(20):  # threads that end just as a task is submitted
        with Window(double_late, range(3), name="w", depth=1, scheduler="threads", n_threads=2) as window:
            for k, result in window:
                assert result == 2 * k
                time.sleep(random.random() / 10)
    assert set(threading.enumerate()) <= before


def test_importing_the_window_does_not_import_distributed() -> None:
    done = run_script(
        """
list(Window(slow, range(2), name="w", depth=2))
print("distributed" in sys.modules)
"""
    )
    assert done.stdout == "False\n"


def in_forked_child(check: Callable[[], bool]) -> bool:
    """Return the result of `check` in a forked child; an alarm ends a child that hangs, which counts as a failure."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            status = 0 if check() else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return status == 0


def test_a_forked_child_makes_threads_of_its_own() -> None:
    window = Window(double_late, range(50), name="w", depth=4, scheduler="threads", n_threads=2)
    next(window)

    def check() -> bool:
        mine = list(Window(double_late, range(9), name="w", depth=4, scheduler="threads", n_threads=2))
        return mine == [(k, 2 * k) for k in range(9)] and not our_threads()

    for _ in range(5):
        next(window)
        assert in_forked_child(check)
    assert [k for k, _ in window] == list(range(6, 50))


def test_a_forked_child_leaves_its_parents_window_alone(here: Any) -> None:
    window = Window(double_late, range(50), name="w", depth=4, scheduler=here)
    next(window)

    def check() -> bool:
        try:
            next(window)
        except FetchError as error:
            window.close()
            return "fork" in str(error)
        return False

    assert in_forked_child(check)
    assert [k for k, _ in window] == list(range(1, 50))


def test_a_forked_child_connects_to_the_cluster_anew(two_process_client: distributed.Client) -> None:
    address = two_process_client.scheduler.address

    def check() -> bool:
        scheduler = resolve_scheduler(two_process_client)
        assert scheduler.client is not two_process_client
        assert resolve_scheduler(address).client is scheduler.client
        values = list(Window(double, range(9), name="w", depth=4, scheduler=two_process_client))
        return values == [(k, 2 * k) for k in range(9)]

    assert list(Window(double, range(3), name="w", depth=2, scheduler=two_process_client))
    assert in_forked_child(check)


def test_a_forked_child_of_an_in_process_cluster_uses_threads(
    in_process_client: distributed.Client,
) -> None:
    def check() -> bool:
        with pytest.raises(InputError, match="after a fork"):
            resolve_scheduler(in_process_client)
        with in_process_client.as_current():
            return resolve_scheduler(None).kind == "threads"

    assert in_forked_child(check)


# Dask's own callbacks


@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_every_callback_fires_for_every_fetch(scheduler: str) -> None:
    fired = {"start": 0, "start_state": 0, "pretask": 0, "posttask": 0, "finish": 0}

    def count(name: str) -> Callable[..., None]:
        def callback(*args: Any) -> None:
            fired[name] += 1

        return callback

    bar = io.StringIO()
    with (
        Callback(**{name: count(name) for name in fired}),
        Profiler() as profiler,
        ProgressBar(dt=0.001, out=bar) as progress,
    ):
        values = list(Window(double, range(200), name="w", depth=8, scheduler=scheduler, n_threads=4))
    assert values == [(k, 2 * k) for k in range(200)]
    assert fired == {"start": 1, "start_state": 1, "pretask": 200, "posttask": 200, "finish": 1}
    assert sorted(entry.key for entry in profiler.results) == [("w", k) for k in range(200)]
    assert len({entry.worker_id for entry in profiler.results}) >= 1
    assert progress.last_duration > 0
    assert bar.getvalue().rstrip().split("\r")[-1].count("100% Completed") == 1
    assert bar.getvalue().count("\n") == 1


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


def test_figures_can_be_had_while_a_failed_fetch_waits_for_its_turn() -> None:
    def fetch(k: int) -> int:
        if k:
            raise OSError("torn")
        return k

    with Window(fetch, range(4), name="w", depth=2, scheduler="threads", n_threads=1) as window:
        assert eventually(lambda: window.figures().n_ready == 2)
        with pytest.raises(FetchError, match="torn"):
            list(window)


def test_callbacks_hear_of_an_epoch_that_was_broken_off() -> None:
    ends: list[bool] = []
    with (
        Callback(finish=lambda dsk, state, errored: ends.append(errored)),
        Window(double, range(50), name="w", depth=4, scheduler="threads") as window,
    ):
        next(window)
    assert ends == [True]


def test_a_callback_that_fails_is_dropped_and_the_epoch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def fail(*args: Any) -> None:
        raise KeyError("reset by another computation")

    with Callback(posttask=fail), Callback(posttask=lambda key, *rest: seen.append(key)):
        values = list(Window(double, range(20), name="w", depth=4, scheduler="threads"))
    assert values == [(k, 2 * k) for k in range(20)]
    assert sorted(seen) == [("w", k) for k in range(20)]
    assert sum("continues without it" in message for message in caplog.messages) == 1


def test_the_callbacks_of_other_computations_stay_in_place() -> None:
    # Concurrent scheduler calls that set and restore global callbacks can lose some of them.
    counted: list[Any] = []
    with Callback(pretask=lambda key, *rest: counted.append(key)) as callback:
        with Window(double_late, range(20), name="w", depth=4, scheduler="threads") as window:
            assert dask.delayed(sum)([1, 2]).compute(scheduler="synchronous") == 3
            list(window)
        assert Callback.active == {callback._callback}
    assert len([key for key in counted if key[0] == "w"]) == 20


# Clusters


def test_a_second_window_of_the_same_name_takes_no_stale_result(any_scheduler: Any) -> None:
    first = Window(double, range(5), name="same", depth=3, scheduler=any_scheduler)
    second = Window(np.negative, range(5), name="same", depth=3, scheduler=any_scheduler)
    for k in range(5):
        assert next(first) == (k, 2 * k)
        assert next(second) == (k, -k)
    first.close()
    second.close()
    assert eventually(lambda: nothing_is_left(any_scheduler))


def test_keys_are_grouped_by_name_on_the_dashboard(in_process_client: distributed.Client) -> None:
    go = threading.Event()

    def wait_for_go(k: int) -> bool:
        return go.wait(WAIT_S)

    with Window(
        wait_for_go, range(3), name="epoch 3: dasksc-fetch-pbmc-r1", depth=3, scheduler=in_process_client
    ) as window:
        tasks = in_process_client.cluster.scheduler.tasks
        assert eventually(lambda: len(tasks) == 3)
        assert {task.prefix.name for task in tasks.values()} == {"epoch 3: dasksc-fetch-pbmc"}
        assert len({task.group.name for task in tasks.values()}) == 1
        assert {key[1] for key in tasks} == {0, 1, 2}
        go.set()
        list(window)


def test_an_in_process_cluster_serialises_neither_task_nor_result(
    in_process_client: distributed.Client,
) -> None:
    made: list[Sized] = []
    lock = threading.Lock()  # cannot be pickled

    def make(k: int) -> Sized:
        with lock:
            made.append(Sized(k))
            return made[-1]

    with Window(make, range(8), name="w", depth=1, scheduler=in_process_client) as window:
        assert all(result is made[k] for k, result in window)


class CountsPickling:
    """Large task that counts how often it is pickled in this process."""

    n_pickled = 0

    def __init__(self) -> None:
        self.payload = np.zeros(12 << 20, dtype=np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        CountsPickling.n_pickled += 1
        return self.__dict__

    def __call__(self, k: int) -> int:
        return len(self.payload) + k


def test_a_large_task_is_sent_once_and_not_with_every_fetch(two_process_client: distributed.Client) -> None:
    CountsPickling.n_pickled = 0
    sent: list[int] = []
    submit = two_process_client._send_to_scheduler

    def measure(message: dict[str, Any]) -> None:
        if message["op"] == "update-graph":
            sent.append(sum(len(frame) for frame in message["expr_ser"].frames))
        submit(message)

    two_process_client._send_to_scheduler = measure
    try:
        window = Window(CountsPickling(), range(12), name="w", depth=4, scheduler=two_process_client)
        assert [n - (12 << 20) for _, n in window] == list(range(12))
    finally:
        del two_process_client._send_to_scheduler
    assert CountsPickling.n_pickled == 1
    assert len(sent) == 12
    assert max(sent) < 10_000


def test_a_worker_that_leaves_while_the_task_is_sent_does_not_matter(
    two_process_client: distributed.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = two_process_client.register_plugin
    failures = [OSError("a worker has closed its connection")]

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return register(*args, **kwargs)

    monkeypatch.setattr(two_process_client, "register_plugin", fail_once)
    assert len(list(Window(double, range(4), name="w", depth=2, scheduler=two_process_client))) == 4
    assert eventually(lambda: nothing_is_left(two_process_client))


def test_fetches_spread_over_all_workers(two_process_client: distributed.Client) -> None:
    def where(k: int) -> int:
        time.sleep(0.02)
        return os.getpid()

    pids = [pid for _, pid in Window(where, range(20), name="w", depth=4, scheduler=two_process_client)]
    assert len(set(pids)) == 2


def test_results_pass_through_the_scheduler_where_workers_are_out_of_reach(
    two_process_client: distributed.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable:
        async def identity(self) -> None:
            raise OSError("no route to host")

    addresses = set(two_process_client.scheduler_info()["workers"])
    pool = two_process_client.rpc
    monkeypatch.setattr(
        two_process_client, "rpc", lambda address: Unreachable() if address in addresses else pool(address)
    )
    monkeypatch.setattr(worker_connections, "_reachable", weakref.WeakKeyDictionary())
    with caplog.at_level(logging.WARNING, logger="dasksc"):
        for _ in range(2):
            window = Window(double, range(6), name="w", depth=3, scheduler=two_process_client)
            assert list(window) == [(k, 2 * k) for k in range(6)]
    assert sum("cannot be reached" in message for message in caplog.messages) == len(addresses)


def test_worker_processes_on_this_machine_are_pointed_out_once(
    two_process_client: distributed.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_checks, "_advised", set())
    monkeypatch.setattr(worker_checks, "_checked", weakref.WeakKeyDictionary())
    with caplog.at_level(logging.WARNING, logger="dasksc"):
        for _ in range(2):
            list(Window(double, range(2), name="w", depth=2, scheduler=two_process_client))
    assert sum("scheduler='threads'" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("protocol", ["inproc", "tcp"])
def test_a_cluster_that_goes_away_is_named_in_the_error(protocol: str) -> None:
    with (
        distributed.LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=False,
            protocol=protocol,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        address = client.scheduler.address
        window = Window(double_late, range(10_000), name="w", depth=2, scheduler=client)
        next(window)
        cluster.close()
        with pytest.raises(FetchError, match=address):
            list(window)


# Choosing the scheduler


def test_without_a_client_fetches_run_on_threads() -> None:
    assert resolve_scheduler(None).kind == "threads"
    assert resolve_scheduler("threads").in_process
    assert resolve_scheduler("synchronous").kind == "synchronous"


def test_an_active_client_is_found_and_daskconfig_goes_before_it(
    in_process_client: distributed.Client,
) -> None:
    with in_process_client.as_current():
        scheduler = resolve_scheduler(None)
        assert scheduler.client is in_process_client
        assert scheduler.in_process
        with dask.config.set(scheduler="synchronous"):
            assert resolve_scheduler(None).kind == "synchronous"
        with dask.config.set(scheduler="threads"):
            assert resolve_scheduler(None).kind == "threads"
    assert resolve_scheduler(scheduler).client is in_process_client


def test_inside_a_task_of_a_worker_fetches_run_on_threads(in_process_client: distributed.Client) -> None:
    def epoch() -> tuple[str, int]:
        window = Window(double, range(5), name="w", depth=2)
        return window.scheduler.kind, len(list(window))

    with in_process_client.as_current():
        assert in_process_client.submit(epoch, pure=False).result() == ("threads", 5)


def test_one_client_serves_all_windows_of_an_address(two_process_client: distributed.Client) -> None:
    address = two_process_client.scheduler.address
    first = resolve_scheduler(address)
    assert first.client is not None
    assert first.client is resolve_scheduler(address).client
    assert not first.in_process
    assert list(Window(double, range(3), name="w", depth=2, scheduler=address)) == [(0, 0), (1, 2), (2, 4)]
    assert distributed.client._get_global_client() is not first.client
    window_schedulers._close_clients()
    assert first.client.status == "closed"


@pytest.mark.parametrize("bad", ["thread", "processes", 3, object()])
def test_what_is_not_a_scheduler_is_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="is not a scheduler"):
        resolve_scheduler(bad)


def test_an_address_without_a_scheduler_is_refused() -> None:
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "200ms"}),
        pytest.raises(InputError, match="does not answer") as caught,
    ):
        resolve_scheduler("tcp://127.0.0.1:9")
    # The error still references its Client, which must be closed by now. Otherwise, garbage collection could close it
    # in a thread that another Client is starting, and that thread and the other Client would wait for each other
    # forever.
    error = caught.value.__cause__
    assert error is not None
    frames = [frame.f_locals.get("client") for frame, _ in traceback.walk_tb(error.__traceback__)]
    (client,) = {id(one): one for one in frames if isinstance(one, distributed.Client)}.values()
    assert client.status == "closed"


def test_a_closed_client_is_refused_by_the_address_of_its_cluster() -> None:
    with distributed.Client(n_workers=1, processes=False, dashboard_address=":0", set_as_default=False) as client:
        address = client.scheduler.address
    with pytest.raises(InputError, match=re.escape(f"The Client at {address} is closed")):
        resolve_scheduler(client)


def test_that_the_active_client_is_asynchronous_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def resolve() -> None:
        async with distributed.Client(n_workers=0, processes=False, dashboard_address=":0", asynchronous=True):
            for _ in range(3):
                assert resolve_scheduler().kind == "threads"

    asyncio.run(resolve())
    assert caplog.text.count("is asynchronous; fetches run on threads") == 1


def test_the_threads_of_a_cluster_are_known_as_soon_as_its_workers_are_there() -> None:
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        assert resolve_scheduler(client).n_threads == 0
        cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        assert resolve_scheduler(client).n_threads == sum(client.nthreads().values()) >= 2


def test_a_client_is_given_to_another_process_as_its_address(
    two_process_client: distributed.Client, in_process_client: distributed.Client
) -> None:
    address = two_process_client.scheduler.address
    assert portable_scheduler(two_process_client) == address
    assert portable_scheduler(FetchScheduler(kind="client", client=two_process_client)) == address
    assert portable_scheduler(in_process_client) is None
    assert portable_scheduler("synchronous") == "synchronous"
    assert portable_scheduler(FetchScheduler(kind="threads")) == "threads"
    assert portable_scheduler(None) is None


# CPUs


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Any) -> None:
    root = tmp_path / "cgroup"
    inner = root / "pod" / "container"
    inner.mkdir(parents=True)
    membership = tmp_path / "self"
    membership.write_text("1:cpu:/v1\n0::/pod/container\n")
    assert window_schedulers._cgroup_quota(root, membership) is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert window_schedulers._cgroup_quota(root, membership) is None
    (inner / "cpu.max").write_text("800000 100000\n")
    assert window_schedulers._cgroup_quota(root, membership) == 8
    (root / "pod" / "cpu.max").write_text("150000 100000\n")
    assert window_schedulers._cgroup_quota(root, membership) == 1.5
    assert window_schedulers._cgroup_quota(root, tmp_path / "missing") is None


def test_affinity_and_the_share_of_a_rank_limit_the_threads() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cpu_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    n = cpu_count()
    assert 1 <= n <= len(allowed)
    assert default_threads() == n
    assert default_threads(local_world_size=n) == 1
    assert default_threads(local_world_size=10 * n, n_workers=3) == 1

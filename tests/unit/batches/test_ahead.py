"""Jobs that run ahead of the consumer of their results."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from dasksc.batches.prefetch import _close_all, _ThreadPool, run_ahead

pytestmark = pytest.mark.core


def gather_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dasksc-gather")]


@pytest.mark.parametrize("n_threads", [0, 1, 3])
@pytest.mark.parametrize("n_ahead", [1, 2, 4, 100])
def test_running_ahead_keeps_the_order_and_runs_each_job_once(n_threads: int, n_ahead: int) -> None:
    runs: list[int] = []

    def job(i: int) -> int:
        runs.append(i)
        time.sleep(0.0001 * (i % 3))
        return i

    jobs = iter([lambda i=i: job(i) for i in range(50)])
    assert list(run_ahead(jobs, is_ready=lambda: True, n_ahead=n_ahead, n_threads=n_threads)) == list(range(50))
    assert sorted(runs) == list(range(50))
    assert not gather_threads()


@pytest.mark.parametrize("n_threads", [0, 2])
def test_an_error_while_running_ahead_comes_after_the_results_before_it(n_threads: int) -> None:
    def jobs() -> Iterator[Callable[[], int]]:
        for i in range(3):
            yield lambda i=i: i
        raise OSError("the fetch")

    results = run_ahead(jobs(), is_ready=lambda: True, n_ahead=8, n_threads=n_threads)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the fetch"):
        next(results)
    assert not gather_threads()


@pytest.mark.parametrize("n_threads", [0, 2])
def test_the_error_of_a_job_comes_in_its_turn_and_ends_the_rest(n_threads: int) -> None:
    def fail() -> int:
        raise OSError("the job")

    results = run_ahead(iter([lambda: 0, fail, lambda: 2]), is_ready=lambda: True, n_ahead=8, n_threads=n_threads)
    assert next(results) == 0
    with pytest.raises(OSError, match="the job"):
        next(results)
    assert list(results) == []
    assert not gather_threads()


def test_no_more_is_computed_than_was_requested() -> None:
    handed_out = 0

    def jobs() -> Iterator[Callable[[], int]]:
        nonlocal handed_out
        for i in range(40):
            handed_out += 1
            yield lambda i=i: i

    results = run_ahead(jobs(), is_ready=lambda: True, n_ahead=5, n_threads=2)
    for taken, _ in enumerate(results, start=1):
        assert handed_out <= taken + 5


def test_a_job_that_is_not_ready_is_requested_only_when_no_other_remains() -> None:
    requested: list[int] = []

    def jobs() -> Iterator[Callable[[], int]]:
        for i in range(5):
            requested.append(i)
            yield lambda i=i: i

    results = run_ahead(jobs(), is_ready=lambda: False, n_ahead=5, n_threads=2)
    for i, result in enumerate(results):
        assert result == i
        assert requested == list(range(i + 1))


@pytest.mark.parametrize("n_threads", [1, 2])
def test_jobs_are_run_by_the_threads_alone(n_threads: int) -> None:
    # A transform is not necessarily thread-safe, and PyTorch's modes are thread-local.
    at_once, most, names = 0, 0, set()

    def job() -> None:
        nonlocal at_once, most
        names.add(threading.current_thread().name)
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.0005)
        at_once -= 1

    assert len(list(run_ahead(iter([job] * 200), is_ready=lambda: True, n_ahead=4, n_threads=n_threads))) == 200
    assert names <= {f"dasksc-gather-{i}" for i in range(n_threads)}
    assert most <= n_threads


def test_without_its_threads_the_consumer_runs_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ThreadPool, "exiting", False)
    names: list[str] = []

    def job() -> None:
        names.append(threading.current_thread().name)

    results = run_ahead(iter([job] * 20), is_ready=lambda: True, n_ahead=4, n_threads=2)
    next(results)
    # The interpreter calls this when the main thread has ended.
    _close_all()
    for thread in gather_threads():
        thread.join(timeout=10)
    assert not gather_threads()
    names.clear()
    assert len(list(results)) == 19
    assert len(names) >= 15
    assert set(names) == {threading.current_thread().name}
    # An iteration that begins at interpreter exit runs all jobs in the calling thread.
    names.clear()
    assert len(list(run_ahead(iter([job] * 20), is_ready=lambda: True, n_ahead=4, n_threads=2))) == 20
    assert set(names) == {threading.current_thread().name}


def test_closing_ends_the_threads_and_drops_what_has_not_begun() -> None:
    begun = 0

    def job() -> None:
        nonlocal begun
        begun += 1
        time.sleep(0.01)

    results = run_ahead(iter([job] * 500), is_ready=lambda: True, n_ahead=500, n_threads=2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert begun < 100
    assert not gather_threads()


def test_consumed_results_are_not_referenced() -> None:
    class Result:
        pass

    held: list[weakref.ref[Result]] = []
    for result in run_ahead(iter([Result] * 20), is_ready=lambda: True, n_ahead=4, n_threads=2):
        held.append(weakref.ref(result))
        del result
    gc.collect()
    assert len(held) == 20
    assert not any(one() for one in held)


def test_an_error_that_is_never_raised_holds_no_reference() -> None:
    class Held:
        pass

    held = Held()
    seen = weakref.ref(held)

    has_begun = threading.Event()

    def fail(held: Held = held) -> None:
        has_begun.set()
        raise OSError("nobody takes this")

    gc.disable()
    try:
        results = run_ahead(iter([lambda: None, fail]), is_ready=lambda: True, n_ahead=2, n_threads=1)
        next(results)
        assert has_begun.wait(30)
        results.close()  # type: ignore[attr-defined]
        fail.__defaults__ = None
        del results, fail, held
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["main", "thread", "late"])
def test_the_interpreter_can_exit_while_jobs_run(where: str) -> None:
    script = f"""
import threading, time
from dasksc.batches.prefetch import _ThreadPool, run_ahead

begun = threading.Event()
def job():
    begun.set()
    time.sleep(0.001)

results = run_ahead(iter([job] * 300), is_ready=lambda: True, n_ahead=10, n_threads=2)
if {where!r} == "main":
    next(results)
else:
    def consume():
        while {where!r} == "late" and not _ThreadPool.exiting:
            time.sleep(0.001)
        print(len(list(results)), flush=True)
    threading.Thread(target=consume).start()
    if {where!r} == "thread":
        begun.wait()
print("main ends", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # A thread that outlives the main thread receives all results.
    assert done.stdout.split("\n")[:-1] == ["main ends", *["300"] * (where != "main")]

"""Window of fetches on Dask clusters, in forked children and at the end of the interpreter."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading

import dask
import distributed
import numpy as np
import pytest
from anndata import AnnData

from dasksc import scDataset
from dasksc.errors import FetchError, InputError
from dasksc.executor.schedulers import resolve_scheduler
from dasksc.executor.window import Window
from tests.support.programs import ended
from tests.support.waiting import eventually
from tests.unit.executor.test_window import double, double_late, fail_at_5

pytestmark = pytest.mark.programs


@pytest.fixture(params=["in_process_client", "two_process_client"])
def client(request: pytest.FixtureRequest) -> distributed.Client:
    return request.getfixturevalue(request.param)


def nothing_is_left(client: distributed.Client) -> bool:
    return not (client.cluster.scheduler.tasks or client.futures)


def test_results_come_in_order_and_arguments_are_made_in_this_process(client: distributed.Client) -> None:
    made_in = []

    def argument(k: int) -> int:
        made_in.append(os.getpid())
        return k + 1

    window = Window(double_late, range(3, 40), name="w", depth=5, scheduler=client, argument=argument)
    assert list(window) == [(k, 2 * k + 2) for k in range(3, 40)]
    assert set(made_in) == {os.getpid()}
    assert eventually(lambda: nothing_is_left(client))


def test_an_error_comes_at_its_turn_with_its_cause(client: distributed.Client) -> None:
    window = Window(fail_at_5, range(20), name="w", depth=4, scheduler=client)
    came = []
    with pytest.raises(FetchError, match="5") as caught:
        came.extend(k for k, _ in window)
    assert came == [0, 1, 2, 3, 4]
    assert isinstance(caught.value.__cause__, OSError)
    assert eventually(lambda: nothing_is_left(client))


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_window_that_is_left_early_leaves_nothing_behind(client: distributed.Client, how: str) -> None:
    window = Window(double_late, range(1000), name="w", depth=4, scheduler=client)
    next(window)
    if how == "closed":
        window.close()
    del window
    gc.collect()
    assert eventually(lambda: nothing_is_left(client))


def test_a_task_that_does_not_pickle_fails_before_the_first_fetch(two_process_client: distributed.Client) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        Window(lambda k: lock, range(3), name="w", depth=2, scheduler=two_process_client)
    assert eventually(lambda: nothing_is_left(two_process_client))


def test_inside_a_task_of_a_worker_fetches_run_on_threads(in_process_client: distributed.Client) -> None:
    def epoch() -> tuple[str, int]:
        window = Window(double, range(5), name="w", depth=2)
        return window.scheduler.kind, len(list(window))

    with in_process_client.as_current():
        assert in_process_client.submit(epoch, pure=False).result() == ("threads", 5)


def test_an_address_without_a_scheduler_is_refused() -> None:
    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}), pytest.raises(InputError, match="9"):
        resolve_scheduler("tcp://127.0.0.1:9")


def test_a_client_that_is_closed_within_an_epoch_is_a_failed_fetch() -> None:
    with distributed.Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as own:
        data = AnnData(np.eye(99, dtype=np.float32))
        batches = iter(scDataset(data, "shuffle", 2, 2, seed=0, scheduler=own, prefetch=1))
        next(batches)
        own.close()
        with pytest.raises(FetchError, match="fetch"):
            list(batches)


def test_a_closed_client_is_refused_by_the_address_of_its_cluster() -> None:
    with distributed.Client(n_workers=1, processes=False, dashboard_address=":0", set_as_default=False) as client:
        address = client.scheduler.address
    with pytest.raises(InputError, match=address):
        resolve_scheduler(client)


def test_with_an_asynchronous_active_client_fetches_run_on_threads() -> None:
    async def resolve() -> None:
        async with distributed.Client(n_workers=0, processes=False, dashboard_address=":0", asynchronous=True):
            with pytest.warns(UserWarning, match="asynchronous"):
                assert resolve_scheduler().kind == "threads"

    asyncio.run(resolve())


def test_a_forked_child_connects_to_the_cluster_anew(two_process_client: distributed.Client) -> None:
    address = two_process_client.scheduler.address

    def check() -> None:
        scheduler = resolve_scheduler(two_process_client)
        assert scheduler.client is not two_process_client
        assert resolve_scheduler(address).client is scheduler.client
        values = list(Window(double, range(9), name="w", depth=4, scheduler=two_process_client))
        assert values == [(k, 2 * k) for k in range(9)]

    assert list(Window(double, range(3), name="w", depth=2, scheduler=two_process_client))
    child = multiprocessing.get_context("fork").Process(target=check, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import threading, time\n"
        "from dasksc.executor.window import Window\n"
        "def cluster(protocol):\n"
        "    import distributed\n"
        "    return distributed.Client(n_workers=1, threads_per_worker=2, processes=False,\n"
        '                              protocol=protocol, dashboard_address=":0")\n'
        "def slow(k):\n"
        "    time.sleep(0.05)\n"
        "    return k\n"
    )
    return ended([sys.executable, "-W", "error", "-c", prelude + script])


@pytest.mark.parametrize(
    ("scheduler", "keep"),
    [
        ("'threads'", "window"),
        ("'threads'", "iterator in a generator"),
        ("cluster('inproc')", "window"),
        ("cluster('tcp')", "iterator in a generator"),
    ],
)
def test_the_interpreter_can_exit_in_the_middle_of_an_epoch(scheduler: str, keep: str) -> None:
    done = run_script(
        f"""
def loop(window):
    with window:
        yield from window
if __name__ == "__main__":
    scheduler = {scheduler}
    window = Window(slow, range(1000), name="w", depth=6, scheduler=scheduler)
    if {keep != "window"}:
        window = loop(window)
    print(next(window), next(window))
"""
    )
    if "cluster" not in scheduler:  # Dask may log that it has cancelled a fetch
        assert done.stderr == ""
    assert done.stdout == "(0, 0) (1, 1)\n"
    assert done.returncode == 0


@pytest.mark.parametrize("scheduler", ["'threads'", "cluster('inproc')"])
def test_a_thread_that_outlives_the_main_thread_gets_all_or_an_error(scheduler: str) -> None:
    # The executors of Python, and of an in-process Dask scheduler, end with the main thread.
    done = run_script(
        f"""
def consume():
    try:
        print(len(list(window)))
    except Exception as error:
        print(type(error).__name__)
if __name__ == "__main__":
    window = Window(slow, range(20), name="w", depth=2, scheduler={scheduler})
    threading.Thread(target=consume).start()
"""
    )
    assert done.stdout in ("20\n", "FetchError\n")
    assert done.returncode == 0

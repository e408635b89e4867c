"""Faults of Dask workers and schedulers: batches stay the same when workers die, join or run out of memory."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
import torch

import dasksc
from dasksc import FetchError
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.window import Window
from tests.support.dask_processes import DaskProcesses
from tests.support.data import make_adata, write_store
from tests.support.waiting import WAIT_S, eventually

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(make_adata(n_obs=1200, n_vars=40), tmp_path_factory.mktemp("atlas"), "h5ad")


def dataset(path: Path, scheduler: Any, **options: Any) -> dasksc.scDataset:
    options = {"batch_size": 10, "fetch_factor": 2, "prefetch": 4, "seed": 3} | options
    return dasksc.scDataset(path, dasksc.BlockShuffling(5), scheduler=scheduler, **options)


def epoch_of(path: Path, **options: Any) -> list[torch.Tensor]:
    return list(dataset(path, "synchronous", **options))


def identical(batches: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(batches) == len(expected) and all(
        one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        for one, other in zip(batches, expected, strict=True)
    )


OVER_TCP = {"processes": False, "protocol": "tcp"}  # workers in this process that otherwise behave like processes


def local(n_workers: int, *, processes: bool = True, **options: Any) -> distributed.LocalCluster:
    return distributed.LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=processes,
        dashboard_address=":0",
        silence_logs=logging.CRITICAL,
        **options,
    )


def watched(cluster: distributed.LocalCluster) -> list[int]:
    """Return the process IDs of the workers that have finished starting.

    A nanny does not restart a worker that dies while starting.
    """

    def started() -> list[int]:
        # The status of a nanny is "running" even while it restarts its worker.
        processes = [nanny.process for nanny in cluster.workers.values()]
        return [one.pid for one in processes if one and one.status == distributed.Status.running and one.pid]

    assert eventually(lambda: bool(started()))
    return started()


def nothing_is_left(client: distributed.Client) -> bool:
    """Return True if scheduler, workers and Client have released every task, key and future."""

    def left(dask_scheduler: Any) -> list[str]:
        return [*map(str, dask_scheduler.tasks)]

    def held(dask_worker: Any) -> list[str]:
        return [*map(str, dask_worker.data), *map(str, dask_worker.state.tasks)]

    on_workers = client.run(held, on_error="ignore").values()
    return not client.run_on_scheduler(left) and not any(on_workers) and not client.futures


def test_killed_workers_go_unnoticed(atlas: Path) -> None:
    # Seeded moments in an epoch; with batches 4 ms apart, they hit reading, sending and idle workers.
    rng = random.Random(20)
    # By default, a cluster drops workers that take longer than 15 s to restart, as they do on a busy machine.
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "5 minutes"})
    with patient, local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        expected = epoch_of(atlas)
        for _ in range(2):
            kill_at = set(rng.sample(range(len(expected)), 2))
            batches = []
            for i, batch in enumerate(dataset(atlas, client)):
                batches.append(batch)
                time.sleep(0.004 * rng.random())
                if i in kill_at:
                    os.kill(rng.choice(watched(cluster)), signal.SIGKILL)
            assert identical(batches, expected)
        assert eventually(lambda: len(client.nthreads()) == 2)
        assert eventually(lambda: nothing_is_left(client))


def test_a_cluster_without_workers_is_waited_for(atlas: Path) -> None:
    with local(0, **OVER_TCP) as cluster, distributed.Client(cluster, set_as_default=False) as client:

        def help_when_tasks_wait() -> None:
            if eventually(lambda: bool(cluster.scheduler.tasks)):
                cluster.scale(1)

        helper = threading.Thread(target=help_when_tasks_wait)
        helper.start()
        assert identical(list(dataset(atlas, client)), epoch_of(atlas))
        helper.join()


def test_a_worker_that_joins_works_too_and_goes_unnoticed(atlas: Path) -> None:
    with local(1, **OVER_TCP) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        batches = []
        for i, batch in enumerate(dataset(atlas, client, prefetch=8)):
            batches.append(batch)
            if i == 10:
                cluster.scale(2)
                client.wait_for_workers(2, timeout=WAIT_S)
        assert identical(batches, epoch_of(atlas, prefetch=8))

        def n_sent(dask_worker: Any) -> int:
            return int(dask_worker.transfer_outgoing_bytes_total)

        assert [n > 0 for n in client.run(n_sent).values()] == [True, True]
        assert eventually(lambda: nothing_is_left(client))


class Frozen:
    """Task that suspends its worker process once, while it fetches or while its result is sent."""

    def __init__(self, mark: Path, when: str) -> None:
        self.mark = mark
        self.when = when

    def __call__(self, k: int) -> Any:
        if k != 5:
            return k
        if self.when == "sending":
            return FrozenResult(self)
        self.stop()
        return k

    def stop(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            self.mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


class FrozenResult:
    """Result that suspends its worker process when it is pickled."""

    def __init__(self, task: Frozen) -> None:
        self.task = task

    def __reduce__(self) -> tuple[Any, ...]:
        self.task.stop()
        return int, (5,)


@pytest.mark.parametrize("when", ["fetching", "sending"])
def test_others_do_the_fetches_of_a_frozen_worker_after_its_time_to_live(when: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "20s"}),
        local(2) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        with Window(Frozen(mark, when), range(40), name="frozen", depth=6, scheduler=client) as window:
            assert list(window) == [(k, k) for k in range(40)]
        assert int(mark.read_text()) not in watched(cluster)
        assert eventually(lambda: nothing_is_left(client))


def test_a_rank_that_ends_abruptly_leaves_nothing_on_the_cluster(processes: DaskProcesses, atlas: Path) -> None:
    with distributed.Client(processes.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=WAIT_S)
        program = f"""
import os, dasksc, distributed
client = distributed.Client({processes.address!r})
dataset = dasksc.scDataset({str(atlas)!r}, dasksc.BlockShuffling(5), 10, 2, seed=0, scheduler=client)
for i, batch in enumerate(dataset):
    if i == 5:
        print("in the epoch", flush=True)
        os.kill(os.getpid(), 9)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=3 * WAIT_S)
        assert done.stdout == "in the epoch\n"
        assert eventually(lambda: nothing_is_left(client))


# Import finder that hides dasksc, passed to `dask worker` as a preload.
WITHOUT_DASKSC = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dasksc":
            raise ModuleNotFoundError("No module named 'dasksc'", name="dasksc")

sys.meta_path.insert(0, Finder())
"""


def test_a_worker_without_dasksc_is_named(processes: DaskProcesses, atlas: Path, tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT_DASKSC)
    with distributed.Client(processes.address, set_as_default=False) as client:
        processes.start_worker("--preload", str(tmp_path / "without.py"))
        client.wait_for_workers(2, timeout=WAIT_S)
        with pytest.raises(FetchError, match="cannot import dasksc"):
            list(dataset(atlas, client))
        assert eventually(lambda: nothing_is_left(client))


def test_tasks_that_a_restart_drops_are_reported(atlas: Path) -> None:
    with local(1, **OVER_TCP) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        batches = iter(dataset(atlas, client))
        next(batches)
        client.restart(wait_for_workers=False)
        with pytest.raises(FetchError, match="restart"):
            list(batches)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[DaskProcesses]:
    with DaskProcesses(tmp_path) as processes:
        processes.start_scheduler()
        processes.start_worker()
        yield processes
        window_schedulers._close_clients()


def read_until_lost(
    data: dasksc.scDataset, lose: Callable[[], None]
) -> tuple[list[torch.Tensor], dasksc.FetchError | None]:
    """Return the batches before an error, and the error."""
    batches = []
    try:
        for i, batch in enumerate(data):
            batches.append(batch)
            if i == 30:
                lose()
    except dasksc.FetchError as error:
        return batches, error
    return batches, None


def test_a_lost_scheduler_is_named_and_another_resumes_the_epoch(
    processes: DaskProcesses, atlas: Path, two_process_client: distributed.Client
) -> None:
    data = dataset(atlas, processes.address)
    batches, error = read_until_lost(data, processes.scheduler.kill)
    assert processes.address in str(error)
    resumed = dataset(atlas, two_process_client)
    resumed.load_state_dict(data.state_dict())
    batches += resumed
    assert identical(batches, epoch_of(atlas))


def test_a_scheduler_that_restarts_ends_the_epoch_and_serves_the_next(processes: DaskProcesses, atlas: Path) -> None:
    data = dataset(atlas, processes.address)

    def restart() -> None:
        processes.scheduler.kill()
        processes.scheduler.wait()
        processes.start_scheduler()
        processes.start_worker()

    batches, error = read_until_lost(data, restart)
    assert processes.address in str(error)
    resumed = dataset(atlas, processes.address)
    resumed.load_state_dict(data.state_dict())
    batches += resumed
    assert identical(batches, epoch_of(atlas))

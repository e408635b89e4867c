"""Faults of Dask workers and schedulers: batches stay the same when workers die, join or run out of memory."""

from __future__ import annotations

import asyncio
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

import anndata as ad
import dask
import distributed
import numpy as np
import psutil
import pytest
import scipy.sparse as sp
import torch

import dasksc
from dasksc import FetchError
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.window import Window
from tests.support.dask_processes import DaskProcesses
from tests.support.data import make_adata, write_store
from tests.support.programs import PROGRAMS, TORCHRUN, run

pytestmark = pytest.mark.faults

WAIT_S = 60.0  # timeout of events that must happen soon; only a failing test waits this long


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


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
    """Return True if scheduler, workers and Client have released every task, key, future and plugin."""

    def left(dask_scheduler: Any) -> list[str]:
        return [*map(str, dask_scheduler.tasks), *(set(dask_scheduler.worker_plugins) - {"shuffle"})]

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
def test_others_do_the_fetches_of_a_frozen_worker(when: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        with Window(Frozen(mark, when), range(40), name="frozen", depth=6, scheduler=client) as window:
            assert list(window) == [(k, k) for k in range(40)]
        worker = psutil.Process(int(mark.read_text()))
        assert worker.status() == psutil.STATUS_STOPPED
        worker.resume()
        assert eventually(lambda: nothing_is_left(client))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    n_obs, n_in_row = 27_000, 3_500
    indptr = np.arange(n_obs + 1) * n_in_row
    indices = np.tile(np.arange(0, 2 * n_in_row, 2, dtype=np.int32), n_obs)
    values = np.tile(np.linspace(0, 1, n_in_row, dtype=np.float32), n_obs)
    path = tmp_path_factory.mktemp("large") / "large.h5ad"
    ad.AnnData(sp.csr_matrix((values, indices, indptr), shape=(n_obs, 2 * n_in_row))).write_h5ad(path)
    yield path
    path.unlink()


def test_one_shot_batches_stay_below_a_workers_limit_and_are_never_spilled(large: Path) -> None:
    limit = 700 * 2**20
    # Mapped pages count toward a process's memory, and each worker maps the whole file.
    assert large.stat().st_size > limit

    def peak(dask_worker: Any) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (high,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
        return high

    def n_spilled(dask_worker: Any) -> float:
        return dask_worker.data.cumulative_metrics["disk-write", "count"]

    with local(2, memory_limit=limit) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        pids = set(client.run(os.getpid).values())
        data = dasksc.scDataset(
            large,
            dasksc.BlockShuffling(64),
            batch_size=64,
            fetch_factor=64,
            layout="csr",
            scheduler=client,
            prefetch=12,
            seed=0,
        )
        with busy(client):  # results accumulate on the workers
            n_values = sum(len(batch.values()) for _ in range(3) for batch in data)
        assert 6 * n_values > 2 * limit  # the bytes sent exceed the memory limits of both workers
        assert sum(client.run(n_spilled).values()) == 0
        assert max(client.run(peak).values()) < limit
        assert set(client.run(os.getpid).values()) == pids  # no nanny killed a worker
        assert eventually(lambda: nothing_is_left(client))


@contextlib.contextmanager
def busy(client: distributed.Client) -> Iterator[None]:
    """Make the Client receive results only occasionally."""
    done = threading.Event()

    async def stall() -> None:
        while not done.is_set():
            time.sleep(0.1)
            await asyncio.sleep(0.02)

    stalling = asyncio.run_coroutine_threadsafe(stall(), client.loop.asyncio_loop)
    try:
        yield
    finally:
        done.set()
        stalling.result()


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


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_scheduler_is_named_and_another_resumes_the_epoch(
    processes: DaskProcesses, atlas: Path, two_process_client: distributed.Client, how: str
) -> None:
    number = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[how]
    with dask.config.set({"dasksc.scheduler-timeout": "4s", "distributed.comm.timeouts.connect": "2s"}):
        data = dataset(atlas, processes.address)
        batches, error = read_until_lost(data, lambda: os.kill(processes.scheduler.pid, number))
        assert processes.address in str(error)
        state = data.state_dict()
        resumed = dataset(atlas, two_process_client)
        resumed.load_state_dict(state)
        batches += resumed
        assert identical(batches, epoch_of(atlas))
        processes.scheduler.send_signal(signal.SIGCONT)


def test_ranks_that_torchrun_restarts_share_a_new_cluster(tmp_path: Path) -> None:
    """The store of torchrun's agent outlives the ranks and still holds the address of a scheduler that has ended."""
    path = write_store(make_adata(n_obs=101), tmp_path, "h5ad")
    program = [PROGRAMS / "restarted_cluster.py", path, tmp_path]
    run([*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=2", *program], is_preloaded=True)
    ranks = [(tmp_path / f"read-2-{rank}").read_text().split() for rank in range(2)]
    assert len({address for _, address in ranks}) == 1
    assert sum(int(n_rows) for n_rows, _ in ranks) >= 101


def status_of(dask_worker: Any) -> str:
    return str(dask_worker.status.name)


def test_a_worker_at_its_memory_limit_goes_unnoticed(atlas: Path) -> None:
    limit = 2**31
    memory = {
        "monitor-interval": "20ms",
        "pause": 0.5,
        "terminate": False,
    }  # another test covers termination by a nanny
    with (
        dask.config.set({f"distributed.worker.memory.{name}": value for name, value in memory.items()}),
        local(2, memory_limit=limit) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        full, free = client.nthreads()
        expected = epoch_of(atlas)
        assert identical(list(dataset(atlas, client)), expected)  # compiles the kernels in advance

        def fill(dask_worker: Any) -> None:
            # Dask cannot spill this array, so the worker can only pause.
            dask_worker.ballast = np.ones(int(0.6 * limit) - dask_worker.monitor.proc.memory_info().rss, np.uint8)

        batches = []
        for i, batch in enumerate(dataset(atlas, client)):
            batches.append(batch)
            if i == 20:
                client.run(fill, workers=[full])
                assert eventually(lambda: client.run(status_of) == {full: "paused", free: "running"})
        assert identical(batches, expected)
        assert client.run(status_of) == {full: "paused", free: "running"}

"""Workers that die, join or run full, and schedulers that are lost: what the batches notice of it."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import dask
import distributed
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from dask_processes import DaskProcesses
from data import make_adata, write_store

import dasksc
from dasksc.window import schedulers as window_schedulers

WAIT_S = 30.0  # for what must happen soon; only a failing test waits so long


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


def local(n_workers: int, **options: Any) -> distributed.LocalCluster:
    return distributed.LocalCluster(
        n_workers=n_workers,
        threads_per_worker=1,
        processes=True,
        dashboard_address=":0",
        silence_logs=logging.CRITICAL,
        **options,
    )


def nothing_is_left(client: distributed.Client) -> bool:
    """Whether scheduler, workers and Client have forgotten every task, key, future and plugin."""

    def left(dask_scheduler: Any) -> list[str]:
        return [*map(str, dask_scheduler.tasks), *(set(dask_scheduler.worker_plugins) - {"shuffle"})]

    def held(dask_worker: Any) -> list[str]:
        return [*map(str, dask_worker.data), *map(str, dask_worker.state.tasks)]

    on_workers = client.run(held, on_error="ignore").values()
    return not client.run_on_scheduler(left) and not any(on_workers) and not client.futures


# Workers


def test_ten_killed_workers_go_unnoticed(atlas: Path) -> None:
    # Ten seeded moments in an epoch; with batches 4 ms apart they hit workers reading, sending and idle.
    rng = random.Random(20)
    with local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        expected = epoch_of(atlas)
        n_killed = 0
        while n_killed < 10:
            kill_at = set(rng.sample(range(len(expected)), 2))
            batches = []
            for i, batch in enumerate(dataset(atlas, client)):
                batches.append(batch)
                time.sleep(0.004 * rng.random())
                if i in kill_at and n_killed < 10:
                    alive = client.run(os.getpid, on_error="ignore")
                    os.kill(rng.choice(sorted(alive.values())), signal.SIGKILL)
                    n_killed += 1
            assert identical(batches, expected)
        assert eventually(lambda: len(client.nthreads()) == 2)
        assert eventually(lambda: nothing_is_left(client))


def test_a_worker_that_joins_works_too_and_goes_unnoticed(atlas: Path) -> None:
    with local(1) as cluster, distributed.Client(cluster, set_as_default=False) as client:
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


def status_of(dask_worker: Any) -> str:
    return str(dask_worker.status.name)


def test_a_worker_at_its_memory_limit_goes_unnoticed(atlas: Path) -> None:
    limit = 2**31
    memory = {"monitor-interval": "20ms", "pause": 0.5, "terminate": False}  # that a nanny ends it is another test
    with (
        dask.config.set({f"distributed.worker.memory.{name}": value for name, value in memory.items()}),
        local(2, memory_limit=limit) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        full, free = client.nthreads()
        expected = epoch_of(atlas)
        assert identical(list(dataset(atlas, client)), expected)  # compiles: what that takes is not to come on top

        def fill(dask_worker: Any) -> None:
            # Not Dask's to spill: the worker can but stop.
            dask_worker.ballast = np.ones(int(0.6 * limit) - dask_worker.monitor.proc.memory_info().rss, np.uint8)

        batches = []
        for i, batch in enumerate(dataset(atlas, client)):
            batches.append(batch)
            if i == 20:
                client.run(fill, workers=[full])
                assert eventually(lambda: client.run(status_of) == {full: "paused", free: "running"})
        assert identical(batches, expected)
        assert client.run(status_of) == {full: "paused", free: "running"}


def test_one_shot_batches_stay_below_a_workers_limit_and_are_never_spilled(tmp_path: Path) -> None:
    n_obs, n_vars, limit = 20_000, 10_000, 600 * 2**20
    values = sp.random(n_obs, n_vars, density=0.1, format="csr", dtype=np.float32, rng=np.random.default_rng(0))
    path = tmp_path / "large.h5ad"
    ad.AnnData(values).write_h5ad(path)

    def peak(dask_worker: Any) -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        (high,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
        return high, len(getattr(dask_worker.data, "disk", ()))

    with local(2, memory_limit=limit) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        pids = set(client.run(os.getpid).values())
        # Not mapped: mapped pages count as a process's, as long as the machine has no other use for them.
        data = dasksc.scDataset(
            path,
            dasksc.BlockShuffling(64),
            batch_size=64,
            fetch_factor=32,
            layout="csr",
            scheduler=client,
            mmap=False,
            seed=0,
        )
        n_values = n_spilled = 0
        for _ in range(11):
            for batch in data:
                n_values += len(batch.values())
            n_spilled += sum(n for _, n in client.run(peak).values())
        assert 6 * n_values > 2 * limit  # what was sent: more than both workers may hold
        assert n_spilled == 0
        assert max(high for high, _ in client.run(peak).values()) < limit
        assert set(client.run(os.getpid).values()) == pids  # no nanny had to end one
        assert eventually(lambda: nothing_is_left(client))


@pytest.mark.parametrize("ends", ["epoch", "break"])
def test_nothing_is_left_on_scheduler_and_workers(atlas: Path, ends: str) -> None:
    with local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        for i, _ in enumerate(dataset(atlas, client)):
            if ends == "break" and i == 30:
                break
        assert eventually(lambda: nothing_is_left(client))


# Schedulers


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[DaskProcesses]:
    with DaskProcesses(tmp_path) as processes:
        processes.start_scheduler()
        processes.start_worker()
        yield processes
        window_schedulers._close_clients()


def read_until_lost(
    data: dasksc.scDataset, lose: Callable[[], None]
) -> tuple[list[torch.Tensor], dasksc.FetchError | None, float]:
    """Batches until an error, that error, and the seconds it took."""
    batches, start = [], math.inf
    try:
        for i, batch in enumerate(data):
            batches.append(batch)
            if i == 30:
                lose()
                start = time.monotonic()
    except dasksc.FetchError as error:
        return batches, error, time.monotonic() - start
    return batches, None, time.monotonic() - start


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_scheduler_is_named_in_time_and_another_goes_on(
    processes: DaskProcesses, atlas: Path, tmp_path: Path, how: str
) -> None:
    timeout_s = 4.0
    number = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[how]
    with dask.config.set({"dasksc.scheduler-timeout": timeout_s, "distributed.comm.timeouts.connect": "2s"}):
        data = dataset(atlas, processes.address)
        batches, error, took_s = read_until_lost(data, lambda: os.kill(processes.scheduler.pid, number))
        assert took_s < timeout_s + 2
        assert processes.address in str(error)
        assert "load_state_dict" in str(error)
        state = data.state_dict()
        with local(1) as cluster, distributed.Client(cluster, set_as_default=False) as client:
            resumed = dataset(atlas, client)
            resumed.load_state_dict(state)
            batches += resumed
        assert identical(batches, epoch_of(atlas))
        processes.scheduler.send_signal(signal.SIGCONT)


def test_a_scheduler_that_restarts_is_an_error_and_then_goes_on(processes: DaskProcesses, atlas: Path) -> None:
    data = dataset(atlas, processes.address)

    def restart() -> None:
        processes.scheduler.kill()
        processes.scheduler.wait()
        processes.start_scheduler()
        processes.start_worker()

    batches, error, took_s = read_until_lost(data, restart)
    assert processes.address in str(error)
    assert took_s < 30
    data.load_state_dict(data.state_dict())
    batches += data  # at the same address
    assert identical(batches, epoch_of(atlas))

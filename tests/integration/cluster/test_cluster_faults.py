"""Faults of Dask workers and schedulers: batches stay the same when workers die; other faults are named."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
import torch

import dasksc
from dasksc import FetchError
from dasksc.executor import schedulers as window_schedulers
from tests.support.data import make_adata, write_store
from tests.support.waiting import WAIT_S, eventually

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(make_adata(n_obs=1200, n_vars=40), tmp_path_factory.mktemp("atlas"), "h5ad")


def dataset(path: Path, scheduler: Any) -> dasksc.scDataset:
    return dasksc.scDataset(path, dasksc.BlockShuffling(5), 10, 2, prefetch=4, seed=3, scheduler=scheduler)


def values(batches: Iterable[torch.Tensor]) -> list[list[list[float]]]:
    return [batch.tolist() for batch in batches]


def local(n_workers: int, **options: Any) -> distributed.LocalCluster:
    return distributed.LocalCluster(
        n_workers=n_workers, threads_per_worker=1, dashboard_address=":0", silence_logs=logging.CRITICAL, **options
    )


def watched(cluster: distributed.LocalCluster) -> list[int]:
    """Return the process IDs of the workers that have finished starting."""
    # A nanny does not restart a worker that dies while starting.

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
        expected = values(dataset(atlas, "synchronous"))
        for _ in range(2):
            kill_at = set(rng.sample(range(len(expected)), 2))
            batches = []
            for i, batch in enumerate(dataset(atlas, client)):
                batches.append(batch)
                time.sleep(0.004 * rng.random())
                if i in kill_at:
                    os.kill(rng.choice(watched(cluster)), signal.SIGKILL)
            assert values(batches) == expected
        assert eventually(lambda: len(client.nthreads()) == 2)
        assert eventually(lambda: nothing_is_left(client))


def test_others_do_the_fetches_of_a_frozen_worker_after_its_time_to_live(atlas: Path) -> None:
    short = dask.config.set({"distributed.scheduler.worker-ttl": "10s"})
    with short, local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        batches, frozen = [], 0
        for i, batch in enumerate(dataset(atlas, client)):
            batches.append(batch)
            if i == 10:
                frozen = watched(cluster)[0]
                os.kill(frozen, signal.SIGSTOP)
        assert values(batches) == values(dataset(atlas, "synchronous"))
        assert eventually(lambda: frozen not in watched(cluster))
        assert eventually(lambda: nothing_is_left(client))


def test_a_worker_that_joins_works_too_and_goes_unnoticed(atlas: Path) -> None:
    with local(1) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        batches = []
        for i, batch in enumerate(dataset(atlas, client)):
            batches.append(batch)
            if i == 10:
                cluster.scale(2)
                client.wait_for_workers(2, timeout=WAIT_S)
        assert values(batches) == values(dataset(atlas, "synchronous"))
        assert all(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total > 0).values())
        assert eventually(lambda: nothing_is_left(client))


class DaskProcesses:
    """Scheduler and worker processes that end with this context and write their logs to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "scheduler.json"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.scheduler = self._start("scheduler", "--port", "0")
        assert eventually(lambda: self.file.exists() and self.file.read_text()), (folder / "log").read_text()
        self.address = json.loads(self.file.read_text())["address"]

    def start_worker(self, *options: str) -> None:
        self.workers.append(self._start("worker", "--nthreads", "1", "--no-nanny", *options))

    def _start(self, kind: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", kind, "--scheduler-file", str(self.file), "--no-dashboard"]
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [*command, "--host", "127.0.0.1", *options],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> DaskProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.workers, self.scheduler]:
            process.kill()
            process.wait(timeout=30)


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
    with local(1, processes=False) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        batches = iter(dataset(atlas, client))
        next(batches)
        client.restart(wait_for_workers=False)
        with pytest.raises(FetchError, match="restart"):
            list(batches)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[DaskProcesses]:
    with DaskProcesses(tmp_path) as processes:
        processes.start_worker()
        yield processes
        window_schedulers._close_clients()


def test_a_lost_scheduler_is_named_and_another_resumes_the_epoch(
    processes: DaskProcesses, atlas: Path, two_process_client: distributed.Client
) -> None:
    data = dataset(atlas, processes.address)

    def batches_until_lost() -> Iterator[torch.Tensor]:
        for i, batch in enumerate(data):
            yield batch
            if i == 30:
                processes.scheduler.kill()

    batches: list[torch.Tensor] = []
    with pytest.raises(FetchError, match=processes.address):
        batches.extend(batches_until_lost())
    resumed = dataset(atlas, two_process_client)
    resumed.load_state_dict(data.state_dict())
    batches += resumed
    assert values(batches) == values(dataset(atlas, "synchronous"))

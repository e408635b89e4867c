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
import pytest
import scipy.sparse as sp
import torch

import dasksc
from dasksc import FetchError
from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.cluster import heartbeats, runner
from dasksc.executor.cluster import resubmission as sent_fetches
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


# Workers


@pytest.mark.timeout(600)  # starts ten processes, which takes long on a busy machine
def test_ten_killed_workers_go_unnoticed(atlas: Path) -> None:
    # Ten seeded moments in an epoch; with batches 4 ms apart, they hit reading, sending and idle workers.
    rng = random.Random(20)
    # By default, a cluster drops workers that take longer than 15 s to restart, as they do on a busy machine.
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "5 minutes"})
    with patient, local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        expected = epoch_of(atlas)
        n_killed = 0
        while n_killed < 10:
            kill_at = set(rng.sample(range(len(expected)), 2))
            batches = []
            for i, batch in enumerate(dataset(atlas, client)):
                batches.append(batch)
                time.sleep(0.004 * rng.random())
                if i in kill_at and n_killed < 10:
                    os.kill(rng.choice(watched(cluster)), signal.SIGKILL)
                    n_killed += 1
            assert identical(batches, expected)
        assert eventually(lambda: len(client.nthreads()) == 2)
        assert eventually(lambda: nothing_is_left(client))


def test_a_cluster_without_workers_is_told_and_waited_for(atlas: Path, caplog: pytest.LogCaptureFixture) -> None:
    with local(0, **OVER_TCP) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        message = "Fetch 0 waits: the Dask cluster at tcp://"

        def help_when_told() -> None:
            if eventually(lambda: message in caplog.text):
                cluster.scale(1)

        helper = threading.Thread(target=help_when_told)
        helper.start()
        assert identical(list(dataset(atlas, client)), epoch_of(atlas))
        helper.join()
    assert caplog.text.count(message) == 1


@pytest.mark.parametrize("protocol", ["tcp", "inproc"])
def test_workers_that_are_all_paused_are_told_and_waited_for(
    protocol: str, atlas: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = "has no running workers (1 paused at the memory limit)"

    def pause(dask_worker: Any, is_paused: bool) -> None:
        dask_worker.status = distributed.Status.paused if is_paused else distributed.Status.running

    memory = {"monitor-interval": "1h", "terminate": False}
    with (
        dask.config.set({f"distributed.worker.memory.{name}": value for name, value in memory.items()}),
        local(1, processes=False, protocol=protocol) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.run(pause, is_paused=True)

        def help_when_told() -> None:
            if eventually(lambda: message in caplog.text):
                client.run(pause, is_paused=False)

        helper = threading.Thread(target=help_when_told)
        helper.start()
        assert identical(list(dataset(atlas, client)), epoch_of(atlas))
        helper.join()
    assert caplog.text.count(message) == 1


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


def test_a_worker_that_its_nanny_ends_goes_unnoticed(atlas: Path) -> None:
    limit = 2**31
    memory = {"monitor-interval": "20ms", "spill": False, "pause": False, "terminate": 0.5}
    with (
        dask.config.set({f"distributed.worker.memory.{name}": value for name, value in memory.items()}),
        local(2, memory_limit=limit) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        expected = epoch_of(atlas)
        assert identical(list(dataset(atlas, client)), expected)
        pids = set(watched(cluster))

        def fill(dask_worker: Any) -> None:
            dask_worker.ballast = np.ones(int(0.6 * limit), np.uint8)

        batches = []
        for i, batch in enumerate(dataset(atlas, client)):
            batches.append(batch)
            if i == 20:
                client.run(fill, workers=[min(client.nthreads())], on_error="ignore")
                assert eventually(lambda: len(pids & set(watched(cluster))) == 1)
        assert identical(batches, expected)


class Frozen:
    """Task that suspends its worker process once, while the task runs or while its result is pickled."""

    def __init__(self, mark: Path, k: int, when: str, number: int) -> None:
        self.mark = mark
        self.k = k
        self.when = when
        self.number = number

    def __call__(self, k: int) -> Any:
        if k == self.k and self.when == "fetching":
            self.stop()
        return Frozen(self.mark, k, "sending", k) if k == self.k and self.when == "sending" else k

    def __reduce__(self) -> tuple[Any, ...]:
        if self.number == self.k:  # a result in transit
            self.stop()
            return int, (self.k,)
        return Frozen, (self.mark, self.k, self.when, self.number)

    def stop(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            self.mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


def thaw(mark: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(mark.read_text()), signal.SIGCONT)


@pytest.mark.parametrize("when", ["fetching", "sending"])
def test_a_frozen_worker_is_named_and_others_do_its_fetches(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    with local(2) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        pids = client.run(os.getpid)
        gave_up = threading.Timer(WAIT_S, thaw, [mark])
        gave_up.start()
        with Window(Frozen(mark, 5, when, -1), range(40), name="frozen", depth=6, scheduler=client) as window:
            assert list(window) == [(k, k) for k in range(40)]
        assert gave_up.is_alive()  # the worker was still frozen
        gave_up.cancel()
        (address,) = [address for address, pid in pids.items() if pid == int(mark.read_text())]
        assert caplog.text.count(f"waits: the Dask worker at {address} has sent no heartbeat for") == 1
        assert caplog.text.count("sent no heartbeat") == 1
        thaw(mark)
        assert eventually(lambda: nothing_is_left(client))


def test_a_frozen_worker_without_others_is_named_and_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    message = "sent no heartbeat for"
    with local(1) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        was_told = []

        def thaw_when_told() -> None:
            was_told.append(eventually(lambda: message in caplog.text))
            thaw(mark)

        helper = threading.Thread(target=thaw_when_told)
        helper.start()
        with Window(Frozen(mark, 5, "fetching", -1), range(10), name="frozen", depth=4, scheduler=client) as window:
            assert list(window) == [(k, k) for k in range(10)]
        helper.join()
        assert was_told == [True]
        assert "No other worker is running" in caplog.text
        assert eventually(lambda: nothing_is_left(client))
    assert caplog.text.count(message) == 1


class Slow:
    """Task whose first fetch takes longer than the time after which a worker without heartbeats counts as silent."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, k: int) -> int:
        if k == 0:
            with self.mark.open("a") as file:
                file.write("began ")
            time.sleep(heartbeats._SILENT_S + 2)
        return k


def test_a_worker_that_is_slow_is_not_taken_for_frozen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (runner, sent_fetches):
        monkeypatch.setattr(module, "STUCK_S", 0.2)
    mark = tmp_path / "mark"
    with (
        local(2, **OVER_TCP) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        Window(Slow(mark), range(4), name="slow", depth=2, scheduler=client) as window,
    ):
        assert list(window) == [(k, k) for k in range(4)]
    assert mark.read_text() == "began "
    assert "sent no heartbeat" not in caplog.text


def test_silence_is_measured_by_the_clock_of_the_scheduler() -> None:
    start = time.perf_counter()
    early = 1e9  # the scheduler's clock is years behind

    def heard(**seconds: float) -> dict[str, dict[str, float]]:
        return {address: {"last_seen": early + at} for address, at in seconds.items()}

    known = heartbeats.Heartbeats()
    assert known.silent({}, requested_at=start) == {}
    assert known.silent(heard(a=0, b=4), requested_at=start) == {}
    assert known.silent(heard(a=0, b=7), requested_at=start) == {"a": 7}
    assert known.silent(heard(a=8, b=8), requested_at=start) == {}
    # The scheduler answers an old request late, so the silence must not be attributed to the workers.
    assert known.silent(heard(a=8, b=8), requested_at=start) == {}
    assert known.silent(heard(a=8, b=8), requested_at=time.perf_counter() + 6).keys() == {"a", "b"}
    # In large clusters, workers send heartbeats less often.
    many = {str(i): {"last_seen": early + 20} for i in range(1000)} | heard(late=0)
    assert known.silent(many, requested_at=start) == {}


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


@pytest.mark.parametrize("mmap", [True, False])
def test_one_shot_batches_stay_below_a_workers_limit_and_are_never_spilled(mmap: bool, large: Path) -> None:
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
            mmap=mmap,
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


@pytest.mark.parametrize("ends", ["epoch", "break"])
def test_nothing_is_left_on_scheduler_and_workers(
    atlas: Path, ends: str, two_process_client: distributed.Client
) -> None:
    for i, _ in enumerate(dataset(atlas, two_process_client)):
        if ends == "break" and i == 30:
            break
    assert eventually(lambda: nothing_is_left(two_process_client))


# Schedulers


def test_a_rank_that_ends_abruptly_leaves_nothing_on_the_cluster(processes: DaskProcesses, atlas: Path) -> None:
    with distributed.Client(processes.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=WAIT_S)
        for end in ("os.kill(os.getpid(), 9)", "client.close()"):
            program = f"""
import os, dasksc, distributed
client = distributed.Client({processes.address!r})
dataset = dasksc.scDataset({str(atlas)!r}, dasksc.BlockShuffling(5), 10, 2, seed=0, scheduler=client)
for i, batch in enumerate(dataset):
    if i == 5:
        print("in the epoch", flush=True)
        {end}
"""
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=3 * WAIT_S)
            assert done.returncode != 0
            assert done.stdout == "in the epoch\n"
            assert eventually(lambda: nothing_is_left(client))
            on_workers = client.run(lambda dask_worker: list(dask_worker.plugins))
            assert all(not name.startswith("dasksc") for names in on_workers.values() for name in names)
            on_scheduler = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
            assert not [name for name in on_scheduler if name.startswith("dasksc-Client")]


# Import finder that hides dasksc, passed to `dask worker` as a preload.
WITHOUT_DASKSC = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dasksc":
            raise ModuleNotFoundError("No module named 'dasksc'", name="dasksc")

sys.meta_path.insert(0, Finder())
"""


def test_a_worker_without_dasksc_is_named_and_others_work(atlas: Path, tmp_path: Path) -> None:
    (tmp_path / "without.py").write_text(WITHOUT_DASKSC)
    preload = ("--preload", str(tmp_path / "without.py"))
    expected = epoch_of(atlas)
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(DaskProcesses(tmp_path))
        processes.start_scheduler()
        processes.start_worker()
        client = stack.enter_context(distributed.Client(processes.address, set_as_default=False))
        client.wait_for_workers(1, timeout=WAIT_S)
        assert identical(list(dataset(atlas, client)), expected)
        without = processes.start_worker(*preload)
        client.wait_for_workers(2, timeout=WAIT_S)
        with pytest.raises(FetchError, match=r"The worker at tcp://\S+ .* cannot import dasksc .*Install the same"):
            list(dataset(atlas, client))
        assert eventually(lambda: nothing_is_left(client))
        without.terminate()
        assert eventually(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1)
        # A worker without dasksc can join during an epoch, since it may serve other purposes. Dask removes such a
        # worker once it receives a fetch.
        batches = iter(dataset(atlas, client, prefetch=1))
        first = next(batches)
        processes.start_worker(*preload)
        client.wait_for_workers(2, timeout=WAIT_S)
        assert identical([first, *batches], expected)


def test_tasks_that_a_restart_drops_are_reported(atlas: Path) -> None:
    with local(1, **OVER_TCP) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        batches = iter(dataset(atlas, client))
        next(batches)
        client.restart(wait_for_workers=False)
        with pytest.raises(FetchError, match=r"has dropped the tasks: client.restart\(\) was called"):
            list(batches)


def test_a_restart_leaves_nothing_that_was_sent_meanwhile(tmp_path: Path) -> None:
    with local(1, processes=False) as cluster, distributed.Client(cluster, set_as_default=False) as client:
        window = Window(int, range(10), name="restarted", depth=2, scheduler=client)
        assert eventually(window.next_is_done)
        has_restarted, has_sent = threading.Event(), threading.Event()
        forget = client._stream_handlers["restart"]

        def forget_late(**message: Any) -> None:
            has_restarted.set()
            assert has_sent.wait(WAIT_S)
            forget(**message)

        client._stream_handlers["restart"] = forget_late
        restarting = threading.Thread(target=client.restart, kwargs={"wait_for_workers": False})
        restarting.start()
        assert has_restarted.wait(WAIT_S)
        assert next(window) == (0, 0)  # sends fetch 2
        has_sent.set()
        with pytest.raises(FetchError, match="scheduler-restart"):
            list(window)
        restarting.join()
        assert eventually(lambda: nothing_is_left(client))


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
        assert "load_state_dict" in str(error)
        assert how == "killed" or "has not answered for 4 s" in str(error)
        state = data.state_dict()
        resumed = dataset(atlas, two_process_client)
        resumed.load_state_dict(state)
        batches += resumed
        assert identical(batches, epoch_of(atlas))
        processes.scheduler.send_signal(signal.SIGCONT)


def test_a_scheduler_that_restarts_raises_an_error_and_can_be_used_again(processes: DaskProcesses, atlas: Path) -> None:
    data = dataset(atlas, processes.address)

    def restart() -> None:
        processes.scheduler.kill()
        processes.scheduler.wait()
        processes.start_scheduler()
        processes.start_worker()

    batches, error = read_until_lost(data, restart)
    assert processes.address in str(error)
    data.load_state_dict(data.state_dict())
    batches += data  # at the same address
    assert identical(batches, epoch_of(atlas))


def test_ranks_that_torchrun_restarts_share_a_new_cluster(tmp_path: Path) -> None:
    """The store of torchrun's agent outlives the ranks and still holds the address of a scheduler that has ended."""
    path = write_store(make_adata(n_obs=101), tmp_path, "h5ad")
    program = [PROGRAMS / "restarted_cluster.py", path, tmp_path]
    run([*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=2", *program], is_preloaded=True)
    ranks = [(tmp_path / f"read-2-{rank}").read_text().split() for rank in range(2)]
    assert len({address for _, address in ranks}) == 1
    assert sum(int(n_rows) for n_rows, _ in ranks) >= 101

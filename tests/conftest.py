"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask
import pytest
from hypothesis import HealthCheck, settings
from make_atlas import make_atlas

from dasksc import pushdown as lazy
from tests.support import data
from tests.support.data import FORMATS, LAYOUTS, make_adata, write_store
from tests.support.servers import Bucket, HTTPServer, s3_endpoint, serving

if TYPE_CHECKING:
    import distributed

pytest_plugins = ["tests.support.core_rules"]

TIERS = {"core", "programs", "faults"}

# The duration of an example depends more on the machine than on the code. `make test` tries a few examples and
# `make test-faults` more (--hypothesis-profile=thorough). Both are deterministic, so that a failure is due to a change.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=10, derandomize=True, **COMMON)
settings.register_profile("thorough", max_examples=30, derandomize=True, **COMMON)
settings.load_profile("fast")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell makes background processes ignore Ctrl-C, and the programs started by tests would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules of other tiers: importing a trainer takes longer than running many tests."""
    if config.option.markexpr not in TIERS or not collection_path.name.startswith("test_"):
        return None
    declared = re.search(r"^pytestmark = .*?pytest\.mark\.(\w+)", collection_path.read_text(), re.MULTILINE | re.DOTALL)
    return True if declared is not None and declared[1] in TIERS - {config.option.markexpr} else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise an error for modules that do not declare exactly one tier; run each core module in one process."""
    for item in items:
        declared = [mark.name for mark in item.iter_markers() if mark.name in TIERS]
        if len(declared) != 1:
            raise pytest.UsageError(
                f"{item.nodeid} is in the tiers {declared}; its module must declare one: "
                f"pytestmark = pytest.mark.<{'|'.join(sorted(TIERS))}>"
            )
        # If the tests of a module were distributed one by one, every process would create its fixtures and compile
        # the same kernels. Other tiers have few tests, and each takes long.
        if declared == ["core"] and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """After each test, restore Dask's configuration and the record of warnings that are shown only once."""
    warned = set(lazy._warned)
    with dask.config.set():
        yield
    lazy._warned.clear()
    lazy._warned.update(warned)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread: more threads are slower for small matrices and change the order of summation."""
    import torch

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all pytest workers of a session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _stores_of_the_session(shared_folder: Path) -> None:
    """Share the stores that `write_store` writes among all pytest workers."""
    data.session_folder = shared_folder


@pytest.fixture(scope="session")
def atlas_of(shared_folder: Path) -> Callable[..., Path]:
    """Return a form of `make_atlas` that chooses the path and writes each atlas once per session, for all workers."""

    @cache
    def made(*args: int, **options: int) -> Path:
        name = "-".join(map(str, [*args, *(f"{key}{value}" for key, value in sorted(options.items()))]))
        path, mine = shared_folder / f"atlas-{name}.h5ad", shared_folder / f"atlas-{name}.{os.getpid()}.h5ad"
        if not path.exists():
            make_atlas(mine, *args, **options)
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)  # a rename would replace the file of another worker, which a test may be reading
            mine.unlink()
        return path

    return made


LOOPBACK = {"dashboard_address": "127.0.0.1:0", "worker_dashboard_address": "127.0.0.1:0"}
# Clusters of a session are mostly idle. Monitoring at Dask's default interval would take a seventh of a core.
IDLE = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.monitor-interval": "1s",
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}


@contextlib.contextmanager
def _cluster(**options: Any) -> Iterator[distributed.LocalCluster]:
    # Importing distributed before the tests would hide its log records from caplog.
    import distributed

    with dask.config.set(IDLE):
        cluster = distributed.LocalCluster(**options, **LOOPBACK)
    with cluster:
        yield cluster


@pytest.fixture(scope="session")
def in_process_cluster() -> Iterator[distributed.LocalCluster]:
    """Start a Dask cluster whose worker has four threads in this process."""
    # No memory limit: this process also holds the memory of the tests, which must not pause the worker.
    with _cluster(n_workers=1, threads_per_worker=4, processes=False, memory_limit=0) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def two_process_cluster() -> Iterator[distributed.LocalCluster]:
    """Start a Dask cluster of two workers, each a process with one thread."""
    with _cluster(n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1") as cluster:
        yield cluster


@pytest.fixture
def in_process_client(in_process_cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    """Return a Client of the shared in-process cluster for one test; `as_current()` makes it the active one."""
    with _client_of(in_process_cluster) as client:
        yield client


@pytest.fixture
def two_process_client(two_process_cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    """Return a Client of the shared two-process cluster for one test; `as_current()` makes it the active one."""
    with _client_of(two_process_cluster) as client:
        yield client


@contextlib.contextmanager
def _client_of(cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    """Connect to a shared cluster; afterwards, fail if the test has left tasks or plugins there."""
    import distributed

    with distributed.Client(cluster, set_as_default=False) as client:
        yield client
    scheduler, deadline = cluster.scheduler, time.monotonic() + 60
    while scheduler.tasks or set(scheduler.worker_plugins) - {"shuffle"}:
        assert time.monotonic() < deadline, f"left on the cluster: {[*scheduler.tasks, *scheduler.worker_plugins]}"
        time.sleep(0.005)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], subprocess.CompletedProcess[str]]]]:
    """Mount a file system of 192 KiB; yield its folder and a function that resizes it."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> subprocess.CompletedProcess[str]:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    if shutil.which("mount") is None:
        pytest.skip("there is no mount to make a small file system with")
    if (done := mount("size=192k")).returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    try:
        yield folder, lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def s3() -> Iterator[Callable[[str], Bucket]]:
    """Return a function that creates a named bucket on the shared S3 endpoint on loopback."""
    with s3_endpoint() as bucket_of:
        yield bucket_of


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an atlas in every format and layout: `csr.h5ad`, `dense.zarr3.zarr` and so on."""
    folder = tmp_path_factory.mktemp("stores")
    for layout in LAYOUTS:
        for format in FORMATS:
            write_store(make_adata(200, 30, layout=layout, has_everything=True), folder, format, name=layout)
    return folder


@pytest.fixture(scope="session")
def s3_stores(stores: Path, s3: Callable[[str], Bucket]) -> Bucket:
    """Return a bucket with some of `stores`."""
    bucket = s3("stores")
    for name in ("csr.h5ad", "csr.zarr3.zarr", "dense.zarr3.zarr"):
        bucket.put(stores / name)
    return bucket


@pytest.fixture
def web_stores(stores: Path) -> Iterator[HTTPServer]:
    """Start a web server that serves `stores` for this test."""
    with serving(stores) as server:
        yield server


@pytest.fixture(scope="session")
def training_atlas(atlas_of: Callable[..., Path]) -> Path:
    """Return the atlas for small training runs; tests/support/training.py has its numbers of cells, genes and types."""
    return atlas_of(203, 40, n_types=5, n_plates=6, seed=1)


@pytest.fixture(scope="session")
def mpirun() -> None:
    """Skip the test if Open MPI is not installed."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")

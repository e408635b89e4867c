"""Discovery of a running Dask cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import dask
import distributed
import pytest

from dasksc.executor import schedulers as window_schedulers
from dasksc.executor.schedulers import resolve_scheduler
from tests.support.dask_processes import rows_of_epoch
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.programs


@pytest.fixture
def atlas(tmp_path: Path) -> Path:
    return write_store(make_adata(n_obs=101), tmp_path, "h5ad")


@pytest.fixture
def scheduler_file(two_process_client: distributed.Client, tmp_path: Path) -> Iterator[Path]:
    # The content is that of `dask scheduler --scheduler-file`.
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps(two_process_client.cluster.scheduler.identity(n_workers=0)))
    yield path
    window_schedulers._close_clients()


def test_a_scheduler_file_names_the_scheduler(scheduler_file: Path, atlas: Path) -> None:
    assert rows_of_epoch(atlas, scheduler=str(scheduler_file)) == rows_of_epoch(atlas, scheduler="threads")


@pytest.mark.parametrize("by", ["scheduler-file", "scheduler-address"])
def test_dasks_configuration_names_the_scheduler_unless_a_client_is_active(
    scheduler_file: Path, in_process_client: distributed.Client, by: str
) -> None:
    address = json.loads(scheduler_file.read_text())["address"]
    with dask.config.set({by: str(scheduler_file) if by == "scheduler-file" else address}):
        assert resolve_scheduler().client.scheduler.address == address
        assert resolve_scheduler("threads").kind == "threads"
        with dask.config.set(scheduler="synchronous"):
            assert resolve_scheduler().kind == "synchronous"
        with in_process_client.as_current():
            assert resolve_scheduler().client is in_process_client

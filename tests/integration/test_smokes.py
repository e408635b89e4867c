"""One test of each real part: worker processes, S3, a killed conversion, two ranks, a Dask cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import anndata as ad
import distributed
import numpy as np
import pytest
from torch.utils.data import DataLoader

import dasksc
from tests.support.conversions import contents, read, same, write_gzipped
from tests.support.data import batches, make_adata, write_store
from tests.support.programs import PROGRAMS, run, torchrun
from tests.support.servers import Bucket
from tests.support.training import alone, assert_same, changed, training

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("torchrun")]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_dataloader_workers_read_each_epoch_once_and_no_epoch_twice(start: str, tmp_path: Path) -> None:
    path = write_store(make_adata(203), tmp_path, "h5ad")
    options = {"batch_size": 8, "fetch_factor": 2, "seed": 5, "return_index": True}
    alone = dasksc.scDataset(path, dasksc.BlockShuffling(4), **options)
    expected = [sorted(tuple(batch.index.tolist()) for batch in alone) for _ in range(2)]
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), **options)
    # Spawned workers import everything, so the same workers read both epochs.
    persistent = start == "spawn"
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context=start, persistent_workers=persistent
    )
    assert [sorted(tuple(batch.index.tolist()) for batch in loader) for _ in range(2)] == expected


def test_batches_of_an_atlas_on_s3_are_those_of_the_local_one(s3: Callable[[str], Bucket], tmp_path: Path) -> None:
    bucket = s3("smoke")
    for format in ("h5ad", "zarr3"):
        path = write_store(make_adata(203), tmp_path, format)
        remote = dasksc.open(bucket.put(path), storage_options=bucket.options)
        for one, other in zip(batches(remote), batches(path), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_killed_conversion_resumes_to_the_same_store(tmp_path: Path) -> None:
    source = write_gzipped(tmp_path)
    run([sys.executable, PROGRAMS / "convert_kills.py", source, tmp_path, "steps", 2])
    whole, *resumed = (contents(store) for store in sorted(tmp_path.glob("*.zarr")))
    assert resumed == [whole, whole]
    same(read(tmp_path / "0.zarr"), ad.read_h5ad(source))


def test_training_resumed_within_an_epoch_on_two_ranks_has_the_losses_of_a_plain_loop(
    training_atlas: Path, tmp_path: Path
) -> None:
    stopped = training(training_atlas, tmp_path / "run", training__max_steps=5)
    resumed = changed(
        stopped, {"training__max_steps": None, "training__max_epochs": 2, "training__resume_from": "auto"}
    )
    (tmp_path / "trainings.json").write_text(json.dumps({"stopped": stopped, "resumed": resumed}))
    torchrun(2, "train_many.py", tmp_path / "trainings.json")
    assert_same(tmp_path / "run", alone(training_atlas, 2), "loss")


def test_an_epoch_read_by_two_worker_processes_and_resumed_has_the_batches_of_one_process(
    training_atlas: Path, two_process_client: distributed.Client
) -> None:
    def dataset(scheduler: Any) -> dasksc.scDataset:
        return dasksc.scDataset(training_atlas, dasksc.BlockShuffling(4), 8, 2, seed=0, scheduler=scheduler)

    expected = [batch.clone() for batch in dataset("synchronous")]
    stopped, resumed = dataset(two_process_client), dataset(two_process_client)
    found = [batch.clone() for batch in islice(stopped, 5)]
    resumed.load_state_dict(stopped.state_dict())
    found += [batch.clone() for batch in resumed]
    assert len(found) == len(expected)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))

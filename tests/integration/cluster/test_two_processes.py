"""An epoch read through a Dask cluster of two worker processes, and resumed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import distributed
import pytest

import dasksc

pytestmark = pytest.mark.core


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

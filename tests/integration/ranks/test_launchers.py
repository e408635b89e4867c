"""Open MPI's mpirun."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from tests.support.programs import MPIRUN, PROGRAMS, ROOT, run

pytestmark = pytest.mark.programs

LAUNCHED = PROGRAMS / "launched.py"
TRAIN = ROOT / "examples" / "train_ddp.py"


@pytest.fixture(scope="session")
def atlas(atlas_of) -> Path:
    return atlas_of(1_000, 300)


def start(command: list[object]) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def launched(folder: Path, command: list[object]) -> list[dict]:
    """Return the output of each rank of a launched program; fail unless the ranks together read one epoch."""
    start([*command, LAUNCHED, folder])
    ranks = [json.loads(file.read_text()) for file in sorted(folder.iterdir())]
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
    assert {rank["world_size"] for rank in ranks} == {len(ranks)}
    assert len({len(rank["batches"]) for rank in ranks}) == 1
    seen = Counter(chain(*chain(*(rank["batches"] for rank in ranks))))
    assert set(seen) == set(range(103))
    assert sum(seen.values()) - 103 < len(ranks)
    return ranks


def test_mpirun_starts_ranks_that_share_an_epoch(mpirun, tmp_path):
    ranks = launched(tmp_path, [*MPIRUN, sys.executable])
    assert [rank["source"] for rank in ranks] == ["OMPI_COMM_WORLD_RANK/OMPI_COMM_WORLD_SIZE"] * 2
    assert [rank["local_world_size"] for rank in ranks] == [2, 2]


def test_ddp_trains_under_mpirun(mpirun, atlas):
    printed = start([*MPIRUN, sys.executable, TRAIN, atlas, "--batch-size", 32])
    assert re.search(r"epoch 0: [\d,]+ cells/s on 2 ranks", printed)

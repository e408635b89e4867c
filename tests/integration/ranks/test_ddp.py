"""Two processes under torchrun with gloo; `test_ranks` tests the agreement of ranks in threads."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch

import dasksc
from tests.support.conversions import read
from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("torchrun")]

N_OBS = 1009


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return the output of two ranks, the rows that each read in two training epochs, the atlas and the folder."""
    folder = tmp_path_factory.mktemp("two")
    path = write_store(make_adata(n_obs=N_OBS), folder, "h5ad")
    # srun torchrun: one task per node, which starts the node's ranks.
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
    # Kubeflow's PyTorchJob: RANK and WORLD_SIZE count pods, not processes.
    pods = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "PET_NNODES": "1"}
    outs = (folder / name for name in ("seen.json", "ddp.zarr", "fsdp.zarr"))
    printed = torchrun(2, "ddp_two_ranks.py", path, *outs, **step, **pods)
    return printed, json.loads((folder / "seen.json").read_text()), path, folder


def test_two_ranks_cover_a_number_of_rows_that_they_do_not_divide(two_ranks):
    _, ranks, *_ = two_ranks
    assert len(ranks) == 2
    assert len({rank["seed"] for rank in ranks}) == 1
    orders = []
    for epoch in range(2):
        seen = [rank["epochs"][epoch] for rank in ranks]
        assert seen[0]["sizes"] == seen[1]["sizes"]
        assert all(one["length"] == len(one["sizes"]) for one in seen)
        times_seen = Counter(row for one in seen for row in one["rows"])
        assert set(times_seen) == set(range(N_OBS))
        assert sum(times_seen.values()) - N_OBS == seen[0]["n_padded"] == 1
        orders.append([one["rows"] for one in seen])
    assert orders[0] != orders[1]


def test_ranks_of_torchrun_do_not_depend_on_what_started_torchrun(two_ranks):
    printed, *_ = two_ranks
    for rank in range(2):
        assert f"before: rank {rank} of 2 from RANK/WORLD_SIZE" in printed
        assert f"after: rank {rank} of 2 from torch.distributed" in printed


def test_ranks_that_read_or_draw_differently_neither_hang_nor_go_unnoticed(two_ranks):
    printed, *_ = two_ranks
    assert "rank 0 peeked at 8 rows" in printed
    reason = "rank 0 stopped iteration 0 over this data set after 1 batches; rank 1 continued"
    assert f"rank 1 stopped after 1: {reason}" in printed
    assert len(re.findall(r"rank \d stopped in its worker: .*?ranks \d and \d read", printed, re.DOTALL)) == 1


def test_two_ranks_predict_what_the_plain_loop_yields_with_ddp_and_fsdp(two_ranks):
    printed, _, atlas, folder = two_ranks
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(dasksc.open(atlas).n_vars, 6), torch.nn.Linear(6, 3))
    with torch.no_grad():
        expected = np.concatenate([model(batch).numpy() for batch in dasksc.scDataset(atlas, dasksc.Streaming(), 8)])
    for name in ("ddp", "fsdp"):
        assert np.array_equal(read(folder / f"{name}.zarr").obsm["X_emb"], expected), name
    reports = re.findall(rf"^rank (\d) predicted (\d+) cells, True, \({N_OBS}, 3\)$", printed, re.MULTILINE)
    assert sorted(rank for rank, _ in reports) == ["0", "0", "1", "1"], printed
    assert sum(int(n) for _, n in reports) == 2 * N_OBS
    assert all(400 < int(n) < 600 for _, n in reports)
    assert len(re.findall(r"^rank \d again: 0, training True$", printed, re.MULTILINE)) == 4

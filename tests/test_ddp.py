"""Real processes under torchrun, with gloo; what ranks agree on is tested in threads, by test_ranks."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytestmark = [pytest.mark.core, pytest.mark.xdist_group("ddp")]


def test_three_ranks_train_over_rows_that_divide_by_nothing_and_cover_them(tmp_path):
    n_obs = 1009
    path = write_store(make_adata(n_obs=n_obs), tmp_path, "h5ad")
    torchrun(3, "ddp_coverage.py", path, tmp_path / "seen.json")
    ranks = json.loads((tmp_path / "seen.json").read_text())
    assert len(ranks) == 3
    assert len({rank["seed"] for rank in ranks}) == 1
    orders = []
    for epoch in range(2):
        seen = [rank["epochs"][epoch] for rank in ranks]
        assert seen[0]["sizes"] == seen[1]["sizes"] == seen[2]["sizes"]
        assert all(one["length"] == len(one["sizes"]) for one in seen)
        times_seen = Counter(row for one in seen for row in one["rows"])
        assert set(times_seen) == set(range(n_obs))
        assert sum(times_seen.values()) - n_obs == seen[0]["n_padded"] == 2
        orders.append([one["rows"] for one in seen])
    assert orders[0] != orders[1]


@pytest.fixture(scope="module")
def printed():
    """What two ranks print of who they are, and of a batch that one of them reads alone."""
    # srun torchrun: one task per node, which starts the node's ranks.
    step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
    # Kubeflow's PyTorchJob: RANK and WORLD_SIZE are of the pods.
    pods = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "PET_NNODES": "1"}
    return torchrun(2, "ddp_world.py", **step, **pods)


def test_ranks_started_by_torchrun_are_torchruns_whatever_started_it(printed):
    for rank in range(2):
        assert f"before: rank {rank} of 2 from RANK/WORLD_SIZE" in printed
        assert f"after: rank {rank} of 2 from torch.distributed" in printed
    assert "SLURM_PROCID/SLURM_NTASKS says rank 1 of 2, which is not used" in printed


def test_a_rank_that_looks_at_a_batch_alone_neither_hangs_nor_goes_unnoticed(printed):
    assert "rank 0 peeked at 8 rows" in printed
    assert "rank 1 stopped after 1: rank 0 left its iteration 0 after 1 batches; rank 1 goes on" in printed


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """What each of four ranks, two data-parallel by two tensor-parallel, read and was told."""
    out = tmp_path_factory.mktemp("groups") / "found.json"
    torchrun(4, "ddp_groups.py", out)
    return json.loads(out.read_text())


def test_tensor_parallel_ranks_read_the_same_and_data_parallel_ones_share_the_epoch(groups):
    assert [found["world"] for found in groups] == [[0, 2, 4], [0, 2, 4], [1, 2, 4], [1, 2, 4]]
    assert groups[0]["epochs"][0] != groups[0]["epochs"][1]
    for peer, other in ((0, 1), (2, 3)):
        assert groups[peer]["epochs"] == groups[other]["epochs"]
        assert groups[peer]["grouped"] == groups[other]["grouped"]
    for epoch in range(2):
        seen = Counter(row for found in (groups[0], groups[2]) for batch in found["epochs"][epoch] for row in batch)
        assert set(seen) == set(range(101))
        assert sum(seen.values()) == 102
        assert len({len(found["epochs"][epoch]) for found in groups}) == 1


def test_all_groups_agree_on_the_seed_of_each_data_set(groups):
    seeds = groups[0]["seeds"]
    assert len(set(seeds)) == 3
    assert all(found["seeds"] == seeds for found in groups)


def test_a_copy_of_a_data_set_of_a_group_keeps_its_rank(groups):
    for found in groups:
        assert found["copies"][0] == found["grouped"]
        assert found["copies"][1] != found["grouped"]
        assert len(found["copies"][1]) == len(found["grouped"])


def test_groups_do_not_meet_each_others_notes(groups):
    assert groups[0]["apart"] != groups[1]["apart"]
    for first, second in ((0, 2), (1, 3)):
        assert {row for found in (groups[first], groups[second]) for batch in found["apart"] for row in batch} == set(
            range(101)
        )


def test_a_mismatch_inside_a_group_names_both_of_its_ranks(groups):
    complaints = [found["wrong"] for found in groups]
    assert complaints[:3] == ["", "", ""]
    assert "rank 0 reads epoch 0 and rank 1 reads epoch 5" in complaints[3]


def test_a_rank_outside_the_group_and_a_mesh_without_a_data_dimension_are_refused(groups):
    assert [found["pair"] for found in groups] == [
        *("", ""),
        *(f"rank {rank} is not in group=. Make the data set on the ranks of the group only" for rank in (2, 3)),
    ]
    assert "('pp', 'tp'), none of which is known to be data-parallel" in groups[0]["unknown"]

"""Real processes under torchrun, with gloo."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support.data import make_adata, write_store
from tests.support.programs import torchrun

pytestmark = pytest.mark.core


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


def test_a_rank_that_looks_at_a_batch_alone_neither_hangs_nor_goes_unnoticed():
    printed = torchrun(2, "ddp_disagreement.py", "peek")
    assert "rank 0 peeked at 8 rows" in printed
    assert "rank 1 stopped after 1: rank 0 left its iteration 0 after 1 batches; rank 1 goes on" in printed


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("epochs", "reads epoch"),
        ("seeds", "read different data or sample it differently"),
    ],
)
def test_ranks_that_disagree_stop_before_the_first_batch_and_name_both(case, complaint):
    printed = torchrun(2, "ddp_disagreement.py", case)
    (stopped,) = [line for line in printed.splitlines() if "stopped after 0" in line]
    assert complaint in stopped
    assert "0" in stopped.split(":", 1)[1]
    assert "1" in stopped.split(":", 1)[1]


def test_a_data_set_for_one_rank_alone_disturbs_nobody():
    printed = torchrun(2, "ddp_disagreement.py", "alone")
    assert "rank 0 alone saw 100 rows" in printed
    assert "rank 0 finished 7" in printed
    assert "rank 1 finished 7" in printed


@pytest.mark.parametrize(
    "outside",
    [
        # srun torchrun: one task per node, which starts the node's ranks.
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"},
        # Kubeflow's PyTorchJob: RANK and WORLD_SIZE are of the pods.
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "PET_NNODES": "1"},
    ],
    ids=["srun", "Kubeflow"],
)
def test_ranks_started_by_torchrun_are_torchruns_whatever_started_it(outside):
    printed = torchrun(2, "ddp_world.py", **outside)
    assert "before: rank 0 of 2 from RANK/WORLD_SIZE" in printed
    assert "before: rank 1 of 2 from RANK/WORLD_SIZE" in printed
    assert "after: rank 0 of 2 from torch.distributed" in printed
    assert "after: rank 1 of 2 from torch.distributed" in printed
    ignored = "SLURM_PROCID/SLURM_NTASKS says rank 1 of 2, which is not used"
    assert (ignored in printed) is ("SLURM_PROCID" in outside)


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

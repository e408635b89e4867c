"""Ranks of a device mesh under torchrun: four processes, two data-parallel by two tensor-parallel."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support.programs import torchrun

pytestmark = [pytest.mark.programs, pytest.mark.xdist_group("ddp_groups")]


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Return the rows and messages of each of the four ranks."""
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


def test_a_copy_of_a_data_set_of_a_group_keeps_its_rank(groups):
    for found in groups:
        assert found["copies"][0] == found["grouped"]
        assert found["copies"][1] != found["grouped"]
        assert len(found["copies"][1]) == len(found["grouped"])


def test_a_rank_outside_the_group_and_a_mesh_without_a_data_dimension_are_refused(groups):
    assert [found["pair"] for found in groups] == [
        *("", ""),
        *(f"rank {rank} is not in group=. Create the data set only on the ranks of the group" for rank in (2, 3)),
    ]
    assert "('pp', 'tp')" in groups[0]["unknown"]

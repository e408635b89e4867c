"""Real processes under torchrun, with gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.data import make_adata, write_store

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[1]


def torchrun(n_ranks: int, program: str, *arguments: object, timeout_s: float = 180) -> str:
    """Run a program under torchrun to its end; return what it printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"),
            *(str(PROGRAMS / program), *map(str, arguments)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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

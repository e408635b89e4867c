"""Trainings under real torchrun that lose a rank and go on from their checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.faults

PROGRAM = Path(__file__).parent / "programs" / "ddp_elastic.py"
ROOT = Path(__file__).parents[1]
N_OBS = 203
PATIENCE_S = 240


def torchrun(*options: str, folder: Path, killed: int, more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*(sys.executable, "-m", "torch.distributed.run"), *options, str(PROGRAM), str(folder), str(killed), *more],
        # By default torch keeps one store for all attempts, and gloo then dials ranks of those before.
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def on_one_machine(n_ranks: int, *options: str, folder: Path, killed: int = -1) -> tuple[int, str]:
    run = torchrun("--standalone", f"--nproc_per_node={n_ranks}", *options, folder=folder, killed=killed)
    _, complaints = run.communicate(timeout=PATIENCE_S)
    return run.returncode, complaints


def notes(folder: Path, attempt: int) -> list[dict[tuple[int, int], list[int]]]:
    """For each rank of an attempt, its batches by epoch and step."""
    files = sorted(folder.glob(f"batches-{attempt}-*"))
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [{(epoch, step): rows for epoch, step, rows in of_rank} for of_rank in lines]


def last_attempt(folder: Path) -> int:
    """The last attempt that came as far as training: finding each other may take ranks more than one."""
    return max(int(file.name.split("-")[1]) for file in folder.glob("batches-*"))


def assert_covered(batches: list[list[int]], *, n_padded: int) -> None:
    times = Counter(row for batch in batches for row in batch)
    assert set(times) == set(range(N_OBS))
    assert times.total() - N_OBS <= n_padded


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a training of three ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, complaints = on_one_machine(3, folder=folder)
    assert code == 0, complaints
    return folder


def test_a_training_whose_rank_was_killed_reads_the_same_batches_as_one_that_was_not(tmp_path, unbroken):
    code, complaints = on_one_machine(3, "--max-restarts=1", folder=tmp_path, killed=1)
    assert code == 0, complaints
    expected, first, second = notes(unbroken, 0), notes(tmp_path, 0), notes(tmp_path, 1)
    assert len(expected) == len(first) == len(second) == 3
    for rank in range(3):
        # The checkpoint after step 4 was the last; step 5 of the epoch was never made by all.
        assert min(second[rank]) in {(0, 3), (0, 5)}
        assert {**first[rank], **second[rank]} == expected[rank]
        for step in first[rank]:
            assert first[rank][step] == expected[rank][step]
    assert (tmp_path / "finished").read_text() == (unbroken / "finished").read_text()


def test_three_ranks_of_which_one_was_killed_go_on_as_two(tmp_path, unbroken):
    code, complaints = on_one_machine(3, "--max-restarts=0", folder=tmp_path, killed=2)
    assert code != 0
    assert "Signal 9 (SIGKILL)" in complaints
    state = json.loads((tmp_path / "checkpoint").read_text())["data"]
    code, complaints = on_one_machine(2, folder=tmp_path)
    assert code == 0, complaints
    check_after_loss(tmp_path, unbroken, n_before=state["consumed"][-1][-1], n_ranks=2)


def test_a_machine_that_is_lost_leaves_the_rest_to_the_other(tmp_path, unbroken):
    # The store is nobody's whose machine may be lost.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = (
        *("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-id=elastic"),
        *("--max-restarts=3", "--rdzv-conf=is_host=0,last_call_timeout=5,keep_alive_interval=1"),
    )
    machines = [
        torchrun(*options, f"--nproc_per_node={n_ranks}", folder=tmp_path, killed=2, more=("AGENT",))
        for n_ranks in (2, 1)
    ]
    try:
        complaints = [machine.communicate(timeout=PATIENCE_S)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    codes = [machine.returncode for machine in machines]
    # Which machine the last rank was on is for torchrun to say.
    assert sorted(codes) == [-9, 0], "".join(complaints)
    _, n_before = min(notes(tmp_path, last_attempt(tmp_path))[0])
    check_after_loss(tmp_path, unbroken, n_before=n_before, n_ranks=2 if codes[0] == 0 else 1)


def check_after_loss(folder: Path, unbroken: Path, *, n_before: int, n_ranks: int) -> None:
    expected, first, second = notes(unbroken, 0), notes(folder, 0), notes(folder, last_attempt(folder))
    assert (len(first), len(second)) == (3, n_ranks)
    assert n_before in {3, 5}
    heads = [first[rank][0, step] for rank in range(3) for step in range(n_before)]
    assert heads == [expected[rank][0, step] for rank in range(3) for step in range(n_before)]
    tails = [rows for of_rank in second for (epoch, _), rows in of_rank.items() if epoch == 0]
    # Each rank may be one row short of an equal share.
    assert_covered(heads + tails, n_padded=3 + n_ranks)
    assert_covered([rows for of_rank in second for (epoch, _), rows in of_rank.items() if epoch == 1], n_padded=1)
    assert all(set(of_rank) == set(second[0]) for of_rank in second)
    assert json.loads((folder / "finished").read_text())[0] == n_ranks

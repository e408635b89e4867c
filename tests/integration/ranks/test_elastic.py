"""Training runs under torchrun that lose a rank or a machine and resume from their checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import dasksc
from tests.support.programs import PROGRAMS, ROOT

pytestmark = pytest.mark.faults

PROGRAM = PROGRAMS / "ddp_elastic.py"
N_OBS = 203
PATIENCE_S = 600

Batches = dict[tuple[int, int], list[int]]


def torchrun(*options: str, folder: Path, killed: int, more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*(sys.executable, "-m", "torch.distributed.run"), *options, str(PROGRAM), str(folder), str(killed), *more],
        # By default, torch keeps one store for all attempts, and gloo then connects to ranks of earlier attempts.
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def notes(folder: Path, attempt: int) -> list[Batches]:
    """Return the batches of each rank in an attempt, by epoch and step."""
    files = sorted(folder.glob(f"batches-{attempt}-*"))
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [{(epoch, step): rows for epoch, step, rows in of_rank} for of_rank in lines]


def last_attempt(folder: Path) -> int:
    """Return the last attempt that reached training, since the rendezvous may take several attempts."""
    return max(int(file.name.split("-")[1]) for file in folder.glob("batches-*"))


def assert_covered(batches: list[list[int]], *, n_padded: int) -> None:
    times = Counter(row for batch in batches for row in batch)
    assert set(times) == set(range(N_OBS))
    assert times.total() - N_OBS <= n_padded


def unbroken(n_ranks: int) -> tuple[list[Batches], float]:
    """Return the rows that each rank reads in an uninterrupted training, and the weight that a plain loop learns."""
    options = {"batch_size": 7, "fetch_factor": 2, "seed": 3, "world_size": n_ranks}
    ranks = [
        dasksc.scDataset(np.arange(float(N_OBS)), dasksc.BlockShuffling(4), rank=rank, **options)
        for rank in range(n_ranks)
    ]
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    batches: list[Batches] = [{} for _ in ranks]
    for epoch in range(2):
        for step, of_ranks in zip(count(), zip(*ranks, strict=True)):
            for rank, batch in enumerate(of_ranks):
                (model(torch.as_tensor(batch).reshape(-1, 1).float() / N_OBS).mean() / n_ranks).backward()
                batches[rank][epoch, step] = batch.astype(int).tolist()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return batches, model.weight.item()


def test_a_training_whose_rank_was_killed_reads_the_same_batches_as_one_that_was_not(tmp_path):
    run = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1", folder=tmp_path, killed=1)
    _, complaints = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, complaints
    (expected, weight), first, second = unbroken(2), notes(tmp_path, 0), notes(tmp_path, 1)
    assert len(first) == len(second) == 2
    for rank in range(2):
        # The last checkpoint follows step 4, since not all ranks completed step 5.
        assert min(second[rank]) in {(0, 3), (0, 5)}
        assert {**first[rank], **second[rank]} == expected[rank]
        for step in first[rank]:
            assert first[rank][step] == expected[rank][step]
    assert json.loads((tmp_path / "finished").read_text()) == [2, pytest.approx(weight, rel=1e-5)]


def test_after_the_loss_of_a_machine_the_other_reads_the_rest(tmp_path):
    # The store runs in this process, since either machine may be lost.
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
    # torchrun decides which machine runs the last rank.
    assert sorted(codes) == [-9, 0], "".join(complaints)
    _, n_before = min(notes(tmp_path, last_attempt(tmp_path))[0])
    check_after_loss(tmp_path, n_before=n_before, n_ranks=2 if codes[0] == 0 else 1)


def check_after_loss(folder: Path, *, n_before: int, n_ranks: int) -> None:
    (expected, _), first, second = unbroken(3), notes(folder, 0), notes(folder, last_attempt(folder))
    assert (len(first), len(second)) == (3, n_ranks)
    assert n_before in {3, 5}
    heads = [first[rank][0, step] for rank in range(3) for step in range(n_before)]
    assert heads == [expected[rank][0, step] for rank in range(3) for step in range(n_before)]
    tails = [rows for of_rank in second for (epoch, _), rows in of_rank.items() if epoch == 0]
    # In each attempt, a rank with one row less than an equal share repeats a row.
    assert_covered(heads + tails, n_padded=3 + n_ranks)
    assert_covered([rows for of_rank in second for (epoch, _), rows in of_rank.items() if epoch == 1], n_padded=1)
    assert all(set(of_rank) == set(second[0]) for of_rank in second)
    assert json.loads((folder / "finished").read_text())[0] == n_ranks

"""Under torchrun: ranks that fall out of step; each prints the error it gets."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist

import dasksc
from dasksc.world import leave_group

case = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
seed = rank if case == "seeds" else 0
dataset = dasksc.scDataset(np.arange(100), dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, seed=seed)
if case == "peek" and rank == 0:
    print(f"rank 0 peeked at {len(next(iter(dataset)))} rows", flush=True)
if case == "epochs":
    dataset.set_epoch(rank)
if case == "alone" and rank == 0:
    alone = dasksc.scDataset(np.arange(100), dasksc.Streaming(), batch_size=100, rank=0, world_size=1, seed=0)
    print(f"rank 0 alone saw {len(next(iter(alone)))} rows", flush=True)
dist.barrier()
n_batches = 0
try:
    for _ in dataset:
        n_batches += 1
except dasksc.RankMismatchError as error:
    print(f"rank {rank} stopped after {n_batches}: {error}", flush=True)
else:
    print(f"rank {rank} finished {n_batches}", flush=True)
# Those who stopped wait here for those who did not.
dist.all_reduce(torch.zeros(1))
leave_group()

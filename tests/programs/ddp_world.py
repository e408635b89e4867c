"""Under torchrun: say which rank this is, before there is a process group and after; then look at a batch alone."""

from __future__ import annotations

import logging
import sys

import numpy as np
import torch
import torch.distributed as dist

import dasksc
from dasksc.world import leave_group

logging.basicConfig(level=logging.INFO, stream=sys.stdout)


def tell(when: str) -> None:
    world = dasksc.World.detect()
    print(f"{when}: rank {world.rank} of {world.world_size} from {world.source}", flush=True)


tell("before")
dist.init_process_group("gloo")
tell("after")

# Rank 0 alone looks at a batch; each rank prints the error it gets.
rank = dist.get_rank()
dataset = dasksc.scDataset(np.arange(100), dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, seed=0)
if rank == 0:
    print(f"rank 0 peeked at {len(next(iter(dataset)))} rows", flush=True)
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

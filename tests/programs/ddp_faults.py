"""Rank of a DDP training in which rank argv[2] alone suffers the fault argv[1], in batch 3."""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

import dasksc
from dasksc.plan.ranks import leave_group

how, whom = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", timeout=dt.timedelta(seconds=20))
n_batches = 0


def harm(batch):
    global n_batches
    n_batches += 1
    if dist.get_rank() == whom and n_batches == 4:
        if how == "raise":
            raise ZeroDivisionError("mine")
        os.kill(os.getpid(), getattr(signal, how))
    return torch.from_numpy(batch)


dataset = dasksc.scDataset(np.arange(1000.0), dasksc.BlockShuffling(4), 8, 4, batch_transform=harm)
print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
for batch in dataset:
    dist.all_reduce(batch.sum())
print("finished", flush=True)
leave_group()

"""Under torchrun: train two DDP epochs over a row count that divides by nothing; write what each rank saw."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dasksc
from dasksc.world import leave_group

path, out = sys.argv[1:3]
dist.init_process_group("gloo")
torch.manual_seed(0)
# seed=None: the ranks agree on one.
dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=3, obs=["cell_type"])
model = DistributedDataParallel(torch.nn.Linear(dataset.plan().sampler.n_rows % 7 + 1, 1))
epochs = []
for _ in range(2):
    rows, sizes = [], []
    for batch in dataset:
        # The gradient's all-reduce makes every rank wait for the others at every step.
        model(torch.ones(len(batch.X), model.module.in_features)).sum().backward()
        rows += batch.index.tolist()
        sizes.append(len(batch.X))
    epochs.append({"rows": rows, "sizes": sizes, "n_padded": dataset.stats()["n_padded"], "length": len(dataset)})
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, {"seed": dataset.seed, "epochs": epochs})
if dist.get_rank() == 0:
    with open(out, "w") as file:
        json.dump(gathered, file)
leave_group()

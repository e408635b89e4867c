"""Under torchrun: train and predict on two ranks: ``ddp_two_ranks.py IN OUT.json DDP.zarr FSDP.zarr``.

The ranks print their number, train two DDP epochs over rows that two ranks cannot share equally, write the rows that
they read, and predict the atlas with DDP and with FSDP. Finally, only one rank reads a batch.
"""

from __future__ import annotations

import json
import logging
import sys
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dasksc
from dasksc.inference import store
from dasksc.plan.ranks import leave_group

logging.basicConfig(level=logging.INFO, stream=sys.stdout)


def tell(when: str) -> None:
    world = dasksc.World.detect()
    print(f"{when}: rank {world.rank} of {world.world_size} from {world.source}", flush=True)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(dasksc.open(path).n_vars, 6), torch.nn.Linear(6, 3)

    def embed(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch))

    forward = embed


path, out, *predictions = sys.argv[1:]
tell("before")
dist.init_process_group("gloo")
tell("after")

torch.manual_seed(0)
# With seed=None, the ranks agree on a seed.
dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=3, obs=["cell_type"])
model = DistributedDataParallel(torch.nn.Linear(dataset.plan().sampler.n_rows % 7 + 1, 1))
epochs = []
for _ in range(2):
    rows, sizes = [], []
    for batch in dataset:
        # The all-reduce of the gradient synchronizes the ranks at every step.
        model(torch.ones(len(batch.X), model.module.in_features)).sum().backward()
        rows += batch.index.tolist()
        sizes.append(len(batch.X))
    epochs.append({"rows": rows, "sizes": sizes, "n_padded": dataset.stats()["n_padded"], "length": len(dataset)})
rank = dist.get_rank()
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, {"seed": dataset.seed, "epochs": epochs})
if rank == 0:
    with open(out, "w") as file:
        json.dump(gathered, file)

sharded = Model().train()
for part in (sharded.first, sharded):
    fully_shard(part)
dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, seed=0)
models = DistributedDataParallel(Model()).train(), sharded.embed
for model, there in zip(models, predictions, strict=True):
    # Units of work have 16 rows here, so that each rank predicts many of the 64 units. The last unit has a row and thus
    # a batch less than the others.
    with mock.patch.multiple(store, _LEAST_ROWS=16, _MOST_ROWS=16):
        report = dasksc.predict(model, dataset, there)
        # When `predict` returns, every rank can read the key obsm/X_emb of the store.
        shape = dasksc.open(path, attach={"obsm/X_emb": there}).obsm["X_emb"].shape
        print(f"rank {rank} predicted {report.n_predicted} cells, {report.is_complete}, {shape}", flush=True)
        again = dasksc.predict(model, dataset, there).n_predicted
    # The model, and the module in DDP, return to their previous mode.
    modules = [part.training for part in getattr(model, "__self__", model).modules()]
    print(f"rank {rank} again: {again}, training {all(modules)}", flush=True)

# Rank 0 alone reads a batch before the epoch. Each rank then prints its error, or that it finished.
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
dataset = dasksc.scDataset(np.arange(100), dasksc.BlockShuffling(4), batch_size=8, seed=rank)
try:
    list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1))
except dasksc.RankMismatchError as error:
    print(f"rank {rank} stopped in its worker: {error}", flush=True)
# Ranks that have stopped early wait here for the others.
dist.all_reduce(torch.zeros(1))
leave_group()

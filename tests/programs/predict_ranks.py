"""Under torchrun: predict an atlas on several ranks, ``predict_ranks.py IN OUT ddp|fsdp|failing``.

With ``failing``, the last rank fails during the prediction. Each rank prints its report or its error.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dasksc
from dasksc.inference import store
from dasksc.plan.process_groups import leave_group

BATCH = 8


class Model(nn.Module):
    def __init__(self, n_genes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(n_genes, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch))

    def embed(self, batch: torch.Tensor) -> torch.Tensor:
        if HOW == "failing" and dist.get_rank() == dist.get_world_size() - 1:
            raise ZeroDivisionError("this rank fails")
        return self.first(batch)


path, out, HOW = sys.argv[1:4]
dist.init_process_group("gloo")
model = Model(dasksc.open(path).n_vars).train()
if HOW == "fsdp":
    for part in (model.first, model.second, model):
        fully_shard(part)
    called = model.embed
elif HOW == "ddp":
    called = DistributedDataParallel(model)
else:
    called = model.embed
dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), BATCH, seed=0)
with mock.patch.object(store, "_LEAST_ROWS", 2 * BATCH), mock.patch.object(store, "_MOST_ROWS", 2 * BATCH):
    try:
        report = dasksc.predict(called, dataset, out)
        # When `predict` returns, every rank can read the key obsm/X_emb of the store.
        there = dasksc.open(path, attach={"obsm/X_emb": out}).obsm["X_emb"].shape
        print(f"rank {dist.get_rank()}: {report.n_predicted} cells, {report.is_complete}, {there}", flush=True)
        again = dasksc.predict(called, dataset, out)
        print(f"rank {dist.get_rank()} again: {again.n_predicted}, training {model.training}", flush=True)
    except (dasksc.DaskscError, ZeroDivisionError) as error:
        print(f"rank {dist.get_rank()} failed: {type(error).__name__}: {error}", flush=True)
dist.barrier()
leave_group()

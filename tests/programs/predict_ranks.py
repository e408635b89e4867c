"""Under torchrun: predict an atlas with FSDP, ``predict_ranks.py IN OUT``; print the report of each rank."""

from __future__ import annotations

import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dasksc
from dasksc.inference import store
from dasksc.plan.process_groups import leave_group

BATCH = 8


class Model(nn.Module):
    def __init__(self, n_genes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(n_genes, 6)

    def embed(self, batch: torch.Tensor) -> torch.Tensor:
        return self.first(batch)


path, out = sys.argv[1:3]
dist.init_process_group("gloo")
model = Model(dasksc.open(path).n_vars).train()
for part in (model.first, model):
    fully_shard(part)
dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), BATCH, seed=0)
with mock.patch.object(store, "_LEAST_ROWS", 2 * BATCH), mock.patch.object(store, "_MOST_ROWS", 2 * BATCH):
    report = dasksc.predict(model.embed, dataset, out)
    # When `predict` returns, every rank can read the key obsm/X_emb of the store.
    there = dasksc.open(path, attach={"obsm/X_emb": out}).obsm["X_emb"].shape
    print(f"rank {dist.get_rank()}: {report.n_predicted} cells, {report.is_complete}, {there}", flush=True)
    again = dasksc.predict(model.embed, dataset, out)
    print(f"rank {dist.get_rank()} again: {again.n_predicted}, training {model.training}", flush=True)
dist.barrier()
leave_group()

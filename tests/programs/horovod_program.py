"""Train in the style of Horovod, with fakes of its functions; write the rows of each epoch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

import dasksc

hvd = ModuleType("horovod.torch")
hvd.init = lambda: None
hvd.is_initialized = lambda: True
hvd.rank = lambda: int(os.environ["HOROVOD_RANK"])
hvd.size = lambda: int(os.environ["HOROVOD_SIZE"])
hvd.local_size = lambda: int(os.environ["HOROVOD_LOCAL_SIZE"])
hvd.DistributedOptimizer = lambda optimizer, named_parameters: optimizer
hvd.broadcast_parameters = lambda parameters, root_rank: None
sys.modules["horovod.torch"] = hvd

hvd.init()
dataset = dasksc.scDataset(np.arange(104), dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, seed=0)
assert (dataset.rank, dataset.world_size) == (hvd.rank(), hvd.size())
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
epochs = []
for epoch in range(2):
    dataset.set_epoch(epoch)
    epochs.append([])
    for batch in dataset:
        epochs[-1] += batch.tolist()
        optimizer.zero_grad()
        model(torch.as_tensor(batch, dtype=torch.float32)[:, None]).mean().backward()
        optimizer.step()
(Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(epochs))

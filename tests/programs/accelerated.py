"""Under torchrun: read an epoch as Accelerate is told to; write which rows each rank saw, and after a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import dasksc
from dasksc.world import leave_group

case, path, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
accelerator = Accelerator(cpu=True)


def make() -> dasksc.scDataset:
    """The data set, the same each time."""
    return dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, obs=["cell_type"], seed=3)


model = torch.nn.Linear(17, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
dataset = make()
loader = DataLoader(dataset, batch_size=None) if case == "dispatched" else dataset
if case == "unprepared":
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(dataset)

seen: list[list[int]] = []
rest: list[list[int]] = []
for i, batch in enumerate(loader):
    batch = batch.to(accelerator.device)
    # A step that waits for no other rank, as the wrong ways do not give every rank equally many batches.
    seen.append(batch.index.tolist())
    if case == "unprepared":
        accelerator.backward(model(batch.X).mean())
        optimizer.step()
        optimizer.zero_grad()
        if i == 1:
            accelerator.save_state(str(folder / "saved"))
if case == "unprepared":
    accelerator.load_state(str(folder / "saved"))
    rest = [batch.index.tolist() for batch in dataset]
(folder / f"{case}-{accelerator.process_index}.json").write_text(json.dumps({"seen": seen, "rest": rest}))
accelerator.wait_for_everyone()
leave_group()

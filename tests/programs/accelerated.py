"""Under torchrun: read an epoch with each use of Accelerate, and resume one; write the rows of each rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import dasksc
from dasksc.planning.process_groups import leave_group

path, folder = sys.argv[1], Path(sys.argv[2])


def read(case: str) -> dict[str, list[list[int]]]:
    """Read an epoch from a data set, prepared or not, or from a prepared loader around a data set."""
    accelerator = Accelerator(cpu=True)
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, obs=["cell_type"], seed=3)
    model = torch.nn.Linear(17, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
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
        seen.append(batch.index.tolist())
        # Only the case "unprepared" takes training steps, which wait for the other ranks. In the other cases, which
        # misuse Accelerate, the ranks may have different numbers of batches.
        if case == "unprepared":
            accelerator.backward(model(batch.X).mean())
            optimizer.step()
            optimizer.zero_grad()
            if i == 1:
                accelerator.save_state(str(folder / "saved"))
    if case == "unprepared":
        accelerator.load_state(str(folder / "saved"))
        rest = [batch.index.tolist() for batch in dataset]
    accelerator.wait_for_everyone()
    return {"seen": seen, "rest": rest}


found = {case: read(case) for case in ("unprepared", "prepared", "dispatched")}
(folder / f"{Accelerator(cpu=True).process_index}.json").write_text(json.dumps(found))
leave_group()

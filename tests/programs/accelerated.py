"""Under torchrun: read an epoch with each use of Accelerate, and resume one; write the rows or errors of each rank."""

from __future__ import annotations

import json
import operator
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import dasksc
from dasksc.plan.process_groups import leave_group

path, folder = sys.argv[1], Path(sys.argv[2])


def read(case: str) -> dict[str, list[list[int]]]:
    """Read an epoch from a data set, prepared or not."""
    accelerator = Accelerator(cpu=True)
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, obs=["cell_type"], seed=3)
    model = torch.nn.Linear(17, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = dataset if case == "unprepared" else accelerator.prepare(dataset)
    accelerator.register_for_checkpointing(dataset)
    seen: list[list[int]] = []
    rest: list[list[int]] = []
    for i, batch in enumerate(loader):
        batch = batch.to(accelerator.device)
        seen.append(batch.index.tolist())
        # Only the case "unprepared" takes training steps, which wait for the other ranks.
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


def error_of(n_workers: int, *, dispatch: bool) -> str:
    """Return the name of the error that a prepared loader of a data set raises, or "" if it yields a batch."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, seed=3)
    # Accelerate shards only loaders with a batch size.
    batching = {"batch_size": None} if dispatch else {"batch_size": 1, "collate_fn": operator.itemgetter(0)}
    loader = accelerator.prepare(DataLoader(dataset, num_workers=n_workers, **batching))
    try:
        next(iter(loader))
    except (RuntimeError, dasksc.InputError) as error:  # DataLoader raises the errors of workers as their base class
        return "InputError" if "InputError" in f"{type(error).__name__} {error}" else repr(error)
    return ""


def refused() -> dict[str, str]:
    """Return the errors of loaders that divide the batches once more."""
    return {
        "dispatched": error_of(0, dispatch=True),
        "sharded": error_of(0, dispatch=False),
        "sharded by workers": error_of(2, dispatch=False),
    }


found = {case: read(case) for case in ("unprepared", "prepared")} | {"refused": refused()}
(folder / f"{Accelerator(cpu=True).process_index}.json").write_text(json.dumps(found))
leave_group()

"""Train with DeepSpeed on CPUs under torchrun, and write the rows of each rank before and after resuming."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch

import dasksc

path, folder = sys.argv[1], Path(sys.argv[2])
deepspeed.init_distributed(dist_backend="gloo")


def start() -> tuple[deepspeed.DeepSpeedEngine, dasksc.scDataset]:
    """Create an engine and a data set, as a user's program does."""
    model = torch.nn.Linear(17, 1)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-6, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    # With training_data=, DeepSpeed would shard the batches a second time.
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, obs=["flag"], seed=3)
    return engine, dataset


def train(
    engine: deepspeed.DeepSpeedEngine, dataset: dasksc.scDataset, save_after: int | None = None
) -> list[list[int]]:
    """Train on the remaining batches of an epoch."""
    seen = []
    for batch in dataset:
        batch = batch.to(engine.device)
        seen.append(batch.index.tolist())
        engine.backward(engine(batch.X).mean())
        engine.step()
        if len(seen) == save_after:
            engine.save_checkpoint(str(folder / "saved"), client_state={"dataset": dataset.state_dict()})
    return seen


engine, dataset = start()
seen = train(engine, dataset, save_after=2)
engine, dataset = start()
_, client_state = engine.load_checkpoint(str(folder / "saved"))
dataset.load_state_dict(client_state["dataset"])
rest = train(engine, dataset)
(folder / f"{dataset.rank}.json").write_text(json.dumps({"seen": seen, "rest": rest}))
deepspeed.comm.destroy_process_group()

#!/usr/bin/env python
"""Train a cell-type classifier with DDP on the GPUs (NCCL) or CPUs (Gloo) of any number of nodes.

    torchrun --nproc_per_node=2 train_ddp.py atlas.h5ad --checkpoint run.pt
    torchrun --nproc_per_node=3 train_ddp.py atlas.h5ad --checkpoint run.pt --resume

Under mpirun or srun, set MASTER_ADDR to the node of rank 0, and MASTER_PORT to a free port on it. All cell types are
drawn equally often. A step uses `--batch-size` x `--accumulate` cells per rank, and fewer at the end of an epoch.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dasksc


def scored(model, batch, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a batch, and a tensor (loss, correct predictions, cells) to sum over ranks."""
    batch = batch.to(args.device, non_blocking=True)
    scores, labels = model(torch.log1p(batch.X)), batch.obs[args.label]
    loss = cross_entropy(scores, labels, reduction="sum")
    right = (scores.argmax(dim=1) == labels).sum()
    return loss, torch.stack([loss.detach(), right, torch.full_like(right, len(labels))]).double()


def train_epoch(model, optimizer, dataset, args, done, save) -> torch.Tensor:
    """Train until the end of the epoch or `--max-steps`, whichever comes first."""
    model.train()
    sums, batches = torch.zeros(3, dtype=torch.float64, device=args.device), iter(dataset)
    while done["steps"] != args.max_steps and (group := list(islice(batches, args.accumulate))):
        n_cells = sum(len(batch.X) for batch in group)  # equal on all ranks; fewer in the last step
        for i, batch in enumerate(group, start=1):
            with nullcontext() if i == len(group) else model.no_sync():  # all-reduce once per step
                loss, counts = scored(model, batch, args)
                (loss / n_cells).backward()
            sums += counts
        optimizer.step()
        optimizer.zero_grad()
        done["steps"] += 1
        if done["steps"] % args.save_every == 0:
            save()
    return sums


def main() -> None:
    """Train on this rank's shard."""
    parser = argparse.ArgumentParser(description="Train a cell-type classifier under torchrun.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1, help="number of steps after which to stop; -1: no limit")
    parser.add_argument("--batch-size", type=int, default=128, help="cells in a batch, per rank")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step, per rank")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate per rank, multiplied by the world size")
    parser.add_argument("--checkpoint", help="checkpoint file, written every --save-every steps and after each epoch")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint, on any number of ranks")
    args = parser.parse_args()
    on_gpu, world = torch.cuda.is_available(), dasksc.World.detect()  # from the variables of torchrun, mpirun or srun
    args.device = torch.device("cuda", world.rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=world.rank, world_size=world.world_size)
    adata = dasksc.open(args.atlas, obs=[args.label])
    held_out = np.random.default_rng(0).random(adata.n_obs) < 0.1  # the same on every rank
    balanced = dasksc.ClassBalancedSampling(label_key=args.label, indices=np.flatnonzero(~held_out))
    every_cell = dasksc.Streaming(indices=np.flatnonzero(held_out))
    common = {"batch_size": args.batch_size, "fetch_factor": 64, "seed": 0, "obs": [args.label], "pin_memory": on_gpu}
    training = dasksc.scDataset(adata, balanced, progress=world.rank == 0, **common)
    validation = dasksc.scDataset(adata, every_cell, equal_ranks=False, **common)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(adata.n_vars, len(training.categories[args.label])).to(args.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr * world.world_size)
    parts, done = {"model": model.module, "optimizer": optimizer, "data": training}, {"steps": 0}
    if args.resume:
        saved = torch.load(args.checkpoint, map_location=args.device)
        done = saved["done"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        optimizer.param_groups[0]["lr"] = args.lr * world.world_size  # scaled by this world size, not the saved one

    def save() -> None:
        if args.checkpoint and world.rank == 0:  # the states are equal on all ranks
            torch.save({n: part.state_dict() for n, part in parts.items()} | {"done": done}, args.checkpoint + "~")
            os.replace(args.checkpoint + "~", args.checkpoint)
        dist.barrier()  # no rank continues before the file is written

    while (epoch := training.state_dict()["epoch"]) < args.epochs and done["steps"] != args.max_steps:
        start = time.perf_counter()
        trained = train_epoch(model, optimizer, training, args, done, save)
        elapsed_s = time.perf_counter() - start
        save()
        model.eval()
        with torch.no_grad():  # the bare model does not synchronize, so batch counts of ranks may differ
            held = sum((scored(model.module, batch, args)[1] for batch in validation), torch.zeros_like(trained))
        sums = torch.stack([trained, held])
        dist.all_reduce(sums)  # sums rather than means: every cell has the same weight
        if world.rank == 0:
            speed = sums[0, 2] / elapsed_s
            print(f"epoch {epoch}: {speed:,.0f} cells/s on {world.world_size} ranks ({args.device.type})")
            for name, (loss, right, n_cells) in zip(("training", "validation"), sums.tolist(), strict=True):
                print(f"  {name:10}  loss {loss / n_cells:.3f}  accuracy {right / n_cells:.1%}", flush=True)
    time.sleep(0.2)  # destroy_process_group holds the GIL while it waits for a thread of Gloo that needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

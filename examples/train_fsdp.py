#!/usr/bin/env python
"""Train a cell-type classifier with FSDP2, sharded across GPUs (NCCL) or CPU processes (Gloo).

    torchrun --nproc_per_node=2 train_fsdp.py atlas.h5ad --checkpoint run
    torchrun --nproc_per_node=3 train_fsdp.py atlas.h5ad --checkpoint run --resume

Parameters, gradients and optimizer states are sharded. Gathering a layer is a collective operation: all ranks need the
same number of batches, as dasksc guarantees. All ranks write into one folder, and any number of ranks can load it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import dasksc


def sharded_model(n_genes: int, n_labels: int, width: int, mesh, on_gpu: bool) -> torch.nn.Module:
    """Build a classifier with three layers, each of which is a sharding unit."""
    layers = [torch.nn.Linear(n_genes, width), torch.nn.Linear(width, width), torch.nn.Linear(width, n_labels)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if on_gpu else None, reduce_dtype=torch.float32)
    for layer in [*layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def main() -> None:
    """Train on this rank's shard."""
    parser = argparse.ArgumentParser(description="Train a sharded cell-type classifier under torchrun.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1, help="number of steps after which to stop; -1: no limit")
    parser.add_argument("--batch-size", type=int, default=128, help="cells in a batch, per rank")
    parser.add_argument("--width", type=int, default=256, help="width of the hidden layers")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", help="folder for the checkpoints of each epoch and of the last step")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint, on any number of ranks")
    args = parser.parse_args()

    on_gpu, world = torch.cuda.is_available(), dasksc.World.detect()  # from the variables of torchrun, mpirun or srun
    device = torch.device("cuda", world.rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=world.rank, world_size=world.world_size)
    mesh = init_device_mesh(device.type, (world.world_size,), mesh_dim_names=("dp",))

    adata = dasksc.open(args.atlas, obs=[args.label])
    dataset = dasksc.scDataset(
        adata,
        dasksc.ClassBalancedSampling(label_key=args.label),
        batch_size=args.batch_size,
        fetch_factor=64,
        obs=[args.label],
        seed=0,
        group=mesh,
        pin_memory=on_gpu,
    )
    torch.manual_seed(0)
    model = sharded_model(adata.n_vars, len(dataset.categories[args.label]), args.width, mesh, on_gpu).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    done = {"epochs": 0, "steps": 0}

    def state() -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "data": dataset.state_dict(), "done": done}

    if args.resume:
        saved = state()
        # A checkpoint that has metadata is complete, because the metadata are written last.
        latest = max(Path(args.checkpoint).glob("*/.metadata"), key=lambda file: int(file.parent.name)).parent
        dcp.load(saved, checkpoint_id=latest)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        dataset.load_state_dict(saved["data"])
        done = saved["done"]

    while done["epochs"] < args.epochs and done["steps"] != args.max_steps:
        start, sums = time.perf_counter(), torch.zeros(3, dtype=torch.float64, device=device)
        for batch in dataset:
            batch = batch.to(device, non_blocking=True)
            labels = batch.obs[args.label]
            scores = model(torch.log1p(batch.X))
            loss = cross_entropy(scores.float(), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
            optimizer.step()
            optimizer.zero_grad()
            right = (scores.argmax(dim=1) == labels).sum()
            sums += torch.stack([loss.detach() * len(labels), right, torch.full_like(right, len(labels))])
            done["steps"] += 1
            if done["steps"] == args.max_steps:
                break
        else:
            done["epochs"] += 1
        dist.all_reduce(sums)
        total_loss, right, n_cells = sums.tolist()
        if world.rank == 0:
            speed = n_cells / (time.perf_counter() - start)
            print(f"step {done['steps']}: {speed:,.0f} cells/s on {world.world_size} ranks ({device.type})")
            print(f"  training  loss {total_loss / n_cells:.3f}  accuracy {right / n_cells:.1%}", flush=True)
        if args.checkpoint:
            dcp.save(state(), checkpoint_id=Path(args.checkpoint) / str(done["steps"]))
    time.sleep(0.2)  # destroy_process_group holds the GIL while it waits for a thread of Gloo that needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Predict the effects of perturbations in held-out conditions, from sets of cells and matched controls.

    torchrun --nproc_per_node=2 train_perturbation.py
    torchrun --nproc_per_node=2 train_perturbation.py screen.h5ad --by cell_line gene --control non-targeting

Without a file, the program simulates a screen with known effects. A perturbation affects its genes only in cell lines
that express them. Half of the perturbations are held out in one cell line. The controls of this line remain in the
training data. The model embeds a set of control cells, adds an embedding of the perturbation, and applies attention
across the cells. On the held-out conditions, the program compares the model with two baselines: the mean effect of all
perturbations, and the mean effect of the same perturbation in the other cell lines.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dasksc


class SetModel(nn.Module):
    """Transformer that predicts the cells of a perturbed set from a set of control cells."""

    def __init__(self, n_genes: int, n_perturbations: int, width: int = 128) -> None:
        super().__init__()
        self.cell = nn.Linear(n_genes, width)
        self.perturbation = nn.Embedding(n_perturbations, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.across_cells = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.response = nn.Linear(width, n_genes)
        self.effect = nn.Embedding(n_perturbations, n_genes)
        nn.init.normal_(self.effect.weight, std=0.01)

    def forward(self, controls: torch.Tensor, perturbation: torch.Tensor) -> torch.Tensor:
        """Return the predicted cells, shape (n_sets, set_size, n_genes)."""
        hidden = self.across_cells(self.cell(controls) + self.perturbation(perturbation)[:, None])
        return controls + self.response(hidden) * self.effect(perturbation)[:, None]


def log_normalised(counts: torch.Tensor) -> torch.Tensor:
    """Normalize the counts to 1,000 per cell, and return their log1p."""
    return torch.log1p(1e3 * counts / counts.sum(dim=1, keepdim=True).clamp(min=1))


def sets_of(batch: dasksc.Batch, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return controls and targets, shape (n_sets, set_size, n_genes), and the perturbation of each set."""
    n_sets = len(batch.sets)
    controls, targets = (log_normalised(part.X).unflatten(0, (n_sets, -1)) for part in (batch.control, batch))
    return controls, targets, codes[batch.sets]


def distance(predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the energy distance (without its constant term) plus the squared distance of means, averaged over sets."""

    def mean_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cdist(one, other).mean(dim=(1, 2))

    energy = 2 * mean_distance(predicted, targets) - mean_distance(predicted, predicted)
    return (energy + (predicted.mean(dim=1) - targets.mean(dim=1)).square().sum(dim=1)).mean()


def mean_effects(dataset: dasksc.scDataset, codes: torch.Tensor, n_genes: int, predict=None) -> torch.Tensor:
    """Return the mean effect of each group over all sets and ranks, shape (n_groups, n_genes)."""
    sums = torch.zeros(len(dataset.groups), n_genes + 1, dtype=torch.float64)
    for batch in dataset:
        controls, cells, perturbation = sets_of(batch, codes)
        if predict is not None:
            cells = predict(controls, perturbation)
        effect = (cells - controls).mean(dim=1)
        sums.index_add_(0, batch.sets, torch.cat([effect, torch.ones(len(effect), 1)], dim=1).double())
    dist.all_reduce(sums)
    return sums[:, :-1] / sums[:, -1:]


def main() -> dict[str, float]:
    """Train on this rank's shard; return the error of the model and of each baseline over the held-out conditions."""
    parser = argparse.ArgumentParser(description="Predict held-out perturbations under torchrun.")
    parser.add_argument("atlas", nargs="?", help="an .h5ad or .zarr with raw counts in X (default: a simulated screen)")
    parser.add_argument("--by", nargs=2, default=["cell_line", "gene"], help="obs columns: context and perturbation")
    parser.add_argument("--control", default="non-targeting", help="label of the control cells")
    parser.add_argument("--set-size", type=int, default=32, help="number of cells in a set")
    parser.add_argument("--sets", type=int, default=8, help="number of sets in a batch, per rank")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cells", type=int, default=40_000, help="number of cells in the simulated screen")
    args = parser.parse_args()
    world = dasksc.World.detect()
    dist.init_process_group("gloo", rank=world.rank, world_size=world.world_size)
    if args.atlas is None:
        args.atlas = Path(tempfile.gettempdir()) / f"screen-{args.cells}.h5ad"
        if world.rank == 0 and not args.atlas.exists():
            dasksc.datasets.synthetic_screen(args.atlas, args.cells)
        dist.barrier()
    adata = dasksc.open(args.atlas, obs=args.by)
    context, perturbation = (adata.obs[name] for name in args.by)
    names = [name for name in perturbation.cat.categories if name != args.control]
    unseen = (context == context.cat.categories[-1]) & perturbation.isin(names[1::2])

    sets = dasksc.CellSets(args.by, args.set_size, control={args.by[1]: args.control}, indices=~unseen.to_numpy())
    held_out = replace(sets, indices=unseen.to_numpy(), control_indices=slice(None), replace=False, incomplete="drop")
    common = {"batch_size": args.sets * args.set_size, "fetch_factor": 8, "seed": 0, "scheduler": "threads"}
    training = dasksc.scDataset(adata, sets, **common)
    testing = dasksc.scDataset(adata, held_out, equal_ranks=False, **common)

    def codes_of(dataset: dasksc.scDataset) -> torch.Tensor:
        return torch.tensor([perturbation.cat.categories.get_loc(name) for name in dataset.groups[args.by[1]]])

    torch.manual_seed(0)
    model = DistributedDataParallel(SetModel(adata.n_vars, len(perturbation.cat.categories)))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.epochs * len(training))
    codes = codes_of(training)
    for epoch in range(args.epochs):
        start, total, n_cells = time.perf_counter(), 0.0, 0
        for batch in training:
            controls, targets, which = sets_of(batch, codes)
            loss = distance(model(controls, which), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total, n_cells = total + loss.item(), n_cells + 2 * len(batch.index)
        if world.rank == 0:
            rate = n_cells * world.world_size / (time.perf_counter() - start)
            print(f"epoch {epoch}: loss {total / len(training):.3f}  {rate:,.0f} cells/s", flush=True)

    model.eval()
    with torch.no_grad():  # the bare model does not synchronize, so batch counts of ranks may differ
        true = mean_effects(testing, codes_of(testing), adata.n_vars)
        predicted = mean_effects(testing, codes_of(testing), adata.n_vars, predict=model.module)
        whole = dasksc.scDataset(adata, replace(sets, replace=False), equal_ranks=False, **common)
        seen = mean_effects(whole, codes, adata.n_vars)
    same = torch.stack([seen[codes == code].mean(dim=0) for code in codes_of(testing)])
    mean = seen.mean(dim=0).expand_as(true)
    guesses = {"set model": predicted, "same perturbation, other lines": same, "mean of all": mean}
    errors = {name: float((guess - true).square().mean().sqrt()) for name, guess in guesses.items()}
    if world.rank == 0:
        print(f"{len(true)} conditions held out, error of their mean effects:")
        for name, error in errors.items():
            print(f"  {name:31} {error:.3f}", flush=True)
    # A thread of Gloo releases tensors a moment after a collective operation ends, and may need the GIL to do so.
    # Without this pause, destroy_process_group can deadlock, because it holds the GIL while it waits for that thread.
    time.sleep(0.2)
    dist.destroy_process_group()
    return errors


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Learn the cell types of 700 blood cells, from the file that comes with scanpy.

python quickstart.py
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import dasksc

try:
    path = files("scanpy.datasets") / "10x_pbmc68k_reduced.h5ad"
except ModuleNotFoundError:
    raise SystemExit("quickstart.py reads a file that comes with scanpy: pip install scanpy") from None

# Nothing is read here but the tables: adata.X is a Dask array.
adata = dasksc.open(path)
print(adata)

held_out = np.random.default_rng(0).random(adata.n_obs) < 0.2
training = dasksc.scDataset(
    adata,
    dasksc.ClassBalancedSampling(label_key="bulk_labels", indices=np.flatnonzero(~held_out)),
    batch_size=64,
    obs=["bulk_labels"],
    seed=0,
)
validation = dasksc.scDataset(
    adata,
    dasksc.Streaming(indices=np.flatnonzero(held_out)),
    batch_size=64,
    obs=["bulk_labels"],
)

torch.manual_seed(0)
labels = training.categories["bulk_labels"]
model = torch.nn.Linear(adata.n_vars, len(labels))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):  # every epoch is another draw
    for batch in training:
        loss = cross_entropy(model(batch.X), batch.obs["bulk_labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

right = sum((model(b.X).argmax(dim=1) == b.obs["bulk_labels"]).sum().item() for b in validation)
print(f"{right} of {held_out.sum()} held-out cells recognised as one of {', '.join(labels)}")

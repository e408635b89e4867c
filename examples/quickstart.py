#!/usr/bin/env python
"""Learn the cell types of a synthetic atlas, and predict them for the cells of two held-out donors.

python quickstart.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import dasksc

with tempfile.TemporaryDirectory() as folder:
    path = dasksc.datasets.synthetic(Path(folder) / "atlas.h5ad", n_obs=10_000)

    # X is a lazy Dask array: opening reads the tables only.
    adata = dasksc.open(path)
    print(adata)

    held_out = adata.obs["donor"].isin(["donor_6", "donor_7"]).to_numpy()
    training = dasksc.scDataset(
        adata,
        dasksc.ClassBalancedSampling(label_key="cell_type", indices=~held_out),
        batch_size=64,
        obs=["cell_type"],
        seed=0,
    )
    validation = dasksc.scDataset(adata, dasksc.Streaming(indices=held_out), batch_size=64, obs=["cell_type"])

    torch.manual_seed(0)
    model = torch.nn.Linear(adata.n_vars, len(training.categories["cell_type"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):  # each epoch draws different cells
        for batch in training:
            loss = cross_entropy(model(batch.X.log1p()), batch.obs["cell_type"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")

    right = sum((model(b.X.log1p()).argmax(dim=1) == b.obs["cell_type"]).sum().item() for b in validation)
    print(f"{right} of {held_out.sum()} cells of held-out donors recognized")

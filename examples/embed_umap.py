#!/usr/bin/env python
"""Train a classifier on an atlas, write the embedding of every cell, and draw a UMAP of a sample of cells.

    pip install 'dasksc[train,demo]'                    # scanpy computes and draws the UMAP
    python embed_umap.py atlas.h5ad --color cell_type
    python embed_umap.py                                # on a synthetic atlas

The program writes the embedding to ``emb.zarr`` next to the figure. `dasksc.open` attaches the embedding to the atlas.
For the UMAP, the program reads only the rows of the sampled cells.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import anndata
import numpy as np
import torch
from make_atlas import make_atlas

import dasksc
from dasksc.train.models import MLPClassifier


def train(path: Path, *, label: str, width: int, n_epochs: int, device: torch.device) -> MLPClassifier:
    """Train a classifier on shuffled blocks of 16 cells; the last hidden layer is the embedding."""
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(16), batch_size=256, seed=0, obs=[label], device=device)
    torch.manual_seed(0)
    n_genes, n_labels = dasksc.open(path, obs=[], names=False).n_vars, len(dataset.categories[label])
    model = MLPClassifier(label, n_genes, n_labels, hidden_dim=width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(n_epochs):
        accuracies = []
        for batch in dataset:
            found = model(batch)
            optimizer.zero_grad()
            found["loss"].backward()
            optimizer.step()
            accuracies.append(found["accuracy"].detach())
        print(f"epoch {epoch}: accuracy {torch.stack(accuracies).mean():.0%}")
    return model


def drawn(path: Path, emb: Path, *, color: str, n_cells: int) -> anndata.AnnData:
    """Return the embedding and the labels of a random sample of cells."""
    adata = dasksc.open(path, obs=[color], attach={"obsm/X_emb": emb})
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(adata.n_obs, min(n_cells, adata.n_obs), replace=False))
    return anndata.AnnData(adata.obsm["X_emb"][rows].compute(), obs=adata.obs.iloc[rows])


def draw(cells: anndata.AnnData, figure: Path, *, color: str) -> None:
    """Draw a UMAP, and print the fraction of neighbors that share a label."""
    warnings.filterwarnings("ignore")
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt
    import scanpy as sc

    sc.pp.neighbors(cells, n_neighbors=15, use_rep="X")
    sc.tl.umap(cells, random_state=0)
    first, second = cells.obsp["connectivities"].nonzero()
    labels = cells.obs[color].to_numpy()
    by_chance = (cells.obs[color].value_counts(normalize=True) ** 2).sum()
    print(f"neighbors that share {color}: {np.mean(labels[first] == labels[second]):.0%}, by chance {by_chance:.0%}")
    plot = sc.pl.umap(cells, color=color, show=False, title=f"{cells.n_obs:,} cells by {color}")
    plot.figure.savefig(figure, dpi=120, bbox_inches="tight")
    plt.close("all")


def main() -> None:
    """Train, embed and draw with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("atlas", nargs="?", type=Path, help="h5ad file or Zarr store (default: a synthetic atlas)")
    parser.add_argument("--color", default="cell_type", help="obs column to learn and to draw")
    parser.add_argument("--figure", type=Path, default=Path("umap.png"))
    parser.add_argument("--cells", type=int, default=20_000, help="number of cells in the synthetic atlas")
    parser.add_argument("--genes", type=int, default=2_000, help="number of genes in the synthetic atlas")
    parser.add_argument("--drawn", type=int, default=3_000, help="number of cells in the figure")
    parser.add_argument("--width", type=int, default=64, help="number of dimensions of the embedding")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = options.atlas
        if path is None:
            path = Path(folder) / "atlas.h5ad"
            make_atlas(path, options.cells, options.genes)
        model = train(path, label=options.color, width=options.width, n_epochs=options.epochs, device=device)
        emb = options.figure.with_name("emb.zarr")
        begun = time.perf_counter()
        report = dasksc.predict(model.embed, path, emb, batch_size=1024, overwrite=True)
        print(f"embedded {report.n_predicted:,} cells in {time.perf_counter() - begun:.1f} s: {emb}")
        draw(drawn(path, emb, color=options.color, n_cells=options.drawn), options.figure, color=options.color)
    print(f"drew {options.figure}")


if __name__ == "__main__":
    main()

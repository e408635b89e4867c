#!/usr/bin/env python
"""Train scVI on an atlas on disk, and write the latent representation of every cell.

python train_scvi.py atlas.h5ad --batch-key plate --out latent.npy
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import scvi

import dasksc
from dasksc.integrations.scvi import SCVIDataModule


def main() -> None:
    """Train scVI, and write the latent representation."""
    parser = argparse.ArgumentParser(description="Train scVI from a file.")
    parser.add_argument("atlas", help="an .h5ad or .zarr with raw counts in X")
    parser.add_argument("--batch-key", help="categorical obs column with the batches to correct for")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--out", default="latent.npy")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", module="scvi|lightning")
    scvi.settings.seed = 0
    data = SCVIDataModule(
        args.atlas,
        batch_size=128,
        train=dasksc.BlockShuffling(block_size=16),
        batch_key=args.batch_key,
        seed=0,
    )
    model = scvi.model.SCVI(registry=data.registry, n_hidden=64)
    model.train(datamodule=data, max_epochs=args.epochs, enable_progress_bar=False, logger=False)
    latent = model.get_latent_representation(dataloader=data.inference_dataloader(batch_size=1024))
    np.save(args.out, latent)
    print(f"{len(latent)} cells in {latent.shape[1]} dimensions: {args.out}")


if __name__ == "__main__":
    main()

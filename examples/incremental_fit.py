#!/usr/bin/env python
"""Fit a scikit-learn classifier to an atlas chunk by chunk, optionally on a Dask cluster.

    python incremental_fit.py atlas.h5ad --cluster

`dataset.to_dask()` returns a shuffled epoch as one lazy Dask array. Its rows have the order in which the data set
yields them. On a cluster, the next two chunks are computed while the model is fitted to the current one. No other
chunks are in memory.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import dask
import numpy as np
from dask.distributed import Client
from sklearn.linear_model import SGDClassifier

import dasksc


def chunks(epoch: Any, n_ahead: int) -> Iterator[Any]:
    """Yield the computed chunks of an epoch in order; on a cluster, compute `n_ahead` of them in advance."""
    delayed = epoch.to_delayed().ravel().tolist()
    try:
        from distributed import default_client

        client = default_client()
    except ValueError:
        yield from (dask.compute(chunk)[0] for chunk in delayed)
        return
    arriving: deque[Any] = deque()
    while delayed or arriving:
        while delayed and len(arriving) <= n_ahead:
            arriving.append(client.compute(delayed.pop(0)))
        yield arriving.popleft().result()


def main() -> None:
    """Fit and evaluate the classifier with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("atlas")
    parser.add_argument("--label", default="cell_type", help="obs column to predict")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--cluster", action="store_true", help="start a Dask cluster of two worker processes")
    options = parser.parse_args()

    adata = dasksc.open(options.atlas, obs=[options.label])
    codes = adata.obs[options.label].cat.codes.to_numpy()
    held_out = np.random.default_rng(0).random(adata.n_obs) < 0.1
    training = dasksc.scDataset(
        adata,
        dasksc.BlockShuffling(block_size=16, indices=np.flatnonzero(~held_out)),
        batch_size=64,
        fetch_factor=32,
        layout="csr",
        seed=0,
    )
    model = SGDClassifier(loss="log_loss", random_state=0)
    classes = np.unique(codes)
    # A Client without an address starts a cluster on this machine, and closes it at the end.
    local: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with Client(**local) if options.cluster else nullcontext():
        for number in range(options.epochs):
            plan = training.plan(number)
            for k, X in enumerate(chunks(training.to_dask(number), n_ahead=2)):
                fetch = plan.fetch(k)
                model.partial_fit(X.log1p(), codes[fetch.rows[fetch.order]], classes=classes)

    test = np.flatnonzero(held_out)
    right = model.predict(adata.X[test].compute().log1p()) == codes[test]
    print(f"accuracy {right.mean():.1%} on {len(test)} held-out cells")


if __name__ == "__main__":
    main()

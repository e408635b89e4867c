"""In a process of jax.distributed: read two epochs, pass the batches to JAX, and write the rows read."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import dasksc

address, n_processes, process, path, out = sys.argv[1:]
jax.distributed.initialize(address, int(n_processes), int(process))
dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=3, obs=["cell_type"], seed=0)
total = jax.jit(jnp.sum)
epochs, sums = [], []
for _ in range(2):
    rows = []
    for batch in dataset:
        X = jnp.from_dlpack(batch.X)
        assert X.dtype == np.float32
        assert X.shape == (len(batch.index), 17)
        sums.append(float(total(X)))
        rows += batch.index.tolist()
    epochs.append(rows)
world = dasksc.World.detect()
found = {"source": world.source, "rank": dataset.rank, "size": dataset.world_size}
with open(f"{out}.{process}", "w") as file:
    json.dump(found | {"epochs": epochs, "sum": sum(sums)}, file)
jax.distributed.shutdown()

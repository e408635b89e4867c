"""Write the rank of this process and the rows it reads, under any launcher and without a process group."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import dasksc

dataset = dasksc.scDataset(np.arange(103), dasksc.BlockShuffling(4), batch_size=8, fetch_factor=2, seed=0)
world = dasksc.World.detect()
report = {
    "rank": world.rank,
    "world_size": world.world_size,
    "local_world_size": world.local_world_size,
    "source": world.source,
    "batches": [batch.tolist() for batch in dataset],
}
(Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(report))

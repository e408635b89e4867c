"""Read an epoch in a process whose memory may be limited: ``limited_epoch.py IN``; print figures as JSON."""

from __future__ import annotations

import hashlib
import json
import sys

import psutil

import dasksc
from dasksc.memory import own_bytes

dataset = dasksc.scDataset(sys.argv[1], dasksc.BlockShuffling(64), 64, 64, layout="csr", rank=0, world_size=1, seed=0)
is_mapped = not dataset.memory.reading_mode().unmapped
before, digest, n_rows = psutil.Process().io_counters().read_bytes, hashlib.blake2b(digest_size=16), 0
for batch in dataset:
    digest.update(batch.values().numpy().tobytes())
    digest.update(batch.col_indices().numpy().tobytes())
    n_rows += batch.shape[0]
n_read = psutil.Process().io_counters().read_bytes - before  # from the disk
found = {"digest": digest.hexdigest(), "n_rows": n_rows, "read": n_read, "anon": own_bytes(), "is_mapped": is_mapped}
print(json.dumps(found))

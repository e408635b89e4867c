#!/usr/bin/env python
"""Read an epoch in a process whose memory may be limited, and print a summary.

    python tests/programs/limited_epoch.py atlas.h5ad

The last line is JSON: a digest of the batches, the number of rows, the number of bytes read from disk, the anonymous
memory of the process at the end, and whether files were mapped.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import dasksc
from dasksc.memory.limits import own_bytes


def main(path: str) -> None:
    dataset = dasksc.scDataset(path, dasksc.BlockShuffling(64), 64, 64, layout="csr", rank=0, world_size=1, seed=0)
    is_mapped = not dataset.memory.reading_mode().unmapped
    before = read_bytes()
    digest, n_rows = hashlib.blake2b(digest_size=16), 0
    for batch in dataset:
        digest.update(batch.values().numpy().tobytes())
        digest.update(batch.col_indices().numpy().tobytes())
        n_rows += batch.shape[0]
    found = {"digest": digest.hexdigest(), "n_rows": n_rows, "read": read_bytes() - before, "anon": own_bytes()}
    print(json.dumps(found | {"is_mapped": is_mapped}))


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    main(sys.argv[1])

#!/usr/bin/env python
"""Read an epoch in a process whose memory may be limited, and print a summary.

    python tests/programs/limited_epoch.py atlas.h5ad '{"fetch_factor": 64}'

The program prints "ready" after the first batches, waits for a line of input and reads the remaining batches. The
last line is JSON: a digest of the batches, the number of rows, the number of bytes read from disk, the anonymous memory
of the process at the end, and whether files were mapped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path

import dasksc
from dasksc.memory.limits import own_bytes


class Listener(logging.Handler):
    """Handler that keeps log messages."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.told = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def main(path: str, options: str) -> None:
    messages: list[str] = []
    logger = logging.getLogger("dasksc.loader")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener(messages))
    dataset = dasksc.scDataset(
        path, dasksc.BlockShuffling(64), 64, layout="csr", rank=0, world_size=1, seed=0, **json.loads(options)
    )
    before = read_bytes()
    digest, n_rows = hashlib.blake2b(digest_size=16), 0
    for i, batch in enumerate(dataset):
        digest.update(batch.values().numpy().tobytes())
        digest.update(batch.col_indices().numpy().tobytes())
        n_rows += batch.shape[0]
        if i == 8:
            print("ready", flush=True)
            sys.stdin.readline()
    found = {"digest": digest.hexdigest(), "n_rows": n_rows, "read": read_bytes() - before, "anon": own_bytes()}
    print(json.dumps(found | {"is_mapped": not any("rather than mapped" in one for one in messages)}))


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


if __name__ == "__main__":
    main(*sys.argv[1:3])

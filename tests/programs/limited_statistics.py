#!/usr/bin/env python
"""Compute statistics and variable genes in a process whose memory may be limited, and print what was found.

    python tests/programs/limited_statistics.py atlas.h5ad

The last line is JSON: sums over all genes, a digest of the genes found, and the peak of anonymous memory beyond what
the process held before, in bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path

import dasksc


def main(path: str) -> None:
    dasksc.statistics(path, filter="plate.str.endswith('1')")  # compiles
    dasksc.highly_variable_genes(path, 100, "seurat_v3", filter="plate.str.endswith('1')")
    before, peaks, done = rss_anon_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peaks[0] = max(peaks[0], rss_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        found = dasksc.statistics(path, by="cell_type")
        genes = dasksc.highly_variable_genes(path, 1000, "seurat_v3", "plate")
    finally:
        done.set()
        sampler.join()
    digest = hashlib.blake2b(genes["highly_variable"].to_numpy().tobytes(), digest_size=16).hexdigest()
    sums = found.genes[["sum", "var", "count_nonzero"]].sum().tolist()
    print(json.dumps({"sums": sums, "n": found.groups.n_obs, "digest": digest, "peak": peaks[0] - before}))


def rss_anon_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    main(sys.argv[1])

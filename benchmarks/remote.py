#!/usr/bin/env python
"""Measure the share of a network link's bandwidth that an epoch uses.

    python benchmarks/remote.py --cells 100000

A loopback server in a separate process responds to each request after --latency, at a total rate of at most --mbits.
The program loads shuffled blocks from it, and --fetches sets the number of fetches. The used share of the link is the
number of transferred bytes per second, divided by the bandwidth. The exit status is 1 if it misses the target of 70%.
The program also reports the useful share: the stored size of the delivered rows, divided by the transferred bytes. The
remaining bytes are gaps between nearby rows, unneeded parts of chunks, and read-ahead. The useful share depends on the
file and on the sizes of blocks and fetches. The program also prints the warnings of `dasksc.check`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
from _atlas import add_options, atlas
from _reports import add_out, write_report

import dasksc

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.servers import serving

TARGET = 0.7


def serve(folder: str, latency_s: float, bytes_per_s: float, pipe: Connection) -> None:
    """Serve a folder, send its address, and answer each message with the bytes sent since the previous message."""
    with serving(Path(folder)) as server:
        server.faults.latency_s, server.faults.bytes_per_s = latency_s, bytes_per_s
        pipe.send(server.url)
        while pipe.recv():
            pipe.send((len(server.faults.requests), server.faults.sent_bytes))
            server.faults.requests.clear()
            server.faults.sent_bytes = 0


def stored_bytes(path: Path) -> int:
    """Return the stored size of the values and column indices of X, in bytes."""
    if path.is_dir():
        return sum(file.stat().st_size for name in ("data", "indices") for file in (path / "X" / name).rglob("*"))
    with h5py.File(path) as file:
        return sum(file["X"][name].id.get_storage_size() for name in ("data", "indices"))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--mbits", type=float, default=1000)
    parser.add_argument("--latency", type=float, default=0.03, help="latency of a response in seconds")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--fetches", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    options = parser.parse_args(arguments)

    path = Path(atlas(options)).absolute()
    bytes_per_s = options.mbits * 1e6 / 8
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(str(path.parent), options.latency, bytes_per_s, theirs), daemon=True
    )
    server.start()
    url = f"{ours.recv()}/{path.name}"
    started = time.perf_counter()
    adata = dasksc.open(url, obs=[])
    opened_s = time.perf_counter() - started
    dataset = dasksc.scDataset(
        adata,
        dasksc.BlockShuffling(block_size=options.block),
        batch_size=options.batch,
        fetch_factor=options.fetch // options.batch,
        layout="csr",
        rank=0,
        world_size=1,
        seed=0,
    )
    row_bytes = stored_bytes(path) / adata.n_obs
    warnings = dasksc.check(dataset).warnings
    for warning in warnings:
        print(f"dasksc.check: {warning}")
    next(iter(dataset))  # Compile kernels and read the row index.
    rounds = []
    for _ in range(options.rounds):
        ours.send(True)
        ours.recv()
        n_rows = 0
        started = time.perf_counter()
        for batch in dataset:
            n_rows += batch.shape[0]
            if n_rows >= options.fetches * options.fetch:
                break
        elapsed = time.perf_counter() - started
        ours.send(True)
        n_requests, sent = ours.recv()
        rounds.append({"share": sent / elapsed / bytes_per_s, "useful": n_rows * row_bytes / sent})
        print(
            f"{n_rows / elapsed:,.0f} cells/s, {rounds[-1]['share']:.0%} of the link used in {n_requests} requests; "
            f"{rounds[-1]['useful']:.0%} of the bytes in delivered rows"
        )
    ours.send(False)
    server.join()
    result = {
        "atlas": path.name,
        "mbits": options.mbits,
        "latency_s": options.latency,
        "opened_s": opened_s,
        "share": statistics.median(one["share"] for one in rounds),
        "useful": statistics.median(one["useful"] for one in rounds),
        "warnings": list(warnings),
    }
    write_report(options.out, result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    sys.exit(main()["share"] < TARGET)

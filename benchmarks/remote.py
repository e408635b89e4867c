#!/usr/bin/env python
"""What part of a link's bandwidth does an epoch get, over a network?

    python benchmarks/remote.py --cells 100000

A server on loopback, in a process of its own, answers each request after --latency and sends all answers together
at no more than --mbits. An epoch of shuffled blocks is loaded from it, batch by batch, as far as --fetches. The share
of the link that was used is what crossed it, per second; the exit status is 1 when that misses the target, 70%. How
much of that was wanted, the rows that were handed over, as they are stored, is told beside it: the rest is gaps between
rows that are close, parts of chunks that come whole, and what was read ahead. It depends on the file, and on the sizes
of blocks and fetches; what `dasksc.check` says of these is printed too.
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
    """Serve a folder, say where, and tell on every question what was sent since the last one."""
    with serving(Path(folder)) as server:
        server.faults.latency_s, server.faults.bytes_per_s = latency_s, bytes_per_s
        pipe.send(server.url)
        while pipe.recv():
            pipe.send((len(server.faults.requests), server.faults.sent_bytes))
            server.faults.requests.clear()
            server.faults.sent_bytes = 0


def stored_bytes(path: Path) -> int:
    """Bytes that the values and column numbers of X take on the disk."""
    if path.is_dir():
        return sum(file.stat().st_size for name in ("data", "indices") for file in (path / "X" / name).rglob("*"))
    with h5py.File(path) as file:
        return sum(file["X"][name].id.get_storage_size() for name in ("data", "indices"))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the command line says; return the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--mbits", type=float, default=1000)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds")
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
    next(iter(dataset))  # kernels are compiled, the index of the rows is read
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
        rounds.append({"share": sent / elapsed / bytes_per_s, "wanted": n_rows * row_bytes / sent})
        print(
            f"{n_rows / elapsed:,.0f} cells/s, {rounds[-1]['share']:.0%} of the link used in {n_requests} requests, of "
            f"which {rounds[-1]['wanted']:.0%} wanted"
        )
    ours.send(False)
    server.join()
    result = {
        "atlas": path.name,
        "mbits": options.mbits,
        "latency_s": options.latency,
        "opened_s": opened_s,
        "share": statistics.median(one["share"] for one in rounds),
        "wanted": statistics.median(one["wanted"] for one in rounds),
        "warnings": list(warnings),
    }
    write_report(options.out, result)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    sys.exit(main()["share"] < TARGET)

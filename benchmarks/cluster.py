#!/usr/bin/env python
"""Measure the cost of fetches on a Dask cluster, and of array code on X.

    python benchmarks/cluster.py --cells 200000

The program compares four ratios of rates with their targets. The rate of an in-process cluster is divided by the rate
of threads. The rate of two worker processes, which send results over loopback TCP, is divided by the rate of a bare
submit and direct gather of as many bytes. The rate with normalize_total and log1p as array code on X is divided by
the rate of plain X, and by the rate of the same operations on every dense batch. Finally, 64 ranks share a scheduler.
Their tasks do no I/O, but each carries as many row numbers as a real task: by default 3,277, a fifth of a fetch of
16,384 rows. Contenders take turns in separate processes, and the program reports medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _atlas import add_options, atlas
from _harness import Contender, Result, compete, median_and_spread, serve
from _reports import add_out, write_report

TARGET_SUM = 1e4

# Numerator, denominator, target of the ratio, and its description.
RATIOS = [
    ("cluster in process", "threads", 0.9, "LocalCluster(processes=False) / threads"),
    ("two workers", "bare", 0.8, "two worker processes / bare gather of as many bytes"),
    ("array code", "threads", 1 / 2.5, "normalize_total and log1p on X / plain X"),
    ("array code", "per batch", 3.0, "normalize_total and log1p on X / on every dense batch"),
]


# --- Contenders, each in a separate process -----------------------------------------------------------


def build(spec: dict[str, Any]) -> Callable[[], Iterator[Any]]:
    """Build the loader that `spec` describes."""
    import dasksc

    name = spec["name"]
    path: Any = spec["path"]
    if name == "array code":
        import scanpy as sc

        path = dasksc.open(path)
        sc.pp.normalize_total(path, target_sum=TARGET_SUM)
        sc.pp.log1p(path)
    scheduler: Any = "threads"
    if name in ("cluster in process", "two workers", "bare"):
        scheduler = client_of(processes=name != "cluster in process")
    dataset = dasksc.scDataset(
        path,
        dasksc.BlockShuffling(block_size=spec["block"]),
        batch_size=spec["batch"],
        fetch_factor=spec["fetch"] // spec["batch"],
        scheduler=scheduler,
        rank=0,
        world_size=1,
        seed=0,
    )
    if name == "bare":
        return lambda: bare(scheduler, dataset, spec["path"])
    if name == "per batch":
        return lambda: map(normalised, dataset)
    return lambda: iter(dataset)


def client_of(*, processes: bool) -> Any:
    """Return a client of a new local cluster."""
    import distributed

    n = len(os.sched_getaffinity(0))
    sizes = (2, 1) if processes else (1, n)
    cluster = distributed.LocalCluster(
        n_workers=sizes[0], threads_per_worker=sizes[1], processes=processes, dashboard_address=":0"
    )
    return distributed.Client(cluster, set_as_default=False)


def normalised(batch: Any) -> Any:
    """Apply the operations of the array code to a dense batch."""
    totals = batch.sum(dim=1, keepdim=True)
    totals[totals == 0] = 1
    return batch.mul_(TARGET_SUM / totals).log1p_()


_buffer: dict[int, Any] = {}


def same_buffer(i: int, n_bytes: int) -> Any:
    """Return a cached buffer as large as the result of a task of a fetch, so that creating it costs no time."""
    if n_bytes not in _buffer:
        _buffer[n_bytes] = np.ones(n_bytes, dtype=np.uint8)
    return _buffer[n_bytes]


def sent_bytes(path: str, *, n_rows: int) -> int:
    """Return the number of bytes that a worker sends for `n_rows` rows: values, columns, offsets and row numbers."""
    from distributed.protocol import serialize

    from dasksc.executor.tasks import FetchMatrices
    from dasksc.storage import open_matrix

    matrix = open_matrix(path, "X")
    rows = np.arange(min(n_rows, matrix.shape[0]), dtype=np.int64)
    _, frames = serialize(FetchMatrices({"X": matrix})(rows).compact())
    return round(sum(memoryview(frame).nbytes for frame in frames) * n_rows / len(rows))


def bare(client: Any, dataset: Any, path: str) -> Iterator[Any]:
    """Gather the bytes of an epoch directly from the workers, with as many tasks in flight as `dataset` keeps."""
    import torch

    mode = dataset.memory.reading_mode()
    n_rows = dataset.fetch_size // mode.n_parts
    row_bytes = sent_bytes(path, n_rows=n_rows) // n_rows
    n_tasks = dataset.plan().n_fetches * mode.n_parts
    arriving: deque[Any] = deque()
    depth = mode.depth
    ks = iter(range(n_tasks))
    while True:
        while len(arriving) < depth and (k := next(ks, None)) is not None:
            arriving.append(client.submit(same_buffer, k, n_rows * row_bytes, pure=False))
        if not arriving:
            return
        # Gather two results at a time, one from each worker.
        taken = [arriving.popleft() for _ in range(min(2, len(arriving)))]
        for buffer in client.gather(taken, direct=True):
            yield torch.from_numpy(buffer).reshape(n_rows, row_bytes)
        del taken


# --- Ranks that share a scheduler -----------------------------------------------------------------------


def nothing(rows: Any) -> int:
    """Run as a task without I/O."""
    return len(rows)


def scheduler_cpu(*, n_ranks: int, n_tasks: int, n_rows: int, folder: Path) -> dict[str, float]:
    """Measure the CPU time of a scheduler per task that carries `n_rows` row numbers, submitted by several ranks."""
    import distributed
    import psutil

    from dasksc.executor.window import Window

    file = folder / "scheduler.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    with (folder / "scheduler.log").open("w") as log:

        def start(kind: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "dask", kind, "--scheduler-file", str(file), "--host", "127.0.0.1"]
            return subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log)

        scheduler = start("scheduler", "--port", "0", "--dashboard-address", "127.0.0.1:0")
        workers = [start("worker", "--nthreads", "4", "--no-nanny", "--no-dashboard") for _ in range(2)]
    clients: list[Any] = []
    try:
        connect = {"scheduler_file": str(file), "timeout": 60, "set_as_default": False}
        clients += [distributed.Client(**connect) for _ in range(n_ranks)]
        clients[0].wait_for_workers(2, timeout=60)
        windows = [
            Window(
                nothing,
                range(n_tasks),
                name=f"epoch 0: dasksc-fetch-bench-r{rank}",
                argument=lambda k: np.arange(k * n_rows, (k + 1) * n_rows),
                depth=4,
                scheduler=client,
            )
            for rank, client in enumerate(clients)
        ]
        process = psutil.Process(scheduler.pid)
        before, start_s = process.cpu_times(), time.perf_counter()
        threads = [threading.Thread(target=deque, args=(window, 0)) for window in windows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed_s = time.perf_counter() - start_s
        after = process.cpu_times()
    finally:
        for client in clients:
            client.close()
        for process_ in [*workers, scheduler]:
            process_.terminate()
            process_.wait(timeout=30)
    cpu_s = (after.user + after.system - before.user - before.system) / (n_ranks * n_tasks)
    return {
        "n_ranks": n_ranks,
        "n_tasks": n_ranks * n_tasks,
        "n_rows": n_rows,
        "cpu_ms_per_task": 1000 * cpu_s,
        "tasks_per_s": n_ranks * n_tasks / elapsed_s,
        "ranks_at_100_ms": 0.1 / cpu_s,
    }


# --- The program ----------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a measurement in seconds")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds of work before the first round")
    parser.add_argument(
        "--ranks", type=int, default=64, help="number of ranks that share a scheduler (0: skip this part)"
    )
    parser.add_argument("--tasks", type=int, default=50, help="tasks per rank")
    parser.add_argument("--task-rows", type=int, default=3_277, help="rows per task")
    add_out(parser)
    parser.add_argument("--only", nargs="*", help="contenders to measure (default: all)")
    options = parser.parse_args(arguments)

    spec = {"path": str(atlas(options)), "block": options.block, "batch": options.batch}
    spec["fetch"] = options.fetch
    names = ["threads", "cluster in process", "two workers", "bare", "array code", "per batch"]
    report: dict[str, Any] = {"ratios": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = compete(
            [contender(one, spec, folder) for one in names if not options.only or one in options.only],
            rounds=options.rounds,
            seconds=options.seconds,
            warm_up_s=options.warm_up,
        )
        report["cells_per_s"] = {one.name: median_and_spread(one.produced) for one in results}
        print("\n| produced | cells/s |\n| --- | ---: |")
        for name_, (median, spread) in report["cells_per_s"].items():
            print(f"| {name_} | {median:,.0f} ± {spread:.0%} |")
        report["ratios"] = ratios(results)
        print("\n| ratio, median of rounds | measured | target |\n| --- | ---: | ---: |")
        for row in report["ratios"]:
            print(
                f"| {row['what']} | {row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f}) "
                f"| {row['target']:.2f} |"
            )
        if options.ranks:
            shared = scheduler_cpu(
                n_ranks=options.ranks, n_tasks=options.tasks, n_rows=options.task_rows, folder=folder
            )
            report["shared"] = shared
            print(
                f"\n{shared['n_ranks']} ranks on one scheduler: {shared['cpu_ms_per_task']:.2f} ms of its CPU "
                f"per task, {shared['tasks_per_s']:.0f} tasks/s here; with tasks of 100 ms it supports "
                f"{shared['ranks_at_100_ms']:.0f} ranks"
            )
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def contender(name: str, spec: dict[str, Any], folder: Path) -> Callable[[], Contender]:
    """Return a function that starts a contender."""
    script, log = Path(__file__).resolve(), folder / f"{name}.log"
    return lambda: Contender(name, python=sys.executable, script=script, spec={**spec, "name": name}, log=log)


def ratios(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the ratios of `RATIOS`, computed round by round."""
    rates = {result.name: result.produced for result in results}
    rows = []
    for ours, theirs, target, what in RATIOS:
        if ours in rates and theirs in rates:
            each = [mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True)]
            median = statistics.median(each)
            row = {"what": what, "ratio": median, "least": min(each), "most": max(each), "target": target}
            rows.append({**row, "met": median >= target})
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        serve(build, json.loads(sys.argv[2]))
    else:
        main()

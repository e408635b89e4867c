"""Measure the cost of planning: time to the first fetch, memory, and time per fetch relative to reading.

    python benchmarks/plans.py --cells 200000               # up to 10^8 rows
    python benchmarks/plans.py --cells 200000 --billion     # and 10^9

Each case runs several times in new processes, and the program prints medians. Kernels are compiled before the
clock starts, on a small data set with the same types. Memory is the peak of resident memory beyond the memory
for imports, kernels, and the codes or weights. Reading is measured as the rate of the loader on an atlas in the
same run. If scDataset is installed, its computation of an epoch's indices is measured for comparison.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _atlas import add_options, atlas
from _machine import read_through
from _reports import add_out, write_report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BATCH, FETCH_FACTOR = 64, 256
PEER_ROWS = 2 * 10**6
"""Maximum number of rows for which scDataset is timed. More take minutes, so the time for them is extrapolated."""

# Targets by case and block size: maxima for the first fetch, construction and a new epoch (seconds) and for memory
# beyond the data (bytes), and the minimum ratio of the peer's time to that of dasksc.
TARGETS: dict[tuple[str, int], dict[str, float]] = {
    ("blocks", 64): {"first_fetch_s": 5e-3, "peak_bytes": 1e6, "ratio": 500},
    ("balanced", 64): {"construct_s": 0.5, "new_epoch_s": 0.3, "peak_bytes": 200e6, "ratio": 300},
    ("weighted", 64): {"construct_s": 2.0, "new_epoch_s": 0.5, "peak_bytes": 400e6},
    ("blocks, rank 1,023 of 1,024", 64): {"first_fetch_s": 5e-3, "peak_bytes": 1e6},
    ("balanced, mapped", 64): {"first_fetch_s": 10.0, "anonymous_bytes": 1e9},
}
SHARE_OF_READING = {64: 0.02, 1: 0.06}
LAYOUTS = ("dense", "csr")


def codes_of(n: int) -> np.ndarray:
    """Return sorted codes of 50 classes whose sizes are proportional to 1 / rank."""
    share = 1 / np.arange(1, 51)
    return np.repeat(
        np.arange(50, dtype=np.int8), np.diff(np.round(np.cumsum([0, *share]) / share.sum() * n).astype(int))
    )


def mapped_codes_of(n: int) -> np.ndarray:
    file = tempfile.TemporaryFile()  # noqa: SIM115, the file must outlive this function
    for code, length in enumerate(np.bincount(codes_of(n // 1000)) * 1000):
        file.write(np.full(length, code, dtype=np.int8).tobytes())
    file.flush()
    return np.memmap(file, dtype=np.int8, mode="r")


def weights_of(n: int) -> np.ndarray:
    return np.random.default_rng(0).random(n, dtype=np.float32)


def huge_weight_of(n: int) -> np.ndarray:
    weights = np.ones(n, dtype=np.float32)
    weights[n // 3] = n
    return weights


def no_data(n: int) -> None:
    return None


# Function that makes the data (not timed), name of the strategy, its argument for the data, and its other options.
CASES: dict[str, tuple[Callable[[int], Any], str, str | None, Callable[[int], dict[str, Any]]]] = {
    "blocks": (no_data, "BlockShuffling", None, lambda n: {}),
    "blocks, rank 1,023 of 1,024": (no_data, "BlockShuffling", None, lambda n: {}),
    "balanced": (codes_of, "ClassBalancedSampling", "labels", lambda n: {}),
    "balanced, mapped": (mapped_codes_of, "ClassBalancedSampling", "labels", lambda n: {}),
    "weighted": (weights_of, "BlockWeightedSampling", "weights", lambda n: {}),
    "one huge weight": (huge_weight_of, "BlockWeightedSampling", "weights", lambda n: {}),
    "a tenth, each once": (
        weights_of,
        "BlockWeightedSampling",
        "weights",
        lambda n: {"total_size": n // 10, "replace": False},
    ),
}


def strategy_of(library: Any, case: str, data: Any, block: int, n: int) -> Any:
    _, name, option, more = CASES[case]
    return getattr(library, name)(block_size=block, **({option: data} if option else {}), **more(n))


def memory_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise KeyError(what)


def child(case: str, n: int, block: int, world_size: int) -> dict[str, float]:
    import dasksc
    from dasksc.plan.binding import bind

    make_data = CASES[case][0]

    def plan_of(data: Any, n: int, epoch: int, sampler: Any = None) -> Any:
        sampler = sampler or bind(strategy_of(dasksc, case, data, block, n), None, n, None)
        return dasksc.EpochPlan(
            sampler=sampler,
            batch_size=BATCH,
            fetch_factor=FETCH_FACTOR,
            epoch=epoch,
            rank=world_size - 1,
            world_size=world_size,
        )

    for small in (2_000, 200_000):
        plan = plan_of(make_data(small), small, epoch=0)
        if plan.n_fetches:
            plan.fetch(0)
    data = make_data(n)
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
    before, anonymous = memory_bytes("VmRSS"), memory_bytes("RssAnon")

    start = time.perf_counter()
    plan = plan_of(data, n, epoch=0)
    constructed = time.perf_counter()
    plan.fetch(0)
    first = time.perf_counter()
    plan = plan_of(data, n, epoch=1, sampler=plan.sampler)
    plan.fetch(0)
    again = time.perf_counter()
    result = {
        "construct_s": constructed - start,
        "first_fetch_s": first - start,
        "new_epoch_s": again - first,
        "peak_bytes": memory_bytes("VmHWM") - before,
        "anonymous_bytes": memory_bytes("RssAnon") - anonymous,
    }
    times = []
    for k in range(min(plan.n_fetches, 40)):
        start = time.perf_counter()
        plan.fetch(k)
        times.append(time.perf_counter() - start)
    result["fetch_s"] = statistics.median(times)
    return result


def peer(case: str, n: int, block: int) -> dict[str, float]:
    """Time scDataset's computation of the indices of an epoch, which each rank and worker repeats in full."""
    import scdataset

    make_data = CASES[case][0]
    data = make_data(n)
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    strategy = strategy_of(scdataset, case, data, block, n)
    strategy.get_indices(range(n), seed=0)
    return {"first_fetch_s": time.perf_counter() - start, "peak_bytes": memory_bytes("VmHWM") - before}


def reading(path: str) -> dict[str, float]:
    """Return the rows per second of a loader by layout and block size, without its first epoch."""
    import dasksc

    adata = dasksc.open(path)
    found = {}
    for layout in LAYOUTS:
        for block in SHARE_OF_READING:
            dataset = dasksc.scDataset(
                adata,
                dasksc.BlockShuffling(block_size=block),
                batch_size=BATCH,
                fetch_factor=FETCH_FACTOR,
                layout=layout,
                rank=0,
                world_size=1,
                seed=0,
            )
            rates = []
            for _ in range(4):
                start = time.perf_counter()
                for _ in dataset:
                    pass
                rates.append(adata.n_obs / (time.perf_counter() - start))
            found[f"{layout} {block}"] = statistics.median(rates[1:])
    return found


def run(*arguments: Any, repeats: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{arguments} failed:\n{done.stderr}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, cells=100_000)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="cases to measure (default: all)")
    parser.add_argument(
        "--billion", action="store_true", help="also measure 10^9 rows, with 1 GB of disk and 0.6 GB of memory"
    )
    add_out(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        kind, *rest = json.loads(options.child)
        print(json.dumps({"ours": child, "peer": peer, "reading": reading}[kind](*rest)))
        return {}

    path = atlas(options)
    read_through(path)
    read = run("reading", str(path), repeats=options.repeats)
    print("reading: " + ", ".join(f"{rate:,.0f} rows/s {how}" for how, rate in read.items()), flush=True)

    n = options.rows
    cases = [("blocks", n, block, 1) for block in (64, 1)]
    cases += [(case, n, block, 1) for case in ("balanced", "weighted", "one huge weight") for block in (64, 1)]
    cases += [("a tenth, each once", n, 64, 1)]
    if options.billion:
        cases += [("blocks, rank 1,023 of 1,024", 10**9, 64, 1024), ("balanced, mapped", 10**9, 64, 1)]
    results: list[dict[str, Any]] = []
    for case, rows, block, world_size in cases:
        if options.cases and case not in options.cases:
            continue
        found: dict[str, Any] = run("ours", case, rows, block, world_size, repeats=options.repeats)
        shares = {how: found["fetch_s"] * read[f"{how} {block}"] / (BATCH * FETCH_FACTOR) for how in LAYOUTS}
        results.append({"case": case, "rows": rows, "block": block, "share_of_reading": shares, **found})
        print(f"{case}, {rows:.0e} rows, block {block}: measured", file=sys.stderr, flush=True)
    if importlib.util.find_spec("scdataset") is not None:
        for one in results:
            if one["block"] == 64 and one["case"] in ("blocks", "balanced"):
                peer_rows = n if one["case"] == "blocks" else min(n, PEER_ROWS)
                found = run("peer", one["case"], peer_rows, 64, repeats=options.repeats)
                scaled = found["first_fetch_s"] * n / peer_rows
                one["peer"] = {**found, "rows": peer_rows, "scaled_s": scaled}
                one["ratio"] = scaled / one["first_fetch_s"]
    print(HEADER)
    for one in results:
        one["missed"] = missed(one) if n >= 10**8 else []
        print(line(one))
    for one in results:
        if one["missed"]:
            print(f"missed by {one['case']}, block {one['block']}: {', '.join(one['missed'])}")
    report = {"atlas": path.name, "reading_rows_per_s": read, "results": results}
    write_report(options.out, report)
    return report


def missed(one: dict[str, Any]) -> list[str]:
    """Return the missed targets of a result."""
    failed = []
    for name, limit in TARGETS.get((one["case"], one["block"]), {}).items():
        if name in one and (one[name] < limit if name == "ratio" else one[name] > limit):
            failed.append(name)
    for layout, share in one["share_of_reading"].items():
        if share > SHARE_OF_READING[one["block"]]:
            failed.append(f"share of reading {layout}")
    return failed


HEADER = """
| n | plan | block | construct | first fetch | new epoch | peak | anonymous | each fetch \
| share of reading: dense, CSR | peer's time / ours |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def line(one: dict[str, Any]) -> str:
    """Format a result as a row of the table."""
    cells = [f"{one['rows']:.0e}", one["case"], str(one["block"])]
    cells += [f"{one[name] * 1e3:,.1f} ms" for name in ("construct_s", "first_fetch_s", "new_epoch_s")]
    cells += [f"{one[name] / 1e6:,.1f} MB" for name in ("peak_bytes", "anonymous_bytes")]
    cells += [f"{one['fetch_s'] * 1e3:.2f} ms", ", ".join(f"{share:.1%}" for share in one["share_of_reading"].values())]
    cells += [f"{one['ratio']:,.0f}" if "ratio" in one else ""]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()

"""What planning costs: time to the first fetch, memory, and each fetch from then on.

Each case runs in fresh processes, a few times; medians are printed. Kernels are compiled before the clock
starts, on a small data set with the same types. Memory is the peak of resident memory over what the
process held before, codes and weights included in the latter.

    python benchmarks/plans.py                   # up to 10^8 rows
    python benchmarks/plans.py --billion         # and 10^9
    python benchmarks/plans.py --peer            # and scDataset, where it is installed
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BATCH, FETCH_FACTOR = 64, 256
READING_ROWS_PER_S = 300_000
"""What a fast loader reads; a plan is to cost a few per cent of that."""


def codes_of(n: int) -> np.ndarray:
    """50 sorted classes whose sizes fall off as 1 / rank."""
    share = 1 / np.arange(1, 51)
    return np.repeat(
        np.arange(50, dtype=np.int8), np.diff(np.round(np.cumsum([0, *share]) / share.sum() * n).astype(int))
    )


def mapped_codes_of(n: int) -> np.ndarray:
    file = tempfile.TemporaryFile()  # noqa: SIM115, as long as its map lives
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


# What to make first (not timed), the strategy's name, and what the data are to it.
CASES: dict[str, tuple[Callable[[int], Any], str, str | None]] = {
    "blocks": (no_data, "BlockShuffling", None),
    "balanced": (codes_of, "ClassBalancedSampling", "labels"),
    "balanced, mapped": (mapped_codes_of, "ClassBalancedSampling", "labels"),
    "weighted": (weights_of, "BlockWeightedSampling", "weights"),
    "one huge weight": (huge_weight_of, "BlockWeightedSampling", "weights"),
}


def strategy_of(library: Any, case: str, data: Any, block: int) -> Any:
    _, name, option = CASES[case]
    return getattr(library, name)(block_size=block, **({option: data} if option else {}))


def memory_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise KeyError(what)


def child(case: str, n: int, block: int, world_size: int) -> dict[str, float]:
    import dasksc
    from dasksc.sampling import bind

    make_data = CASES[case][0]

    def plan_of(data: Any, n: int, epoch: int, sampler: Any = None) -> Any:
        sampler = sampler or bind(strategy_of(dasksc, case, data, block), None, n, None)
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
    Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
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
    for k in range(1, min(plan.n_fetches, 40)):
        start = time.perf_counter()
        plan.fetch(k)
        times.append(time.perf_counter() - start)
    result["fetch_s"] = statistics.median(times)
    return result


def peer(case: str, n: int, block: int, world_size: int) -> dict[str, float]:
    """Time scDataset's indices of an epoch, which every rank and worker makes whole."""
    import scdataset

    make_data = CASES[case][0]
    data = make_data(n)
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    strategy = strategy_of(scdataset, case, data, block)
    strategy.get_indices(range(n), seed=0)
    return {"first_fetch_s": time.perf_counter() - start, "peak_bytes": memory_bytes("VmHWM") - before}


def run(*arguments: Any, repeats: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{arguments} failed:\n{done.stderr}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--billion", action="store_true", help="also 10^9 rows: 1 GB of disk, 0.6 GB of memory")
    parser.add_argument("--peer", action="store_true", help="also scDataset, balanced on 2 * 10^6 rows and scaled")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        kind, *rest = json.loads(options.child)
        print(json.dumps({"ours": child, "peer": peer}[kind](*rest)))
        return []

    n = options.rows
    cases = [("blocks", n, block, 1) for block in (64, 1)]
    cases += [(case, n, block, 1) for case in ("balanced", "weighted", "one huge weight") for block in (64, 8, 1)]
    if options.billion:
        cases += [("blocks", 10**9, 64, 1024), ("balanced, mapped", 10**9, 64, 1)]
    report: list[dict[str, Any]] = []
    print("case                  rows block   construct first fetch   new epoch       peak  anonymous  each fetch")
    for case, rows, block, world_size in cases:
        found = run("ours", case, rows, block, world_size, repeats=options.repeats)
        share = found["fetch_s"] / (BATCH * FETCH_FACTOR / READING_ROWS_PER_S)
        report.append({"case": case, "rows": rows, "block": block, "share_of_reading": share, **found})
        ms = "".join(f"{found[name] * 1e3:>9.1f} ms" for name in ("construct_s", "first_fetch_s", "new_epoch_s"))
        mb = "".join(f"{found[name] / 1e6:>8.1f} MB" for name in ("peak_bytes", "anonymous_bytes"))
        each = f"{found['fetch_s'] * 1e3:>8.2f} ms, {share:.1%} of reading"
        print(f"{case:<18}{rows:>8.0e}{block:>6}{ms}{mb}{each}", flush=True)
    if options.peer:
        for case, rows in (("blocks", n), ("balanced", min(n, 2 * 10**6))):
            found = run("peer", case, rows, 64, 1, repeats=options.repeats)
            peer_s = found["first_fetch_s"] * n / rows
            ours = next(one for one in report if one["case"] == case and one["block"] == 64)
            ratio = peer_s / ours["first_fetch_s"]
            report.append({"case": f"scDataset, {case}", "rows": rows, **found, "scaled_s": peer_s, "ratio": ratio})
            print(
                f"scDataset, {case}: {found['first_fetch_s']:.2f} s at {rows:.0e} rows, {peer_s:.1f} s at {n:.0e}: "
                f"{ratio:,.0f} times ours; peak {found['peak_bytes'] / 1e6:.0f} MB"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()

"""Predict an atlas repeatedly and send SIGKILL at random moments: ``predict_kills.py IN OUT key``.

Ten times, one to three ranks predict and are all killed at a random moment; the next ranks continue the unfinished
work. Meanwhile, OUT is read repeatedly. Children are forked before any thread starts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import zarr

import dasksc
from dasksc.inference import store
from dasksc.inspection.report import Report
from dasksc.output import shards

BATCH = 8
SLEEP_S = 0.01


def embed(batch: Any) -> torch.Tensor:
    """Compute a function of the batch, slowly."""
    time.sleep(SLEEP_S)
    return batch[:, :6] * 3 + batch.sum(dim=1, keepdim=True)


def predict(source: str, out: str, key: str, rank: int, world_size: int) -> Report:
    with (
        mock.patch.object(store, "_LEAST_ROWS", 2 * BATCH),
        mock.patch.object(store, "_MOST_ROWS", 2 * BATCH),
        mock.patch.object(shards, "sync"),
    ):
        return dasksc.predict(
            *(embed, source, out),
            key=key,
            batch_size=BATCH,
            rank=rank,
            world_size=world_size,
            scheduler="synchronous",
        )


def started(source: str, out: str, key: str, world_size: int) -> list[int]:
    """Start ranks; return their process IDs."""
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            try:
                predict(source, out, key, rank, world_size)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return pids


def seen(out: Path, key: str) -> np.ndarray | None:
    """Return the predictions that a reader sees, or None."""
    try:
        # A key is visible in two ways: in the consolidated metadata of the root, and as a folder.
        root = zarr.open_group(out, mode="r")
        listed = f"obsm/{key}" in root
        if (out / "obsm" / key).exists():
            return zarr.open_group(out, mode="r", use_consolidated=False)[f"obsm/{key}"][:]
        return root[f"obsm/{key}"][:] if listed else None
    except FileNotFoundError:
        return None


def main(source: str, out: str, key: str) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    adata = dasksc.open(source)
    x = np.asarray(adata.X[:].compute().todense(), dtype=np.float32)
    expected = (torch.from_numpy(x)[:, :6] * 3 + torch.from_numpy(x).sum(dim=1, keepdim=True)).numpy()
    n_batches = -(-len(x) // BATCH)
    n_kills = n_looks = 0
    units_after_kills = []
    while n_kills < 10:
        world_size = rng.choice([1, 2, 3])
        pids = started(source, out, key, world_size)
        until = time.monotonic() + rng.uniform(0.02, 0.6) * n_batches * SLEEP_S / world_size
        while time.monotonic() < until:
            found = seen(Path(out), key)
            n_looks += 1
            if found is not None and not np.array_equal(found, expected):
                raise SystemExit("a reader saw predictions that are not all there")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            status = os.waitpid(pid, 0)[1]
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                raise SystemExit("a rank failed")
        n_kills += 1
        units = list(Path(out).parent.glob(f"{Path(out).name}*.partial/store/obsm/{key}/c/*/0"))
        units_after_kills.append(len(units))
        if seen(Path(out), key) is not None:
            raise SystemExit(f"done after {n_kills} kills: nothing is left to kill")
    for pid in started(source, out, key, 2):
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit("a rank failed")
    found = seen(Path(out), key)
    if found is None or not np.array_equal(found, expected):
        raise SystemExit("the predictions are not those of the plain loop")
    print(json.dumps({"n_kills": n_kills, "n_looks": n_looks, "units_after_kills": units_after_kills}))


if __name__ == "__main__":
    main(*sys.argv[1:4])

"""Under torchrun: share Dask clusters that rank 0 starts: ``shared_cluster.py ATLAS OUT SECRET WHAT...``.

Each WHAT is the host of a cluster through which the ranks read an epoch. Hosts other than loopback use the file SECRET.
If WHAT is ``port`` or ``dashboard``, this setting is invalid on rank 0 only. OUT receives the results of each rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist

import dasksc
from dasksc.planning.process_groups import leave_group

WRONG: dict[str, dict[str, Any]] = {"port": {"port": -5}, "dashboard": {"dashboard_address": "no such host:0"}}


def main(path: str, out: str, secret: str, *whats: str) -> None:
    dist.init_process_group("gloo")
    seen = [refused(what) if what in WRONG else epoch(path, what, secret) for what in whats]
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump(gathered, file)
    leave_group()


def epoch(path: str, host: str, secret: str) -> dict[str, Any]:
    """Read an epoch through a cluster at `host`; except on loopback, its workers are threads of rank 0."""
    more: dict[str, Any] = {} if host == "127.0.0.1" else {"processes": False, "host": host, "security": secret}
    with dasksc.start_cluster(2, threads_per_worker=1, **more) as cluster:
        dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=3, obs=["int64"], seed=0)
        rows = [row for batch in dataset for row in batch.index.tolist()]
        return {"address": cluster.address, "rows": rows, "starts": cluster.cluster is not None}


def refused(what: str) -> str:
    """Try to start a cluster with an invalid setting on rank 0; return the error message."""
    try:
        dasksc.start_cluster(1, timeout_s=60, **(WRONG[what] if dist.get_rank() == 0 else {}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "started"


if __name__ == "__main__":
    main(*sys.argv[1:])

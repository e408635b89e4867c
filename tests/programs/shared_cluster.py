"""Under torchrun: the ranks share the Dask cluster that rank 0 starts; write what each rank saw."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist

import dasksc
from dasksc.world import leave_group


def main(path: str, out: str, host: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with dasksc.start_cluster(2, threads_per_worker=1, host=host) as cluster:
        dataset = dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, fetch_factor=3, obs=["int64"], seed=0)
        rows = [row for batch in dataset for row in batch.index.tolist()]
        seen = {"rank": rank, "address": cluster.address, "rows": rows, "starts": cluster.cluster is not None}
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    if rank == 0:
        with open(out, "w") as file:
            json.dump(gathered, file)
    leave_group()


def fail(how: str) -> None:
    """Rank 0 cannot start: it alone is given something that does not work."""
    dist.init_process_group("gloo")
    wrong: dict[str, Any] = {"port": {"port": -5}, "dashboard": {"dashboard_address": "no such host:0"}}[how]
    try:
        dasksc.start_cluster(1, timeout_s=60, **(wrong if dist.get_rank() == 0 else {}))
    except Exception as error:
        # In one piece: under torchrun's ``-u`` print writes the end of its line apart, and ranks share what is printed.
        sys.stdout.write(f"rank {dist.get_rank()}: {type(error).__name__}: {error}\n")
    dist.barrier()
    leave_group()


if __name__ == "__main__":
    if sys.argv[1] == "fail":
        fail(sys.argv[2])
    else:
        main(*sys.argv[1:])

"""Under torchrun: read through a shared cluster and kill each rank once; write the progress of each rank."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend
from torch.distributed.rendezvous import rendezvous

import dasksc
from dasksc.planning.process_groups import leave_group


def main(path: str, folder: str) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # The store belongs to torchrun and outlives the ranks. With gloo, restarted ranks would find the addresses of ended
    # peers there and connect to them, so the backend is a fake.
    store, rank, n_ranks = next(rendezvous("env://"))
    dist.init_process_group("fake", store=store, rank=rank, world_size=n_ranks)

    def meet() -> None:
        store.set(f"here/{attempt}/{rank}", "")
        store.wait([f"here/{attempt}/{other}" for other in range(n_ranks)])

    with dasksc.start_cluster(1, threads_per_worker=1, processes=False) as cluster:
        n_rows = 0
        for i, batch in enumerate(
            dasksc.scDataset(path, dasksc.BlockShuffling(4), batch_size=8, obs=["int64"], seed=0)
        ):
            n_rows += len(batch.index)
            if attempt < n_ranks and i == 2:
                meet()  # both ranks have received the address
                if rank == attempt:
                    os.kill(os.getpid(), signal.SIGKILL)
    (Path(folder) / f"read-{attempt}-{rank}").write_text(f"{n_rows} {cluster.address}")
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

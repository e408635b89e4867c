#!/usr/bin/env python
"""Read an atlas with Dask workers that are Slurm jobs of their own, on nodes without GPUs.

    python dask_workers.py atlas.h5ad --jobs 4 --cores 16 --memory 64GB --walltime 04:00:00

The scheduler runs in this process. Scheduler and workers communicate over TLS, with a certificate created for this run.
The jobs read it from `--shared`, a private folder that all nodes can access. The program requires the packages
dask-jobqueue and cryptography.
"""

from __future__ import annotations

import argparse
import time

import dask
from dask.distributed import Client
from dask_jobqueue import SLURMCluster

import dasksc


def main() -> None:
    """Read one epoch and print the throughput."""
    parser = argparse.ArgumentParser(description="Read an atlas with Dask workers that Slurm starts.")
    parser.add_argument("atlas", help="an .h5ad or .zarr at a path that all nodes see")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--cores", type=int, default=8, help="cores of a job, which runs one worker with a thread for each core"
    )
    parser.add_argument("--memory", default="32GB", help="memory of a job")
    parser.add_argument("--walltime", default="01:00:00")
    parser.add_argument("--partition", help="Slurm partition (default: that of Slurm)")
    parser.add_argument("--shared", default=".", help="private folder for the certificate, accessible from all nodes")
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    dask.config.set({"distributed.scheduler.worker-ttl": "60s"})  # ends workers that fall silent
    cluster = SLURMCluster(
        cores=args.cores,
        processes=1,  # reading and decoding release the GIL, so threads suffice
        memory=args.memory,
        walltime=args.walltime,
        queue=args.partition,
        protocol="tls://",
        security=True,
        shared_temp_directory=args.shared,
    )
    with cluster, Client(cluster) as client:
        cluster.scale(jobs=args.jobs)
        client.wait_for_workers(1)  # the others join when Slurm starts them
        dataset = dasksc.scDataset(args.atlas, dasksc.BlockShuffling(16), batch_size=args.batch_size, seed=0)
        start = time.perf_counter()
        n_cells = sum(len(batch) for batch in dataset)
        speed = n_cells / (time.perf_counter() - start)
        n_workers = len(client.ncores())
        print(f"{n_cells} cells from {n_workers} Slurm jobs, {speed:,.0f} cells/s", flush=True)


if __name__ == "__main__":
    main()

"""The loaders that are compared, each in the way its users would have it fastest.

Run by `_harness.Contender` as ``python _contenders.py NAME SPEC``. A builder imports what it needs (a
peer's interpreter has no dasksc, and the cold start includes the import) and returns a function that
starts an epoch of tensors: float32, shape (batch, n_vars), dense or CSR as ``spec["layout"]`` says.

A spec may also hold ``cores`` (of those there are, the process is kept on these), ``rank`` and
``world_size``, and, for dasksc, a ``memory_limit`` to choose the fetch size by, ``genes`` to keep, how several
files are to be joined (``join``), the memory limit of Dask workers (``worker_memory``), and which rows to read
(``rows``: start and stop of each run).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Spec = dict[str, Any]
Epoch = Callable[[], Iterator[Any]]


def dasksc_loader(spec: Spec, *, scheduler: str) -> Epoch:
    client = None
    if scheduler == "client":
        from distributed import Client

        client = Client(processes=False, dashboard_address=":0")
    elif scheduler == "workers":
        from distributed import Client, LocalCluster

        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=spec["worker_memory"], dashboard_address=":0"
        )
        client = Client(cluster)
    dataset = _dasksc_dataset(spec, scheduler=client or scheduler)
    return lambda: iter(dataset)


def dasksc_without_dask(spec: Spec) -> Epoch:
    """Read the same plan by the same fetches and batches, but let plain threads run the fetches.

    All that is changed is the window of fetches in flight, so that all else is the same.
    """
    from concurrent.futures import ThreadPoolExecutor
    from unittest import mock

    from dasksc.executor.progress import FetchFigures
    from dasksc.loader import epoch_run as module

    class PlainWindow:
        """As many fetches at a time, on as many threads, handed over in order."""

        def __init__(self, task: Any, ks: Any, *, depth: int, argument: Any, n_threads: int, **_: Any) -> None:
            self.scheduler = module.resolve_scheduler("threads")
            self._pool = ThreadPoolExecutor(n_threads)
            self._ks, self._run = iter(ks), lambda k: task(argument(k))
            self._depth = depth() if callable(depth) else depth
            self._pending: list[Any] = []
            self._fill(self._depth)

        def _fill(self, depth: int) -> None:
            while len(self._pending) < depth and (k := next(self._ks, None)) is not None:
                self._pending.append((k, self._pool.submit(self._run, k)))

        def figures(self) -> Any:
            return FetchFigures()

        def next_is_done(self) -> bool:
            return not self._pending or self._pending[0][1].done()

        def __iter__(self) -> Iterator[Any]:
            while self._pending:
                k, future = self._pending[0]
                result = future.result()
                del self._pending[0], future
                self._fill(self._depth)
                yield k, result
                del result

        def __enter__(self) -> PlainWindow:
            return self

        def __exit__(self, *_: object) -> None:
            self._pool.shutdown(cancel_futures=True)

    dataset = _dasksc_dataset(spec, scheduler="threads")

    def epoch() -> Iterator[Any]:
        with mock.patch.object(module, "Window", PlainWindow):
            yield from dataset

    return epoch


def _dasksc_dataset(spec: Spec, *, scheduler: Any) -> Any:
    import numpy as np

    import dasksc

    limit, runs = spec.get("memory_limit"), spec.get("rows")
    rows = None if runs is None else np.concatenate([np.arange(start, stop) for start, stop in runs])
    dataset = dasksc.scDataset(
        dasksc.open(spec["path"], join=spec["join"]) if "join" in spec else spec["path"],
        dasksc.BlockShuffling(block_size=spec["block"], indices=rows),
        batch_size=spec["batch"],
        fetch_factor=None if limit else spec["fetch"] // spec["batch"],
        memory_limit=limit,
        genes=spec.get("genes"),
        layout=spec["layout"],
        mmap=spec.get("mmap", "auto"),
        scheduler=scheduler,
        rank=spec.get("rank", 0),
        world_size=spec.get("world_size", 1),
        seed=0,
    )
    spec["fetch"] = dataset.fetch_size
    return dataset


def pread_loader(spec: Spec) -> Epoch:
    """Read the ranges that dasksc's plan needs and nothing else: what the disk can give, at ``spec["depth"]``."""
    from pathlib import Path

    from _ranges import pread_loop

    dataset = _dasksc_dataset(spec, scheduler="threads")
    return pread_loop(Path(spec["path"]), dataset.plan(0), depth=spec["depth"])


def scdataset_loader(spec: Spec, *, densify: str) -> Epoch:
    """Read a backed matrix by sorted rows, and densify each batch or each whole fetch."""
    import torch
    from scdataset import BlockShuffling, scDataset

    adata = _backed(spec["path"])
    X = adata.X  # once: AnnData makes a new matrix at each access, which reads indptr again
    if spec["layout"] == "csr":
        hooks = {"batch_transform": _csr_tensor}
    elif densify == "batch":
        hooks = {"batch_transform": lambda batch: torch.from_numpy(batch.toarray())}
    else:
        hooks = {"fetch_transform": lambda fetched: torch.from_numpy(fetched.toarray())}
    dataset = scDataset(
        adata,
        BlockShuffling(block_size=spec["block"]),
        batch_size=spec["batch"],
        fetch_factor=spec["fetch"] // spec["batch"],
        fetch_callback=lambda _, rows: X[rows],  # indexing the AnnData would subset obs as well
        seed=0,
        **hooks,
    )
    return lambda: iter(dataset)


def annbatch_loader(spec: Spec, *, store: str) -> Epoch:
    """Load X alone from annbatch's own preshuffled store, or from AnnData's Zarr."""
    import anndata
    import numpy as np
    import torch
    import zarr
    from annbatch import Loader

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    loader = Loader(
        batch_size=spec["batch"],
        chunk_size=spec["block"],
        preload_nchunks=spec["fetch"] // spec["block"],
        shuffle=True,
        # On a CPU SciPy's batches become dense tensors twice as fast as torch's sparse ones.
        to="torch" if spec["layout"] == "csr" else None,
        rng=np.random.default_rng(0),
    )
    group = zarr.open_group(spec["annbatch_path"] if store == "own" else spec["zarr_path"], mode="r")
    for key in sorted(group.keys()) if store == "own" else [""]:
        loader.add_dataset(anndata.io.sparse_dataset(group[f"{key}/X".lstrip("/")]))

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield batch["X"] if spec["layout"] == "csr" else torch.from_numpy(batch["X"].toarray())

    return epoch


def anndata_loader(spec: Spec) -> Epoch:
    """Slice a backed matrix batch by batch, without any buffer: blocks in random order, sorted."""
    import numpy as np
    import torch

    adata = _backed(spec["path"])
    X = adata.X
    n_rows, block, batch = X.shape[0], spec["block"], spec["batch"]
    to_tensor = _csr_tensor if spec["layout"] == "csr" else lambda part: torch.from_numpy(part.toarray())
    rng = np.random.default_rng(0)

    def epoch() -> Iterator[Any]:
        blocks = rng.permutation(-(-n_rows // block))
        rows = (blocks[:, None] * block + np.arange(block)).ravel()
        rows = rows[rows < n_rows]
        for start in range(0, n_rows, batch):
            yield to_tensor(X[np.sort(rows[start : start + batch])])

    return epoch


def annloader(spec: Spec) -> Epoch:
    """Let AnnLoader read a backed AnnData, in blocks: with `shuffle=True` it draws single rows, which is slower."""
    import warnings

    import numpy as np
    from anndata.experimental import AnnLoader

    n_rows, block = spec["n_rows"], spec["block"]
    rng = np.random.default_rng(0)

    class Blocks:
        def __len__(self) -> int:
            return n_rows

        def __iter__(self) -> Iterator[int]:
            rows = (rng.permutation(-(-n_rows // block))[:, None] * block + np.arange(block)).ravel()
            return iter(rows[rows < n_rows].tolist())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its deprecation
        loader = AnnLoader(_backed(spec["path"]), batch_size=spec["batch"], sampler=Blocks())

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield batch.X

    return epoch


CONTENDERS: dict[str, Callable[[Spec], Epoch]] = {
    "dasksc threads": partial(dasksc_loader, scheduler="threads"),
    "dasksc synchronous": partial(dasksc_loader, scheduler="synchronous"),
    "dasksc client": partial(dasksc_loader, scheduler="client"),
    "dasksc workers": partial(dasksc_loader, scheduler="workers"),
    "dasksc without Dask": dasksc_without_dask,
    "pread": pread_loader,
    "scDataset": partial(scdataset_loader, densify="batch"),
    "scDataset per fetch": partial(scdataset_loader, densify="fetch"),
    "annbatch own store": partial(annbatch_loader, store="own"),
    "annbatch AnnData zarr": partial(annbatch_loader, store="anndata"),
    "anndata backed": anndata_loader,
    "AnnLoader": annloader,
}


def write_annbatch_store(spec: Spec) -> None:
    """Write annbatch's preshuffled collection from an h5ad, with its defaults."""
    import anndata
    import numpy as np
    import zarr
    from annbatch import DatasetCollection

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})

    def load(path: str) -> Any:
        lazy = anndata.experimental.read_lazy(path)
        return anndata.AnnData(X=lazy.X, obs=lazy.obs.to_memory(), var=lazy.var.to_memory())

    n_rows = spec["n_rows"]
    DatasetCollection(spec["annbatch_path"]).add_adatas(
        [spec["h5ad_path"]],
        load_adata=load,
        shuffle_chunk_size=min(1000, n_rows),
        rng=np.random.default_rng(0),
    )


def write_converted_store(spec: Spec) -> None:
    """Write dasksc's shuffled store from an h5ad, with its defaults."""
    import dasksc

    dasksc.convert(spec["h5ad_path"], spec["converted_path"])


WRITERS: dict[str, Callable[[Spec], None]] = {
    "write annbatch store": write_annbatch_store,
    "write converted store": write_converted_store,
}


def _backed(path: str) -> Any:
    import anndata

    if path.endswith(".zarr"):
        import zarr

        return anndata.AnnData(X=anndata.io.sparse_dataset(zarr.open_group(path, mode="r")["X"]))
    return anndata.read_h5ad(path, backed="r")


def _csr_tensor(part: Any) -> Any:
    import torch

    return torch.sparse_csr_tensor(
        torch.from_numpy(part.indptr),
        torch.from_numpy(part.indices),
        torch.from_numpy(part.data),
        size=part.shape,
    )


if __name__ == "__main__":
    name, spec = sys.argv[1], json.loads(sys.argv[2])
    if "cores" in spec:  # before anything counts them
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [available[core] for core in spec["cores"]])
    if name in WRITERS:
        begun = time.perf_counter()
        WRITERS[name](spec)
        print(json.dumps({"elapsed_s": time.perf_counter() - begun}))
    else:
        from _harness import serve

        serve(CONTENDERS[name], spec)

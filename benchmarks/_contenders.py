"""Loaders to compare, each in the fastest configuration available to its users.

`_harness.Contender` runs ``python _contenders.py NAME SPEC``. Each builder contains its own imports, because
the interpreter of a peer lacks dasksc and the cold start includes the imports. A builder returns a function
that starts an epoch of float32 tensors of shape (batch, n_vars), dense or CSR according to ``spec["layout"]``.

Optional keys of a spec: ``cores`` (indices of the available cores to which the process is pinned), ``rank``, and
``world_size``. Optional keys for dasksc: ``memory_limit`` (determines the fetch size), ``genes`` (subset to read),
``join`` (join of several files), ``worker_memory`` (memory limit of a Dask worker), and ``rows`` (start and stop of
each run of rows to read).
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
    """Run the fetches of dasksc on a plain thread pool instead of a Dask scheduler.

    Only the window of fetches in flight is replaced. Plan, fetches and batches are those of dasksc.
    """
    from concurrent.futures import ThreadPoolExecutor
    from unittest import mock

    from dasksc.executor.progress import FetchFigures
    from dasksc.loader import epoch as module

    class PlainWindow:
        """Replacement for dasksc's window, with the same depth and number of threads; it yields fetches in order."""

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

        def are_done(self, n: int) -> bool:
            return all(future.done() for _, future in self._pending[:n])

        def __iter__(self) -> PlainWindow:
            return self

        def __next__(self) -> tuple[int, Any]:
            if not self._pending:
                raise StopIteration
            k, future = self._pending[0]
            result = future.result()
            del self._pending[0], future
            self._fill(self._depth)
            return k, result

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
    """Read only the byte ranges of dasksc's plan on ``spec["depth"]`` threads, to measure the limit of the disk."""
    from pathlib import Path

    from _ranges import pread_loop

    dataset = _dasksc_dataset(spec, scheduler="threads")
    return pread_loop(Path(spec["path"]), dataset.plan(0), depth=spec["depth"])


def scdataset_loader(spec: Spec, *, densify: str) -> Epoch:
    """Read sorted rows of a backed matrix with scDataset, and densify each batch or each fetch."""
    import torch
    from scdataset import BlockShuffling, scDataset

    adata = _backed(spec["path"])
    X = adata.X  # Each access of AnnData.X creates a new matrix, which reads indptr again.
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
        fetch_callback=lambda _, rows: X[rows],  # Indexing the AnnData object would subset obs as well.
        seed=0,
        **hooks,
    )
    return lambda: iter(dataset)


def annbatch_loader(spec: Spec, *, store: str) -> Epoch:
    """Load only X, from annbatch's preshuffled store or from a Zarr store written by AnnData.

    Without torch, batches stay SciPy matrices and NumPy arrays, which saves time.
    """
    import importlib.util

    import anndata
    import numpy as np
    import zarr
    from annbatch import Loader

    has_torch = importlib.util.find_spec("torch") is not None

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    loader = Loader(
        batch_size=spec["batch"],
        chunk_size=spec["block"],
        preload_nchunks=spec["fetch"] // spec["block"],
        shuffle=True,
        # On a CPU, densifying SciPy matrices is twice as fast as densifying sparse tensors.
        to="torch" if has_torch and spec["layout"] == "csr" else None,
        rng=np.random.default_rng(0),
    )
    group = zarr.open_group(spec["annbatch_path"] if store == "own" else spec["zarr_path"], mode="r")
    for key in sorted(group.keys()) if store == "own" else [""]:
        X = group[f"{key}/X".lstrip("/")]
        loader.add_dataset(X if isinstance(X, zarr.Array) else anndata.io.sparse_dataset(X))

    def tensor(X: Any) -> Any:
        if spec["layout"] == "csr":
            return X
        X = X if isinstance(X, np.ndarray) else X.toarray()
        if not has_torch:
            return X
        import torch

        return torch.from_numpy(X)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield tensor(batch["X"])

    return epoch


def anndata_loader(spec: Spec) -> Epoch:
    """Slice a backed matrix batch by batch, without a shuffle buffer: sorted rows of random blocks."""
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
    """Read a backed AnnData in blocks with AnnLoader, because its ``shuffle=True`` draws single rows and is slower."""
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
        warnings.simplefilter("ignore", FutureWarning)  # AnnLoader is deprecated.
        loader = AnnLoader(_backed(spec["path"]), batch_size=spec["batch"], sampler=Blocks())

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield batch.X

    return epoch


def tiledbsoma_loader(spec: Spec) -> Epoch:
    """Load X of a SOMA experiment with tiledbsoma-ml; a fetch is its I/O batch, and a block its shuffle chunk."""
    import tiledbsoma
    import torch
    from tiledbsoma_ml import ExperimentDataset

    experiment = tiledbsoma.open(spec["path"])
    with experiment.axis_query("RNA") as query:
        dataset = ExperimentDataset(
            query,
            layer_name="data",
            batch_size=spec["batch"],
            io_batch_size=spec["fetch"],
            shuffle_chunk_size=spec["block"],
            seed=0,
            return_sparse_X=spec["layout"] == "csr",
        )
    to_tensor = _csr_tensor if spec["layout"] == "csr" else torch.from_numpy
    return lambda: (to_tensor(X) for X, _ in dataset)


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
    "tiledbsoma-ml": tiledbsoma_loader,
}


def write_annbatch_store(spec: Spec) -> None:
    """Write annbatch's preshuffled collection from an h5ad file, with annbatch's defaults."""
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
    """Convert an h5ad file to dasksc's shuffled store, with the defaults of `dasksc.convert`."""
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
    if "cores" in spec:  # The affinity must be set before a library counts the cores.
        available = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [available[core] for core in spec["cores"]])
    if name in WRITERS:
        begun = time.perf_counter()
        WRITERS[name](spec)
        print(json.dumps({"elapsed_s": time.perf_counter() - begun}))
    else:
        from _harness import serve

        serve(CONTENDERS[name], spec)

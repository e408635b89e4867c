"""The loaders that `dasksc bench` compares, each in a process of its own: ``python -m dasksc.cli._loaders NAME SPEC``.

A builder imports what it needs and returns a function that starts an epoch of float32 tensors. Each reads the user's
file as its documentation says: batches of the same size, and blocks and fetches too where it has them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any

__all__ = ["LOADERS", "is_installed", "rows_per_s"]

Spec = dict[str, Any]
Epoch = Callable[[], Iterator[Any]]


def _dasksc(spec: Spec) -> Epoch:
    import dasksc
    from dasksc.cli._shared import opened

    dataset = dasksc.scDataset(
        opened(_paths(spec), spec["join"], storage_options=spec["storage_options"], cache=spec["cache"]),
        dasksc.BlockShuffling(spec["block"]),
        spec["batch"],
        spec["fetch"] // spec["batch"],
        layout=spec["layout"],
        rank=0,
        world_size=1,
        seed=0,
    )
    return lambda: iter(dataset)


def _scdataset(spec: Spec) -> Epoch:
    from scdataset import BlockShuffling, scDataset

    adata = _backed(spec)
    X = adata.X  # once: AnnData makes a new matrix at each access
    dataset = scDataset(
        adata,
        BlockShuffling(block_size=spec["block"]),
        batch_size=spec["batch"],
        fetch_factor=spec["fetch"] // spec["batch"],
        fetch_callback=lambda _, rows: X[rows],
        batch_transform=lambda part: _tensor(part, spec["layout"]),
        seed=0,
    )
    return lambda: iter(dataset)


def _annbatch(spec: Spec) -> Epoch:
    """Read AnnData's Zarr as it is, without the conversion that annbatch recommends."""
    import anndata
    import zarr
    from annbatch import Loader

    if find_spec("zarrs") is not None:
        zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    loader = Loader(
        batch_size=spec["batch"],
        chunk_size=spec["block"],
        preload_nchunks=spec["fetch"] // spec["block"],
        shuffle=True,
        to=None,
    )
    for path in _one_each(spec, ".zarr"):
        group = zarr.open_group(path, mode="r")
        keys = sorted(key for key in group if key.startswith("dataset_")) if "X" not in group else [""]
        for key in keys:
            stored = group[f"{key}/X".lstrip("/")]
            loader.add_dataset(stored if isinstance(stored, zarr.Array) else anndata.io.sparse_dataset(stored))

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield _tensor(batch["X"], spec["layout"])

    return epoch


def _annloader(spec: Spec) -> Epoch:
    """Read a backed AnnData row by row at random, which is all that AnnLoader has."""
    import warnings

    from anndata.experimental import AnnLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = AnnLoader(_backed(spec), batch_size=spec["batch"], shuffle=True)

    def epoch() -> Iterator[Any]:
        for batch in loader:
            yield _tensor(batch.X, spec["layout"])

    return epoch


LOADERS: dict[str, tuple[Callable[[Spec], Epoch], tuple[str, ...]]] = {
    "dasksc": (_dasksc, ("dasksc",)),
    "scDataset": (_scdataset, ("scdataset",)),
    "annbatch": (_annbatch, ("annbatch",)),
    "AnnLoader": (_annloader, ("anndata",)),
}
"""Name of each: what builds it, and what it needs."""


def is_installed(name: str) -> bool:
    """Return whether what a loader needs is there; nothing is imported."""
    return all(find_spec(module) is not None for module in LOADERS[name][1])


def rows_per_s(epoch: Epoch, seconds: float) -> tuple[float, float]:
    """Return rows a second after the first batch, and the seconds until it."""
    start = time.perf_counter()
    batches = epoch()
    next(batches)
    first_s = time.perf_counter() - start
    n_rows, elapsed_s = 0, 0.0
    start = time.perf_counter()
    while elapsed_s < seconds:
        batch = next(batches, None)
        if batch is None:
            batches = epoch()
            continue
        # Several modalities come as a batch of batches.
        n_rows += batch.shape[0] if hasattr(batch, "shape") else len(batch.index)
        elapsed_s = time.perf_counter() - start
    return n_rows / elapsed_s, first_s


def _paths(spec: Spec) -> list[str]:
    return [spec["paths"]] if isinstance(spec["paths"], str) else list(spec["paths"])


def _one_each(spec: Spec, ending: str) -> list[str]:
    paths = _paths(spec)
    if not all(path.endswith(ending) and os.path.exists(path) for path in paths):
        raise NotImplementedError(f"it reads local {ending} only")
    return paths


def _backed(spec: Spec) -> Any:
    import anndata

    paths = _one_each(spec, ".h5ad")
    if len(paths) > 1:
        raise NotImplementedError("it reads one file")
    return anndata.read_h5ad(paths[0], backed="r")


def _tensor(part: Any, layout: str) -> Any:
    import numpy as np
    import scipy.sparse as sp
    import torch

    if isinstance(part, torch.Tensor):
        is_csr = part.layout == torch.sparse_csr
        part = part.float()
        return part if is_csr == (layout == "csr") else part.to_sparse_csr() if layout == "csr" else part.to_dense()
    if layout == "dense":
        return torch.from_numpy(np.asarray(part.toarray() if sp.issparse(part) else part, dtype=np.float32))
    part = sp.csr_matrix(part, dtype=np.float32)
    indptr, indices, data = (torch.from_numpy(array) for array in (part.indptr, part.indices, part.data))
    return torch.sparse_csr_tensor(indptr, indices, data, size=part.shape)


def main() -> None:
    """Measure one loader, and print the result as JSON, or why there is none."""
    name, spec = sys.argv[1], json.loads(sys.argv[2])
    try:
        with redirect_stdout(sys.stderr):
            rate, first_s = rows_per_s(LOADERS[name][0](spec), spec["seconds"])
        answer: dict[str, Any] = {"rows_per_s": rate, "first_batch_s": first_s}
    except Exception as error:
        answer = {"error": f"{error}" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

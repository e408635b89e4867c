"""Predictions for every cell of an atlas, written during inference.

Each rank predicts a contiguous range of units and writes them as shards (`dasksc.inference.store`). At any time, only
the batches read ahead and the predictions that are not yet written are in memory. The rank that finds all shards
complete publishes the result. In a process group, the call then returns on every rank; if one rank fails, it fails on
every rank (`dasksc.inference.publishing`).

Under FSDP, every call of the model is collective. Ranks with fewer batches repeat a batch and discard its result.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import dask.array as da
import torch
from dask.base import tokenize
from numpy.typing import NDArray

from dasksc.atlas.modalities import Modalities
from dasksc.batches.batch import device_of
from dasksc.checks import check_flags
from dasksc.displays import brief, with_options_of
from dasksc.errors import InputError
from dasksc.executor.progress import progress_bar
from dasksc.inference.model import Outputs, Predictor, check_categories, check_name, nan_rows
from dasksc.inference.publishing import Ranks, target_path
from dasksc.inference.store import COMPLETE, NEW, PredictionStore, ShardWriter
from dasksc.inspection.report import Report
from dasksc.loader.dataset import scDataset
from dasksc.loader.source import MatrixSource
from dasksc.plan.ranks import World
from dasksc.plan.strategies import Streaming
from dasksc.pushdown import matrix_of, token_of
from dasksc.readers.names import names_in_pieces
from dasksc.transforms import Transforms

__all__ = ["predict"]

logger = logging.getLogger("dasksc.inference")

_BATCH_SIZE = 1024
# Arguments of `scDataset` that select or order cells.
_WITHOUT_EFFECT = ("strategy", "drop_last", "seed", "filter", "equal_ranks", "label_key")
_HOOKS = ("fetch_callback", "fetch_transform", "batch_callback", "batch_transform", "transform")


@with_options_of(scDataset, without=(*_WITHOUT_EFFECT, "categories", "expand", "return_index"), batch_size=_BATCH_SIZE)
def predict(
    model: Callable[[Any], Any],
    dataset: Any,
    out: str | os.PathLike[str],
    *,
    key: str = "X_emb",
    categories: Mapping[str, Sequence[Any]] | None = None,
    device: torch.device | str | int | None = None,
    overwrite: bool = False,
    nan: Literal["error", "report"] = "error",
    progress: bool = False,
    **options: Any,
) -> Report:
    """Run a model once on every cell of an atlas, and write the results.

    Memory does not grow with the number of cells. After an interruption the same call resumes the work, on any number
    of ranks. Predictions become visible only when all of them are written. Models are not compared: after changing the
    model, give another `key`, another `out` or ``overwrite=True``.

    Parameters
    ----------
    model
        Module, method of a module (``model.encode``), or function. It is called with each batch, in inference mode, and
        returns a tensor or array with one row per cell, shape (batch, k) or (batch,), or a dict of them by name.
        Matrices become entries of obsm, and one-dimensional arrays become columns of obs. ``DistributedDataParallel``
        is unwrapped; a module sharded by ``fully_shard`` is called the same number of times on all ranks.
    dataset
        `scDataset`, whose batch size, genes, layers, obs, layout and transform apply. All rows of its collection are
        read in storage order; its strategy and filter have no effect. Or an atlas in any form that `dasksc.open`
        accepts, or several modalities (`Modalities`, MuData).
    out
        Path of a new Zarr store, which `dasksc.open` attaches to the atlas: ``attach={"obsm/X_emb": out}``. Or path of
        an AnnData store (Zarr v3) with the same cells, which is extended.
    key
        Name of predictions that the model returns without a name.
    categories
        Labels of integer codes that the model returns, by the name of the output:
        ``{"predicted": ["B cell", "T cell"]}``. Labels must be all text or all numbers. The codes become categorical
        columns of obs; -1 stands for a missing value.
    device
        Device to which the batches and the module, if there is one, are moved. Default: that of the module's first
        parameter.
    overwrite
        If True, predict all cells again, and replace existing keys and unfinished predictions. With several ranks, this
        requires a process group.
    nan
        ``"error"`` refuses NaN. ``"report"`` writes it, reads the predictions again, and counts it in the report.
    progress
        If True, show a progress bar with cells per second (requires tqdm).
    batch_size
        Number of rows in a batch, per rank, if `dataset` is an atlas. Default: 1,024.
    fetch_factor, fetch_callback, fetch_transform, batch_callback, batch_transform, rank, world_size
        As for `dasksc.scDataset`, if `dataset` is an atlas.
    obs, layers, obsm, genes, layout, dtype, scheduler, prefetch, memory_limit, mmap, pin_memory, group, transform
        As for `dasksc.scDataset`, if `dataset` is an atlas.
    genes_missing, genes_key, genes_repeated
        As for `dasksc.scDataset`, if `dataset` is an atlas.

    Returns
    -------
    Report
        Facts by name, also as attributes: ``path`` and ``n_obs``; ``n_predicted``, the number of cells that this call
        predicted on this rank, ``elapsed_s`` and ``cells_per_s``; ``is_complete``, which is False if other ranks are
        still predicting and there is no process group to wait for them; shape and type of the ``outputs`` by key, once
        complete; and a row in ``nan_cells`` for each output with NaN, with the number and up to five of the cells.

    Raises
    ------
    InputError
        If an argument is invalid; if a key exists; if the cells of `out` are not those of the atlas; if `out` lies
        inside a store; if unfinished predictions are of other data or other options; or if the model returns an
        unexpected shape or type, or NaN.
    StorageError
        If the disk is full, another rank failed, or another call overwrites the same predictions. Finished predictions
        are kept.

    Notes
    -----
    Unfinished work is kept in ``OUT.partial``. It resumes only with the same `key`, `categories`, batch size, data, and
    names and options of hooks and transforms, which the attributes of each array record. Files are compared by size and
    modification time. A data set of objects that cannot be pickled counts as another one in every call, so its
    predictions do not resume. Repeating a call whose predictions exist predicts nothing.

    `out` must be on a file system that all ranks share and that supports locks between machines.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(300, 8)
    >>> report = dasksc.predict(model, "atlas.h5ad", "emb.zarr")  # batches are tensors: only X is requested
    >>> report.n_predicted, report.is_complete, report.outputs["obsm/X_emb"]
    (2000, True, '(2000, 8) float32')
    >>> dasksc.open("atlas.h5ad", attach={"obsm/X_emb": "emb.zarr"}).obsm["X_emb"].shape
    (2000, 8)
    """
    begun = time.perf_counter()
    is_given = isinstance(dataset, scDataset)
    world = (
        dataset.ranks.current_world() if is_given else World.detect(*map(options.get, ("rank", "world_size", "group")))
    )
    ranks = Ranks(world)
    with ranks.failing_together():
        check_flags(overwrite=overwrite, progress=progress)
        if nan not in ("error", "report"):
            raise InputError(f"nan={nan!r} is neither 'error' nor 'report'")
        outputs = Outputs(key=check_name(key), categories=check_categories(categories))
        predictor = Predictor.of(model)
        device = None if device is None else device_of(device)
        if overwrite and not ranks.can_agree:
            raise InputError(
                f"with world_size={world.world_size} and no process group, the ranks cannot agree to predict all cells "
                "again, which overwrite=True (--overwrite) asks for. Call torch.distributed.init_process_group first, "
                "use one rank, or write to a new out="
            )
        path = target_path(out)
        dataset = _dataset_of(dataset, options)
        if not dataset.source.n_obs:
            raise InputError("the atlas has no cells to predict")
        store = _store_of(dataset, outputs, path)
        run = ranks.gather("run", store.start(overwrite=overwrite) if ranks.is_first else NEW)[0]
        if run != NEW and not overwrite and world.rank == 0:
            logger.warning(
                "%s predictions with these options that an earlier call wrote to %s. If the model has changed since, "
                "predict all cells again with overwrite=True",
                *("returning" if run == COMPLETE else "continuing", path),
            )
        if run == NEW and world.world_size == 1:
            run = os.urandom(8).hex()  # another call that begins now, perhaps with another model, does not join it
        n_predicted = 0
        if run != COMPLETE:
            store.join(run)
            if device is not None and predictor.module is not None:
                predictor.module.to(device)
            share = _Share(dataset, store, ranks, predictor.device if device is None else device)
            n_predicted = share.predict(predictor, outputs, nan=nan, overwrite=overwrite, shown=progress)
            store.publish(overwrite=overwrite)
            ranks.gather("end", "done")
    found = store.found() if store.is_complete() else {}
    elapsed_s = time.perf_counter() - begun
    return Report(
        path=str(path),
        n_obs=store.n_obs,
        n_predicted=n_predicted,
        elapsed_s=elapsed_s,
        cells_per_s=n_predicted / elapsed_s,
        is_complete=bool(found),
        outputs=Report(found),
        nan_cells=[one for key in found if (one := store.nan_cells(key))] if nan == "report" else [],
    )


class _Share:
    """Missing units in the range of units that belongs to this rank."""

    def __init__(self, dataset: scDataset, store: PredictionStore, ranks: Ranks, device: torch.device | None) -> None:
        self._dataset, self._store, self._ranks, self._device = dataset, store, ranks, device
        rank, n_ranks = ranks.world.rank, ranks.world.world_size
        first, last = (store.n_units * at // n_ranks for at in (rank, rank + 1))
        # Numbers of consecutive units minus their positions in the list are equal.
        runs = itertools.groupby(enumerate(store.missing(first, last)), lambda pair: pair[1] - pair[0])
        units = [[unit for _, unit in run] for _, run in runs]
        self._ranges = [(store.rows(run[0])[0], store.rows(run[-1])[1]) for run in units]

    def predict(self, predictor: Predictor, outputs: Outputs, *, nan: str, overwrite: bool, shown: bool) -> int:
        """Predict the missing cells and write their predictions; return their number."""
        store, ranks = self._store, self._ranks
        batch_size, writer = self._dataset.batch_size, ShardWriter(store)
        n_rows = sum(stop - start for start, stop in self._ranges)
        n_calls = sum(-(-(stop - start) // batch_size) for start, stop in self._ranges)
        if predictor.is_sharded:
            n_calls = max(map(int, ranks.gather("calls", str(n_calls))))
        label = "predicting" + (f" rank {ranks.world.rank}" if ranks.world.world_size > 1 else "")
        with store.keeping_only_shards(writer), progress_bar(total=n_rows, shown=shown) as advance:
            advance(0, label)
            has_begun = False
            with predictor.inference():
                for start, batch in self._batches(n_calls):
                    returned = predictor.function(batch)
                    if start is not None:
                        n = min(batch_size, store.n_obs - start)
                        arrays = outputs.arrays(returned, n)
                        described = outputs.described(arrays)
                        if nan == "error":
                            self._check_nan(arrays, start)
                        if not has_begun:
                            store.check_keys(described, overwrite=overwrite)
                    if not has_begun:
                        ranks.gather("begun", "begun")  # if the first batch fails on any rank, nothing is written
                        has_begun = True
                    if start is not None:
                        if writer.write(start, arrays, described):
                            ranks.check()
                        advance(n, label)
            writer.flush()
            if not has_begun:
                ranks.gather("begun", "begun")
        return n_rows

    def _batches(self, n_calls: int) -> Iterator[tuple[int | None, Any]]:
        """Yield the first row and the content of each batch; surplus batches repeat one, and have no first row."""
        n, batch = 0, None
        for start, stop in self._ranges:
            for batch in RowRange(self._dataset, start, stop, device=self._device):
                yield start, batch
                start += self._dataset.batch_size
                n += 1
        if n < n_calls and batch is None:
            batch = next(iter(RowRange(self._dataset, 0, self._dataset.batch_size, device=self._device)))
        for _ in range(n_calls - n):
            yield None, batch

    def _check_nan(self, arrays: Mapping[str, NDArray[Any]], start: int) -> None:
        for name, array in arrays.items():
            if len(rows := nan_rows(array)):
                named = self._store.named([start + int(row) for row in rows[:5]])
                cells = ", ".join(f"{row} ({cell})" if cell else str(row) for row, cell in named)
                raise InputError(
                    f"the model returned NaN in {name!r} for {len(rows):,} cells of a batch: rows {cells}. Look for "
                    "NaN in the data or in the parameters, or allow NaN with nan='report' (--nan report)"
                )


def _store_of(dataset: scDataset, outputs: Outputs, path: Path) -> PredictionStore:
    source = dataset.source
    collection = source.collection
    plan = {
        "key": outputs.key,
        "categories": outputs.categories,
        "n_obs": source.n_obs,
        "batch_size": dataset.batch_size,
        "data": _token_of(source),
        "hooks": {name: brief(hook) for name in _HOOKS if (hook := getattr(dataset, name)) is not None},
    }
    return PredictionStore(path, plan, names=lambda: _names_of(collection))


def _token_of(source: Any) -> str:
    """Return a token of the content of the batches, apart from hooks and transforms."""
    if isinstance(source, MatrixSource):
        matrices = {name: token_of(source.matrices[name]) for name in sorted(source.matrices)}
        return str(tokenize(matrices, source.yielded, dict(source.maker.obs)))
    data = getattr(source.collection, "adata", source.collection)
    values = getattr(data, "X", data)
    # The name of a Dask array over data in memory differs between processes.
    return token_of(matrix_of(values)) if isinstance(values, da.Array) else str(tokenize(values))


def _names_of(collection: Any) -> Iterable[Sequence[str]] | None:
    """Return the names of cells in pieces, or None if there are none."""
    if isinstance(collection, Modalities):
        return names_in_pieces(collection.obs_names)
    pieces: Iterable[Sequence[str]] | None = collection.name_pieces() if hasattr(collection, "name_pieces") else None
    return pieces


def _dataset_of(data: Any, options: Mapping[str, Any]) -> scDataset:
    """Return `data` if it is an `scDataset`; otherwise create an `scDataset` of the atlas."""
    if not isinstance(data, scDataset):
        if refused := [f"{name}=" for name in _WITHOUT_EFFECT if name in options]:
            raise InputError(
                f"{', '.join(refused)} cannot be given here: all cells are predicted once, in storage order. To "
                "predict only some of the cells, write them to a store first: dasksc.convert(path, out, filter=...)"
            )
        return scDataset(data, Streaming(), **{"batch_size": _BATCH_SIZE, **options})
    if options:
        raise InputError(
            f"{', '.join(f'{name}=' for name in options)} cannot be given with an scDataset, which already has these "
            "settings"
        )
    return data


class RowRange(scDataset):
    """Rows ``[start, stop)`` of the collection of a data set, in storage order, in batches of its content and size."""

    # `start` is a multiple of the batch size: random transforms depend on the position of a batch in the collection.
    def __init__(self, dataset: scDataset, start: int, stop: int, *, device: Any = None) -> None:
        spec, given = dataset.spec, dataset.spec.transforms
        options = {one.name: getattr(spec, one.name) for one in fields(spec) if one.init}
        options |= {"obs": (), "layers": (), "obsm": (), "genes": None, "filter": None, "progress": False}
        options |= {"genes_missing": "error", "genes_key": None, "genes_repeated": "error"}  # the source has the genes
        options |= {"strategy": Streaming(indices=slice(start, stop)), "drop_last": False, "equal_ranks": False}
        options["fetch_factor"] = dataset.memory.ordered_fetch_factor
        options["transform"] = None if given is None else Transforms(given.steps, start // dataset.batch_size)
        options["device"] = spec.device if device is None else device
        super().__init__(dataset.source, **options, scheduler=dataset._scheduler(), rank=0, world_size=1, seed=0)
        self._title = f"prediction of rows {start:,} to {stop:,}"

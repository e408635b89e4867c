"""Predictions for every cell of an atlas, written during inference.

Rows are divided into units of whole batches (`dasksc.inference.work`). A unit is stored as one shard of every output,
plus a marker file. The rows of a unit and of a batch depend on the number of cells and the batch size, not on ranks.
Units are kept in a folder named by the digest of a plan (model, data and options), so any process can find the missing
units.

Each rank

1. writes the plan to the work folder, unless another rank has already written the same plan, and claims a contiguous
   range of units. Both happen under a lock.
2. predicts and writes the missing units of its range, without the lock. At any time, only the batches read ahead and
   the predictions that are not yet written are in memory.
3. publishes the result, under the lock, if all units are complete: it writes the metadata and renames the result
   (arrays, a store or a file) into place (`dasksc.inference.targets`). A reader sees each prediction (a key such as
   ``obsm/X_emb``) complete or not at all.
4. waits for the other ranks, if there is a process group, so that the predictions exist when the call returns. Ranks
   report through the key-value store of the group. A rank that fails records its error, and the other ranks then fail
   as well.

Ranks use no collectives, except under FSDP, where every call of the model is collective. All ranks then make the same
number of calls: ranks with fewer batches repeat a batch and discard its result.

Errors name the problem: an existing key, a wrong shape, the cells with NaN, or how much disk space is needed. After an
error, complete units are kept; repeating the call predicts the missing ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

import dask.array as da
import torch
from dask.base import tokenize

from dasksc.atlas.cell_names import names_in_pieces
from dasksc.atlas.modalities import Modalities
from dasksc.batches.batch import device_of
from dasksc.checks import check_flags
from dasksc.displays import with_options_of
from dasksc.errors import DaskscError, InputError, StorageError
from dasksc.inference.calling import Predictor
from dasksc.inference.digests import model_digest
from dasksc.inference.outputs import Output, Outputs, check_categories, check_name
from dasksc.inference.sharing import NanError, RankStatus, Share, max_over_ranks
from dasksc.inference.targets import InFile, Target, target_of
from dasksc.inference.work import Work
from dasksc.loader.dataset import components_of, scDataset
from dasksc.loader.row_range import world_of
from dasksc.loader.source import MatrixSource
from dasksc.output.inputs import token_of
from dasksc.output.progress_bars import progress_bar, require_tqdm
from dasksc.planning.ranks import World
from dasksc.pushdown import matrix_of
from dasksc.sampling.strategies import Streaming

__all__ = ["PredictionReport", "Predictions", "predict"]

# Version of the plan. Unfinished predictions whose plan has another version are not resumed.
_FORMAT = 1
_BATCH_SIZE = 1024
# Arguments of `scDataset` that select or order cells.
_WITHOUT_EFFECT = ("strategy", "drop_last", "seed", "filter", "equal_ranks", "label_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionReport:
    """Result of `predict`.

    Parameters
    ----------
    path
        Path of the store or file that has the predictions.
    keys
        Shape and type of each key, such as ``{"obsm/X_emb": "(1000, 64) float32"}``; empty if `is_complete` is False.
    n_obs
        Number of cells of the atlas.
    n_predicted
        Number of cells that this call predicted on this rank, excluding cells predicted earlier or by other ranks.
    nan_cells
        For each output with NaN, the number of cells with NaN, and up to five of them as (row, name).
    elapsed_s
        Duration of this call in seconds.
    is_complete
        True if the keys exist. False if other ranks are still predicting and this call cannot wait for them because
        there is no process group.

    Examples
    --------
    >>> report = dasksc.predict(lambda X: X.sum(dim=1), "atlas.h5ad", "total.zarr", key="total")
    >>> report.n_predicted, report.is_complete, report.nan_cells
    (2000, True, {})
    """

    path: str
    keys: dict[str, str]
    n_obs: int
    n_predicted: int
    nan_cells: dict[str, tuple[int, list[tuple[int, str]]]]
    elapsed_s: float
    is_complete: bool

    @property
    def cells_per_s(self) -> float:
        """Cells that this rank predicted, per second."""
        return self.n_predicted / self.elapsed_s if self.elapsed_s else 0.0

    def __str__(self) -> str:
        if not self.is_complete:
            return f"{self.n_predicted:,} cells predicted; the last rank to finish writes them to {self.path}"
        keys = ", ".join(f"{name} {what}" for name, what in self.keys.items())
        rate = f" ({self.cells_per_s:,.0f} cells/s)" if self.n_predicted else ""
        n_predicted = f"{self.n_predicted:,} of {self.n_obs:,} cells predicted in {self.elapsed_s:.1f} s"
        lines = [f"{self.path}: {keys}; {n_predicted}{rate}"]
        for name, (n, cells) in self.nan_cells.items():
            named = ", ".join(f"{row} {cell}".strip() for row, cell in cells)
            lines.append(f"  NaN in {name} of {n:,} cells: {named}{', ...' if n > len(cells) else ''}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain types."""
        return asdict(self)


@with_options_of(scDataset, without=(*_WITHOUT_EFFECT, "return_index"), batch_size=_BATCH_SIZE)
def predict(
    model: Callable[[Any], Any],
    dataset: Any,
    out: str | os.PathLike[str],
    *,
    key: str = "X_emb",
    categories: Mapping[str, Sequence[Any]] | None = None,
    device: torch.device | str | int | None = None,
    in_place: bool = False,
    overwrite: bool = False,
    nan: Literal["error", "report"] = "error",
    progress: bool = False,
    **options: Any,
) -> PredictionReport:
    """Run a model once on every cell of an atlas, and write the results.

    Memory does not grow with the number of cells. After an interruption the same call resumes the work, on any number
    of ranks. Predictions become visible only when all of them are written.

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
        Path of the output:

        - a new Zarr store, which `dasksc.open` attaches: ``attach={"obsm/X_emb": out}``
        - an AnnData store (Zarr v3) with the same cells, which is extended
        - with `in_place`, an h5ad file with the same cells
    key
        Name of predictions that the model returns without a name.
    categories
        Labels of integer codes that the model returns, by the name of the output:
        ``{"predicted": ["B cell", "T cell"]}``. Labels must be all text or all numbers. The codes become categorical
        columns of obs; -1 stands for a missing value.
    device
        Device to which the batches and the module, if there is one, are moved. Default: that of the module's first
        parameter.
    in_place
        If True, `out` may be an h5ad file. When all predictions are complete, one process extends a copy of the file
        and replaces the file by the copy.
    overwrite
        If True, predict all cells again, and replace existing keys and unfinished predictions. With several ranks, this
        requires a process group.
    nan
        ``"error"`` refuses NaN. ``"report"`` writes it, and `PredictionReport.nan_cells` counts it.
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
    PredictionReport
        Shapes and types of the predictions, cells with NaN, and the rate.

    Raises
    ------
    InputError
        If an argument is invalid; if a key exists; if the cells of `out` are not those of the atlas; if `out` lies
        inside a store; if unfinished predictions are of another model, other data or other options; or if the model
        returns an unexpected shape or type, or NaN.
    StorageError
        If the disk is full, another rank failed, or another process predicts the same cells. Finished predictions are
        kept.

    Notes
    -----
    Unfinished work is kept in ``OUT.partial``. It resumes only with the same options, files and model. Models are
    compared by a digest of their parameters, buffers, attributes and the source code of their classes; functions, by
    their source code, defaults and closure. The digest does not cover hooks, global variables and functions that this
    code calls: after changing those, give ``overwrite=True``. A model or data set that cannot be pickled, such as
    one with an open file, counts as another one in every call, so its predictions do not resume.

    `out` must be on a file system that all ranks share and that supports locks between machines.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(300, 8)
    >>> report = dasksc.predict(model, "atlas.h5ad", "emb.zarr")  # batches are tensors: only X is requested
    >>> report.keys
    {'obsm/X_emb': '(2000, 8) float32'}
    >>> dasksc.open("atlas.h5ad", attach={"obsm/X_emb": "emb.zarr"}).obsm["X_emb"].shape
    (2000, 8)
    """
    check_flags(progress=progress)
    run = Predictions(
        model,
        dataset,
        out,
        key=key,
        categories=categories,
        device=device,
        in_place=in_place,
        overwrite=overwrite,
        nan=nan,
        options=options,
    )
    if progress:
        require_tqdm()
    return run.run(shown=progress)


class Predictions:
    """Predictions of an atlas on one rank.

    Parameters
    ----------
    model, dataset, out, key, categories, device, in_place, overwrite, nan
        As for `predict`.
    options
        Arguments of `dasksc.scDataset`.
    """

    def __init__(
        self,
        model: Any,
        dataset: Any,
        out: str | os.PathLike[str],
        *,
        key: str = "X_emb",
        categories: Mapping[str, Sequence[Any]] | None = None,
        device: Any = None,
        in_place: bool = False,
        overwrite: bool = False,
        nan: Literal["error", "report"] = "error",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if nan not in ("error", "report"):
            raise InputError(f"nan={nan!r} is neither 'error' nor 'report'")
        self._key = check_name(key)
        labels = check_categories(categories)
        self._nan = nan
        check_flags(in_place=in_place, overwrite=overwrite)
        self._overwrite = overwrite
        self.predictor = Predictor.of(model)
        self._device = self.predictor.device if device is None else device_of(device)
        self.dataset = _dataset_of(dataset, options or {})
        self._source = components_of(self.dataset).source
        self.world: World = world_of(self.dataset)
        n_obs = self._source.n_obs
        if not n_obs:
            raise InputError("the atlas has no cells to predict")
        self._outputs = Outputs(key=key, categories=labels)
        path = getattr(self._source.collection, "path", None)
        if device is not None and self.predictor.module is not None:
            self.predictor.module.to(self._device)
        self.target: Target = target_of(out, key, in_place=in_place, source=path)
        self.status = RankStatus(self.world)
        digests = {"model": model_digest(self.predictor.identity), "data": self._data_digest()}
        run = self.status.new_run() if overwrite or None in digests.values() else ""
        plan = {
            "format": _FORMAT,
            "n_obs": n_obs,
            "batch_size": self.dataset.batch_size,
            "key": key,
            "categories": labels,
            # What cannot be compared differs in every call.
            **{name: digest or run for name, digest in digests.items()},
            **({"run": run} if overwrite else {}),
        }
        self.work = Work(self.target.path, self.target.folder, plan, n_obs=n_obs, batch_size=self.dataset.batch_size)

    def _data_digest(self) -> str | None:
        """Return a digest of the content of the batches; None if it cannot be compared with that of another call."""
        source, dataset = self._source, self.dataset
        hooks = ("fetch_callback", "fetch_transform", "batch_callback", "batch_transform", "transform")
        functions = model_digest([getattr(dataset, name) for name in hooks])
        original = self.target.original
        if isinstance(source, MatrixSource):
            # Publishing replaces the file, which changes the tokens of its matrices.
            matrices = sorted(source.matrices)
            read = [token_of(source.matrices[name]) for name in matrices] if original is None else [original, *matrices]
            content = str(tokenize(read, source.yielded, dict(source.maker.obs)))
        else:
            data = getattr(source.collection, "adata", source.collection)
            values = getattr(data, "X", data)
            # The name of a Dask array over data in memory differs between processes.
            token = token_of(matrix_of(values)) if isinstance(values, da.Array) else model_digest(values)
            if token is None:
                return None
            content = str(tokenize(type(data).__qualname__, original or token, source.n_obs))
        return None if functions is None else str(tokenize(content, functions))

    # --- Steps ----------------------------------------------------------------------------------------

    def run(self, *, shown: bool = False) -> PredictionReport:
        """Predict the missing units, and publish the result if it is complete."""
        begun = time.perf_counter()
        status = self.status
        with status.recording_failure(), self.explaining():
            share = self.begin()
            n_done = 0
            if share is not None:
                n_done = self._loop(share, shown=shown)
                self.publish()
            status.await_others(self.work)
        return self.report(n_done, time.perf_counter() - begun)

    def begin(self) -> Share | None:
        """Begin or join the work; return the share of this rank, or None if the predictions exist."""
        target, work = self.target, self.work
        with work.locked(wait=True):
            # A file receives all keys at once. If it has them and the work folder still exists, a process was killed
            # after it had published them.
            if target.found(work.digest) and (not work.is_begun() or isinstance(target, InFile)):
                self._remove_leftover()
                return None
            target.check_cells(work.n_obs, self._names)
            work.begin(overwrite=self._overwrite)
            return Share(work, self.dataset, self.world, self._outputs)

    def _loop(self, share: Share, *, shown: bool) -> int:
        predictor = self.predictor
        n_calls = max_over_ranks(share.n_batches, self._device) if predictor.is_sharded else share.n_batches
        n_done = 0
        label = "predicting" + (f" rank {self.world.rank}" if self.world.world_size > 1 else "")
        total = share.n_rows + share.n_rows_done
        try:
            with progress_bar(total=total, shown=shown) as advance, predictor.inference():
                advance(share.n_rows_done, label)
                batches = share.batches(device=self._device, n_calls=n_calls)
                for batch in islice(batches, n_calls):
                    n = self.write_batch(share, predictor(batch))
                    n_done += n
                    advance(n, label)
            share.flush()
        finally:
            share.abandon()
        return n_done

    def write_batch(self, share: Share, returned: Any) -> int:
        """Write the predictions for the next batch of the share; return its number of rows."""
        try:
            return share.write_batch(returned, nan_allowed=self._nan == "report", check_outputs=self._refuse_existing)
        except NanError as error:
            cells = ", ".join(f"{row} ({name})" if name else str(row) for row, name in self._named(error.rows))
            raise InputError(
                f"the model returned NaN in {error.name!r} for {error.n:,} cells of a batch: rows {cells}. Look "
                "for NaN in the data or in the parameters, or allow NaN with nan='report' (--nan report)"
            ) from None

    def publish(self) -> None:
        """Make the predictions visible if all units are complete."""
        work, target = self.work, self.target
        with work.locked(wait=True):
            if not work.is_begun() or work.missing():
                return
            outputs, nan = work.collected(self._outputs.categories, target.found(work.digest))
            self._refuse_existing(outputs)
            target.publish(work, outputs, nan, self._names)
            work.remove()

    def _refuse_existing(self, outputs: Sequence[Output]) -> None:
        keys = [one.key for one in outputs]
        if self.target.index_key() in keys:
            raise InputError(
                f"the model returned {self.target.index_key()!r}, which is the key of the cell names in "
                f"{self.target.path}. Return the predictions under another name"
            )
        # A process that was killed may have published keys of this prediction.
        published = self.target.found(self.work.digest)
        existing = [] if self._overwrite else [key for key in self.target.existing(keys) if key not in published]
        if existing:
            raise InputError(
                f"{self.target.path} already has {existing[0]!r}. Give another key= or out=, or overwrite=True "
                "(--overwrite)"
            )

    def _remove_leftover(self) -> None:
        """Remove the work folder of a process that was killed after it had created the store or replaced the file."""
        path = self.target.path
        leftover = Work(path, path.with_name(path.name + ".partial"), self.work.plan, n_obs=1, batch_size=1)
        if leftover.is_begun():
            with contextlib.nullcontext() if leftover.folder == self.work.folder else leftover.locked(wait=True):
                if leftover.is_begun():
                    leftover.remove()

    def _names(self) -> Any:
        collection = self._source.collection
        if hasattr(collection, "name_pieces"):
            return collection.name_pieces()
        return names_in_pieces(collection.obs_names) if isinstance(collection, Modalities) else None

    def _named(self, rows: list[int]) -> list[tuple[int, str]]:
        """Return rows with the names of their cells; names are empty if the cells have none."""
        pieces, found, start = self._names(), dict.fromkeys(rows, ""), 0
        for piece in pieces or ():
            for row in rows:
                if start <= row < start + len(piece):
                    found[row] = piece[row - start]
            start += len(piece)
            if start > max(rows):
                break
        return list(found.items())

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """In errors, name the folder with the complete units and, for a full disk, the amount of space needed."""
        work = self.work
        try:
            yield
        except KeyboardInterrupt as error:
            error.add_note(f"Finished predictions are kept in {work.folder}. Run the same command again to resume.")
            raise
        except (OSError, RuntimeError) as error:
            # Libraries may wrap the error of the operating system and lose its errno, or its class, as HDF5 does.
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
                raise work.disk_full_error(error, needed_bytes=self._needed_bytes()) from error
            if isinstance(error, DaskscError | RuntimeError):
                raise
            raise StorageError(f"{work.target} cannot be written: {error}") from error
        except InputError:
            # A folder without results would obstruct the next attempt.
            if self.world.world_size == 1 and work.is_begun():
                with work.locked(wait=True):
                    if len(work.missing()) == work.n_units and not work.is_claimed():
                        work.remove()
            raise

    def _needed_bytes(self) -> int:
        work = self.work
        n_missing = sum(stop - start for start, stop in map(work.rows, work.missing()))
        done = [file.stat().st_size for file in work.store.rglob("*") if file.is_file()]
        row_bytes = sum(done) / max(1, work.n_obs - n_missing)
        return int(row_bytes * n_missing) + self.target.publish_bytes(work.n_obs, int(row_bytes * work.n_obs))

    def report(self, n_predicted: int, elapsed_s: float) -> PredictionReport:
        """Return the result of this call."""
        found = self.target.found(self.work.digest)
        is_complete = bool(found) and not self.work.is_begun()
        nan = {key: one.nan for key, one in found.items() if is_complete and one.nan.n}
        return PredictionReport(
            path=str(self.target.path),
            keys={key: f"{one.shape} {one.dtype}" for key, one in found.items()} if is_complete else {},
            n_obs=self.work.n_obs,
            n_predicted=n_predicted,
            nan_cells={name: (found.n, self._named(found.first)) for name, found in nan.items()},
            elapsed_s=elapsed_s,
            is_complete=is_complete,
        )


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

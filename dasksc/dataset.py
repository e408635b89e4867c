"""The data set that a training loop iterates."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cloudpickle
import dask.array as da
import numpy as np
import torch
from anndata import AnnData
from dask.utils import format_bytes
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from dasksc import collection as collections
from dasksc import config, filtering, lazy, process_memory
from dasksc.ahead import run_ahead
from dasksc.batch import Batch, BatchMaker, Categories, refuse_stacking, torch_dtype
from dasksc.epoch import EpochCounter
from dasksc.errors import InputError, WrongTypeError
from dasksc.memory_model import LONGER_ROWS, NOMINAL_THREADS, PLAN_ROW_BYTES, MemoryModel, Way
from dasksc.modalities import Modalities, is_modalities
from dasksc.multiindexable import count_rows, take_rows
from dasksc.plan import EpochPlan, FetchPlan, Stretch
from dasksc.progress import EpochStats, line_of, merged, progress_bar
from dasksc.reading import Reading
from dasksc.sampling import Sampler, SamplingStrategy, array_of, bind, is_random, n_rows_named, restricted
from dasksc.storage import Columns, FetchCost, Layout, Matrix, StackedMatrix, TakenMatrix, UseMmap, mapping, memory
from dasksc.window import Scheduler, Window, default_threads, portable_scheduler, resolve_scheduler
from dasksc.window.epoch_array import epoch_array
from dasksc.window.parts import Assembled, PartNumbers, part_of
from dasksc.window.reporting import reporting
from dasksc.window.schedulers import remember_security, securities_for_child
from dasksc.window.tasks import FetchedMatrices, FetchMatrices
from dasksc.world import Agreement, World

if TYPE_CHECKING:
    from distributed import Client
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["scDataset"]

logger = logging.getLogger(__name__)

_STATE_VERSION = 1

_AHEAD_BYTES = 2**24
_TOGETHER_BYTES = 2**23

# Of a batch in which something went wrong.
_ROWS_TOLD = 16

_HOOKS = ("fetch_callback", "fetch_transform", "batch_callback", "batch_transform")
_CALLED = (*_HOOKS, "transform")


class _Made(NamedTuple):
    batches: list[Any]
    gather_s: float
    error: Exception | None = None


class scDataset(IterableDataset[Any]):
    """Shuffled, weighted or class-balanced minibatches of an atlas on disk, as torch tensors.

    Parameters
    ----------
    data_collection
        What `dasksc.open` takes or returns: the path of an h5ad file or Zarr store, or an AnnData (in
        memory, backed or of Dask arrays). Or a 2-D Dask array. Or anything with ``len()`` that an
        ascending array of row numbers can index (NumPy, SciPy, pandas, a HuggingFace dataset, a
        `MultiIndexable`), which is read by indexing and yields what its indexing gives. Or several modalities of the
        same cells: `Modalities`, a MuData, or the path of an ``.h5mu`` file.
    strategy
        What is drawn: `Streaming`, `BlockShuffling`, `BlockWeightedSampling`, `ClassBalancedSampling`
        or your own `SamplingStrategy`.
    batch_size
        Rows of a batch, per rank.
    fetch_factor
        Batches read at once: a fetch is ``batch_size * fetch_factor`` rows, read in ascending order
        and shuffled in memory. None chooses the largest that `memory_limit` allows, from what is stored alone,
        so that every rank and machine chooses the same.
    drop_last
        Leave out the last short batch of each rank, and the rows that do not divide by the ranks.
    fetch_callback
        ``fetch_callback(collection, rows)`` reads the ascending `rows`, instead of
        ``collection[rows]``.
    fetch_transform
        Called with what was read.
    batch_callback
        ``batch_callback(data, positions)`` takes a batch out of it, instead of ``data[positions]``.
    batch_transform
        Called with each batch. With any hook given, batches of an AnnData start as AnnData.
        Hooks run one at a time.
    rank, world_size
        Which share of every epoch this process reads. Default: the process group's, or the
        launcher's (see `World.detect`).
    seed
        Of everything random, in [0, 2**64). None draws one, the same on all ranks of a process group; `Streaming` that
        does not shuffle needs none.
    obs, layers, obsm
        Names to yield beside X. Of several modalities, ``"rna:counts"`` for what one of them has.
    genes
        Keep only these columns of X and the layers: names, a boolean mask or positions. Of several modalities, a
        dict of these by modality.
    filter
        Draw only rows for which an expression over obs holds, such as ``"cell_type == 'T cell' and n_genes > 500"``;
        `dasksc.rows_where` says what may be in it. Of the strategy's own ``indices`` those are kept for which it holds.
    layout
        Of X and the layers: ``"dense"`` or ``"csr"`` tensors.
    dtype
        Of their values; None: that of ``adata.X``, in which array code computes. `InputError` while a batch is made
        if it is an integer type or float16 that cannot hold a value; ``"bool"`` says what is not zero.
    equal_ranks
        Give every rank the same number of batches of the same sizes, repeating at most one row per
        rank (`EpochPlan.n_padded`). False yields every row exactly once, for evaluation.
    scheduler
        Where fetches run: None (an active Dask Client, else threads of this process),
        ``"threads"``, ``"synchronous"``, a Client or its scheduler's address. Hooks and collections
        that are read by indexing always run in this process.
    prefetch
        Fetches in flight beyond the one being yielded. None: twice the threads that fetch, but no more than
        `memory_limit` allows.
    memory_limit
        Bytes of anonymous memory that iterating may take on this rank, such as ``"2GiB"``. DataLoader workers
        share it: they prefetch less, and it is told if even that is too much.
    mmap
        Whether local files may be memory-mapped; see `dasksc.open`, where it belongs for an AnnData that is
        open already.
    device
        Where batches are put; default: left on the CPU.
    pin_memory
        Whether batches are put in page-locked memory.
    progress
        Show a progress bar (needs tqdm).
    group
        The processes that share every epoch, where they are not all: a ``torch.distributed`` process group,
        or a ``DeviceMesh`` of one dimension or with one called ``"dp"``, ``"data"``, ``"fsdp"`` and the like. Ranks
        that differ in other dimensions only (tensor or pipeline parallel) read the same batches.
    transform
        Called with each `Batch`, whose result is yielded; such as `dasksc.tokens.RankTokens`. Unlike hooks it is given
        tensors, and by several threads at once, ahead of the loop. If it has a method ``at_epoch``, what
        ``transform.at_epoch(epoch)`` returns is called in an epoch.

    Attributes
    ----------
    categories
        For each name in `obs` that was encoded, its labels in the order of their codes.

    Raises
    ------
    InputError
        If the arguments do not fit the collection, each other or `memory_limit`; before any data moves.

    Notes
    -----
    Epochs count up by themselves, with any kind of DataLoader worker; an epoch that is left early
    counts. `set_epoch` overrides. All memory that grows with the data is that of `projected_bytes`.
    """

    def __init__(
        self,
        data_collection: Any,
        strategy: SamplingStrategy,
        batch_size: int,
        fetch_factor: int | None = 16,
        drop_last: bool = False,
        fetch_callback: Callable[[Any, Any], Any] | None = None,
        fetch_transform: Callable[[Any], Any] | None = None,
        batch_callback: Callable[[Any, Any], Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int | None = None,
        *,
        obs: Sequence[str] = (),
        layers: Sequence[str] = (),
        obsm: Sequence[str] = (),
        genes: Any = None,
        filter: str | None = None,
        layout: Layout = "dense",
        dtype: Any = "float32",
        equal_ranks: bool = True,
        scheduler: Scheduler | Client | str | None = None,
        prefetch: int | None = None,
        memory_limit: int | str | None = None,
        mmap: UseMmap = "auto",
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        progress: bool = False,
        group: ProcessGroup | DeviceMesh | None = None,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        super().__init__()
        self.strategy = strategy
        self.batch_size = config.whole_number("batch_size", batch_size)
        flags: dict[str, Any] = {"drop_last": drop_last, "equal_ranks": equal_ranks}
        for name, value in flags.items():
            if isinstance(value, str):
                raise InputError(f"{name} must be True or False; got {value!r}, which counts as True")
        self.drop_last = bool(drop_last)
        self.equal_ranks = bool(equal_ranks)
        self.fetch_callback = fetch_callback
        self.fetch_transform = fetch_transform
        self.batch_callback = batch_callback
        self.batch_transform = batch_transform
        self.transform = transform
        prefetch = config.get("prefetch") if prefetch is None else prefetch
        self._prefetch = None if prefetch is None else config.whole_number("prefetch", prefetch)
        self._memory_limit = config.memory_limit(memory_limit)
        self._device = device
        self._pin_memory = pin_memory
        self._progress = progress
        self._scheduler: Scheduler | Client | str | None = scheduler
        resolve_scheduler(scheduler)  # refuse a wrong one now
        names = {name: _names(name, value) for name, value in {"obs": obs, "layers": layers, "obsm": obsm}.items()}
        if layout not in ("dense", "csr"):
            raise InputError(f"layout must be 'dense' or 'csr'; got {layout!r}")
        if not isinstance(strategy, SamplingStrategy):
            raise WrongTypeError(
                f"strategy must be a SamplingStrategy such as dasksc.BlockShuffling(); got {strategy!r}"
            )
        for name in _CALLED:
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise WrongTypeError(f"{name} must be callable; got {getattr(self, name)!r}")

        self._hooked = any(getattr(self, name) is not None for name in _HOOKS)
        self._name = "data"
        self._matrices: dict[str, Matrix] | None = None
        self._maker: BatchMaker | None = None
        self.categories: dict[str, list[Any]] = Categories()
        options = {**names, "genes": genes, "layout": layout if layout != "dense" else None}
        options["transform"] = transform
        given = {name: value for name, value in options.items() if _given(value)}
        filtered_by = [] if filter is None else filtering.columns_of(filter)
        self._adopt(data_collection, names, genes, layout, dtype, given, mmap, filtered_by)
        if filter is not None:
            self.strategy = strategy = restricted(strategy, self._rows_where(filter), repr(filter))
        self._sampler: Sampler = bind(strategy, self.collection, self._n_obs, self._labels_of)

        self._given_world: tuple[int | None, int | None, Any] = (rank, world_size, group)
        if fetch_factor is None:
            fetch_factor = self._fitting_fetch_factor()
        self.fetch_factor = config.whole_number("fetch_factor", fetch_factor)
        self._refuse_too_large()

        self._world: World | None = None
        self._agreement: Agreement | None = None
        # Drawn here rather than when needed: forked DataLoader workers must find the same one.
        self._seed_is_given = seed is not None
        self._is_random = is_random(self._sampler)
        if seed is None:
            self._seed = secrets.randbits(63) if self._is_random else 0
        else:
            self._seed = config.whole_number("seed", seed, 0, 2**64)
        self._counter = EpochCounter()
        self._iteration = 0
        # Epoch and stretches read of it: where this process is, and where it is to go on.
        self._place: tuple[int, tuple[Stretch, ...]] | None = None
        self._resume: tuple[int, tuple[Stretch, ...]] | None = None
        # The epoch whose end a DataLoader worker has reached, while others may be in the middle of it.
        self._ended: int | None = None
        self._lock = threading.Lock()
        self._stats = EpochStats()
        self._token = secrets.token_hex(4)  # tells data sets of one name apart
        self._recycling: memory.Recycling | None = None
        found = World.detect(*self._given_world)
        self._plan_of(found, epoch=0)  # refuse sizes that do not fit
        # A world of one may yet become a larger one: the process group can be initialised later.
        if found.world_size > 1 and (self._seed_is_given or not self._is_random or Agreement.is_possible()):
            self._settle()

    # --- The collection -----------------------------------------------------------------------------

    def _adopt(
        self,
        data: Any,
        names: dict[str, list[str]],
        genes: Any,
        layout: Layout,
        dtype: Any,
        options: dict[str, Any],
        mmap: UseMmap,
        filtered_by: list[str],
    ) -> None:
        """Find out what `data` is, and how its rows are read."""
        with_names: Callable[[], AnnData] | None = None
        opening: Callable[..., AnnData] | None = None
        if is_modalities(data):
            self._adopt_modalities(data, names, genes, layout, dtype, mmap)
            return
        if isinstance(data, str | os.PathLike) or collections.is_several(data):
            self._name = collections.stem_of(data) if isinstance(data, str | os.PathLike) else f"{len(data)} atlases"
            label_key = getattr(self.strategy, "label_key", None)
            wanted = [*names["obs"], *filtered_by, *([] if label_key is None else [label_key])]
            # Hooks see every column; without them only what is asked for is read, names when somebody looks at obs.
            if self._hooked:
                data = collections.open(data, mmap=mmap)
            else:
                opening = functools.partial(collections.open, data, mmap=mmap)
                with_names = functools.partial(opening, obs=wanted)
                data = with_names(names=False)
        elif isinstance(data, AnnData):
            if data.filename is not None:
                self._name = Path(data.filename).stem
            if not mmap and not data.isbacked and isinstance(data.X, da.Array):
                raise InputError("mmap=False comes too late for an AnnData that is open; give it to dasksc.open")
            with_names = None if self._hooked else functools.partial(collections.open, data, mmap=mmap)
            data = collections.open(data, mmap=mmap, names=self._hooked)
        is_ours = isinstance(data, AnnData) or (isinstance(data, da.Array) and data.ndim == 2)
        if options and (self._hooked or not is_ours):
            why = "hooks say what is yielded" if self._hooked else f"a {type(data).__name__} is read by indexing"
            raise InputError(f"{', '.join(f'{name}=' for name in options)} cannot be used here: {why}")
        if isinstance(data, AnnData):
            self.collection: Any = collections.AnnDataView(data, with_names, opening)
            self._n_obs = int(data.n_obs)
            if data.X is None and not self._hooked:
                raise InputError(f"{self._name} has no X to yield")
        elif is_ours:
            self.collection = data
            self._n_obs = int(data.shape[0])
        else:
            self.collection = data
            try:
                self._n_obs = count_rows(data)
            except TypeError as error:
                # The callback alone reads it, and indices say which rows there are.
                n_obs = None if self.fetch_callback is None else n_rows_named(self.strategy)
                if n_obs is None:
                    raise WrongTypeError(
                        f"a {type(data).__name__} cannot be sampled: it has no len(). Give a path, an AnnData, an "
                        "array or another collection that row numbers can index; or fetch_callback= and the "
                        "strategy's indices="
                    ) from error
                self._n_obs = n_obs
        if not is_ours or self._hooked:
            if isinstance(self.collection, da.Array):
                self.collection = lazy.MatrixRows(matrix=lazy.matrix_of(self.collection))
            return
        if isinstance(data, AnnData):
            arrays = {"X": data.X}
            for group in ("layers", "obsm"):
                held = getattr(data, group)
                arrays |= {f"{group}/{name}": held[collections.known(group, name, held)] for name in names[group]}
            columns, encoded = _columns(genes, data.var_names), self._encoded(data.obs, names["obs"])
        else:
            if any(names.values()):
                raise InputError("obs=, layers= and obsm= need an AnnData; a Dask array has none")
            arrays, columns, encoded = {"X": data}, _columns(genes, range(data.shape[1])), {}
        self._matrices = _matrices(arrays)
        self._maker = BatchMaker(
            obs=encoded,
            codes=frozenset(self.categories),
            layout=layout,
            dtype=None if dtype is None else _value_dtype(dtype),
            columns=_for_each(columns, arrays),
            only_x=not any(names.values()) and self.transform is None,
            pinned=self._pin_memory,
        )
        self._warn_of_missing()

    def _adopt_modalities(
        self, data: Any, names: dict[str, list[str]], genes: Any, layout: Layout, dtype: Any, mmap: UseMmap
    ) -> None:
        """Read each matrix of each modality, all by the same rows."""
        if self._hooked:
            raise InputError("hooks cannot be used with several modalities; give scDataset one of them: data['rna']")
        if not isinstance(data, Modalities):
            if isinstance(data, str | os.PathLike):
                self._name = collections.stem_of(data)
            data = Modalities(data, mmap=mmap)
        if genes is not None and not isinstance(genes, Mapping):
            raise InputError(f"genes= of several modalities is a dict: {{{next(iter(data))!r}: [...]}}")
        for modality in genes or {}:
            collections.known("modalities", modality, data.mod)
        arrays: dict[str, Any] = {}
        columns: dict[str, Columns] = {}
        for modality, adata in data.mod.items():
            own = {f"{modality}:X": adata.X}
            for group in ("layers", "obsm"):
                for name in names[group]:
                    of, colon, rest = name.partition(":")
                    if not colon or of not in data.mod:
                        raise InputError(f"{group}={name!r} must say of which modality it is: '{modality}:{name}'")
                    if of == modality:
                        held = getattr(adata, group)
                        own[f"{modality}:{group}/{rest}"] = held[collections.known(f"{group} of {of}", rest, held)]
            arrays |= own
            columns |= _for_each(_columns((genes or {}).get(modality), adata.var_names), own)
        self.collection = data
        self._n_obs = data.n_obs
        self._matrices = _matrices(arrays)
        self._maker = BatchMaker(
            obs=self._encoded(data.obs, names["obs"]),
            codes=frozenset(self.categories),
            layout=layout,
            dtype=None if dtype is None else _value_dtype(dtype),
            columns=columns,
            only_x=False,
            pinned=self._pin_memory,
            modalities=tuple(data.mod),
        )
        self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        """Warn of columns that batches have as NaN, since the cells are of an atlas that lacks them."""
        columns = cast(BatchMaker, self._maker).columns
        for key, matrix in cast(dict[str, Matrix], self._matrices).items():
            n_missing = matrix.n_missing(columns.get(key)) if isinstance(matrix, StackedMatrix | TakenMatrix) else 0
            if n_missing:
                logger.warning(
                    "batches have NaN in %d of %d columns of %s, for cells of atlases that lack them. Open them with "
                    "dasksc.open(..., join='outer', fill_value=0) for zeros there",
                    *(n_missing, len(columns.get(key, range(matrix.shape[1]))), matrix.label),
                )

    def _encoded(self, obs: Any, names: list[str]) -> dict[str, NDArray[Any]]:
        """Return obs columns as numbers, codes as narrow as they are, and keep the labels that they stand for."""
        encoded = {}
        for name in names:
            column = obs[collections.known("obs", name, obs)]
            encoded[name], labels = collections.encode_column(column, narrow=True)
            if labels is not None:
                self.categories[name] = labels
        return encoded

    def _labels_of(self, key: str) -> Any:
        obs = self._table_of_rows()
        if obs is None:
            raise InputError(f"label_key={key!r} names an obs column, and this collection has no obs; pass labels=")
        if isinstance(self.collection, collections.AnnDataView):
            return self.collection.column(key)
        return obs[collections.known("obs", key, obs)]

    def _table_of_rows(self) -> Any:
        """Return what the collection has of obs, None if it has none."""
        collection = self.collection
        return getattr(collection, "table" if isinstance(collection, collections.AnnDataView) else "obs", None)

    def _rows_where(self, expression: str) -> NDArray[np.bool_]:
        obs = self._table_of_rows()
        if obs is None:
            raise InputError(f"filter={expression!r} is over obs, and this collection has none; give indices= instead")
        return filtering.holds(expression, obs)

    # --- Sizes --------------------------------------------------------------------------------------

    @property
    def fetch_size(self) -> int:
        """Rows of a fetch."""
        return self.batch_size * self.fetch_factor

    @property
    def rank(self) -> int:
        """Which share of every epoch this process reads."""
        return self._here().rank

    @property
    def world_size(self) -> int:
        """How many processes share every epoch."""
        return self._here().world_size

    @property
    def seed(self) -> int:
        """What everything random is keyed by."""
        if not self._seed_is_given and self._here().world_size > 1:
            self._settle()  # the ranks agree on it
        return self._seed

    @property
    def projected_bytes(self) -> int | None:
        """Anonymous memory that iterating needs at most, in bytes; None for collections read by indexing.

        The fetch being yielded, those in flight, what reading and decoding them takes, and the batches
        gathered ahead. Mapped files need none, so it is more on a file system that files are not mapped from.
        Rows are taken to be up to a tenth longer than the average one. On a cluster it grows with the workers that
        join, as far as ``memory_limit`` allows.
        """
        return None if self._matrices is None else self._way().demand.anonymous

    @property
    def projected_pages(self) -> int | None:
        """Pages of files that iterating needs in the page cache at the same time, in bytes; None as above.

        Of mapped files, those of all fetches in flight, of others those being read. They are no memory of this process,
        yet a control group, such as that of a Slurm job or a container, counts them.
        """
        return None if self._matrices is None else self._way().demand.pages

    @property
    def _fetches_travel(self) -> bool:
        """Whether other processes fetch, and what they read is sent here."""
        return not resolve_scheduler(self._scheduler).in_process

    @functools.cached_property
    def _costs(self) -> dict[str, Any]:
        """What a `MemoryModel` is given of the matrices: costs by name, mapped and read, and which must be mapped."""

        def costs() -> dict[str, FetchCost]:
            return {name: matrix.cost for name, matrix in cast(dict[str, Matrix], self._matrices).items()}

        with mapping(True):
            mapped = costs()
        with mapping(False):
            forced = frozenset(name for name, cost in costs().items() if cost == mapped[name])
        with mapping(False, is_strict=True):
            return {"mapped": mapped, "read": costs(), "forced": forced}

    def _model(self, fetch_factor: int) -> MemoryModel:
        return MemoryModel(
            **self._costs,
            n_obs=self._n_obs,
            batch_size=self.batch_size,
            fetch_factor=fetch_factor,
            batch_bytes=self._batch_bytes(),
            n_batches=3 + self._batches_ahead(),
            run_rows=float(getattr(self.strategy, "block_size", 1)),
            travels=self._fetches_travel,
        )

    def _batches_ahead(self) -> int:
        """Batches to gather ahead: no more than stay in the caches of the cores until they are used."""
        return max(2, min(int(config.get("batches-ahead")), int(_AHEAD_BYTES / self._batch_bytes())))

    def _batch_bytes(self) -> float:
        maker, matrices = cast(BatchMaker, self._maker), cast(dict[str, Matrix], self._matrices)
        row_bytes = PLAN_ROW_BYTES + 8.0 * len(maker.obs)
        for name, matrix in matrices.items():
            dtype = matrix.dtype if maker.dtype is None else maker.dtype
            itemsize = int(torch_dtype(dtype).itemsize)
            if dtype.kind in "iu" and not np.can_cast(matrix.stored_dtype, dtype, "safe"):
                # Gathered in the stored type first, to be checked.
                itemsize += matrix.stored_dtype.itemsize
            is_obsm = _is_obsm(name)
            dense = itemsize * len(maker.columns.get(name, range(matrix.shape[1])))
            # Values may be converted to a wider type, and columns from two bytes to four.
            row_bytes += dense if is_obsm or maker.layout == "dense" else 2 * LONGER_ROWS * matrix.cost.row
        return self.batch_size * row_bytes

    @property
    def _n_threads(self) -> int:
        """Threads that fetch, in a process that is no DataLoader worker: as many as the memory allows.

        Of a cluster, this rank's share for now.
        """
        world = World.detect(*self._given_world)
        n_of_cluster = resolve_scheduler(self._scheduler).n_threads
        if n_of_cluster is not None:
            return max(1, n_of_cluster // world.world_size)
        n_threads = default_threads(local_world_size=world.local_world_size)
        if self._matrices is not None and self._prefetch is not None:
            model = self._model(self.fetch_factor)
            depth = model.depth((), prefetch=self._prefetch, n_threads=n_threads)
            while (
                n_threads > NOMINAL_THREADS
                and model.demand(depth=depth, n_threads=n_threads, unmapped=()).anonymous > self._memory_limit
            ):
                n_threads -= 1
        return n_threads

    @property
    def _n_parts(self) -> int:
        """Tasks of a fetch."""
        return 1 if self._matrices is None else self._way().n_parts

    def _depth(self, n_threads: int | None = None) -> int:
        """Parts of fetches in flight beyond the fetch being yielded, if `n_threads` fetch."""
        if self._matrices is not None:
            return self._way(n_threads).depth
        return self._prefetch if self._prefetch is not None else 2 * (n_threads or self._n_threads)

    def _way(self, n_threads: int | None = None, n_parts: int | None = None) -> Way:
        """Return how fetches are read here and now, and how many at a time, if `n_threads` fetch `n_parts` of each."""
        if n_threads is None:
            n_threads = self._n_threads
        model = dataclasses.replace(self._model(self.fetch_factor), parted=n_parts)
        limit = process_memory.memory_limit()
        worker = get_worker_info()
        local_world_size = World.detect(*self._given_world).local_world_size
        n_processes = local_world_size * (1 if worker is None else worker.num_workers)
        available = process_memory.share_of(
            limit,
            n_processes=n_processes,
            own=process_memory.own_bytes(),
            reused=memory.kept_bytes(),
        )
        mappable_bytes = sum(model.read[name].row for name in model.mappable) * self._n_obs
        return model.way(
            prefetch=self._prefetch,
            n_threads=n_threads,
            limit=self._memory_share(),
            available=available,
            n_sharing=n_processes,
            may_map=limit.address_bytes is None or 2 * mappable_bytes < limit.address_bytes,
        )

    def _job_bytes(self) -> int:
        """Return what a process needs to read at full speed, in bytes, with page cache, code and what it holds now."""
        demand = self._model(self.fetch_factor).everything(prefetch=self._prefetch, n_threads=self._n_threads)
        # Batches that are held now were counted, too.
        held = max(0, process_memory.own_bytes() - memory.kept_bytes())
        return held + process_memory.CODE_BYTES + demand.total

    def _current_depth(self, scheduler: Scheduler) -> Callable[[], int]:
        """Return what says how much may be in flight, for a window: workers of a cluster come and go."""
        world = self._settle()
        depths: dict[int, int] = {}

        def depth() -> int:
            # Asked with every result, so projecting the memory is left to when the number of threads has changed.
            n_threads = max(1, (scheduler.n_threads or 0) // world.world_size)
            if n_threads not in depths:
                depths[n_threads] = self._depth(n_threads)
            return depths[n_threads]

        return depth

    def _memory_share(self) -> int:
        """Memory for this process, in bytes: DataLoader workers share what the rank may use."""
        worker = get_worker_info()
        return self._memory_limit if worker is None else self._memory_limit // worker.num_workers

    def _warn_of_workers(self) -> None:
        """Tell if the DataLoader workers of a rank need more memory than it may use, however little they prefetch."""
        worker = get_worker_info()
        if worker is None or worker.id > 0 or self._matrices is None:
            return
        needed = self._way().demand.anonymous
        if needed > self._memory_share():
            logger.warning(
                "%d DataLoader workers need %s of memory each, together more than memory_limit (%s). Use fewer "
                "(num_workers=0 prefetches on threads), or lower fetch_factor, now %d",
                worker.num_workers,
                format_bytes(needed),
                format_bytes(self._memory_limit),
                self.fetch_factor,
            )

    def _refuse_too_large(self) -> None:
        """Refuse sizes whose projection is beyond the limit, with what would fit."""
        if self._matrices is None:
            return
        limit, n_threads = self._memory_limit, 0 if self._fetches_travel else self._n_threads

        def needed(factor: int) -> int:
            model = self._model(factor)
            depth = self._prefetch * model.n_parts(()) if self._prefetch else 1
            return model.demand(depth=depth, n_threads=n_threads, unmapped=()).anonymous

        factor = self.fetch_factor
        if needed(factor) <= limit:
            return
        while factor > 1 and needed(factor) > limit:
            factor //= 2
        raise InputError(
            f"fetches of {self.batch_size} x {self.fetch_factor} rows, {self._prefetch or 'few'} in flight, and their "
            f"batches need {format_bytes(needed(self.fetch_factor))} of memory ({needed(self.fetch_factor)} bytes), "
            f"but memory_limit is {format_bytes(limit)} ({limit} bytes). Lower fetch_factor, batch_size or prefetch, "
            f"or raise the limit: {'' if needed(factor) <= limit else 'not even '}fetch_factor={factor} fits"
        )

    def _fitting_fetch_factor(self) -> int:
        if self._matrices is None:
            raise InputError("fetch_factor=None needs an AnnData or a Dask array, whose rows have a known size")
        return self._model(1).fitting_fetch_factor(self._memory_limit, prefetch=self._prefetch)

    def __len__(self) -> int:
        """Batches this rank yields in a whole epoch."""
        return self._plan_of(self._settle(), epoch=0).n_batches

    @property
    def n_batches_left(self) -> int:
        """Batches this rank yields in the next iteration: of a whole epoch, or what `load_state_dict` left of one."""
        epoch = self._counter.peek()
        if self._resume is None or self._resume[0] != epoch:
            return self._plan_of(self._here(), epoch=0).n_batches
        world = self._here()
        consumed, n_done = self._split(self._resume[1], world)
        return self._plan_of(world, epoch, consumed).n_batches - n_done

    # --- Ranks and epochs -----------------------------------------------------------------------------

    def _here(self) -> World:
        """Return rank and world size as they are now. Looking settles nothing: a process group may be yet to come."""
        return World.detect(*self._given_world) if self._world is None else self._world

    def _settle(self) -> World:
        """Fix rank, world size and seed, at the latest when they are first needed."""
        world = self._world
        if world is None:
            world = World.detect(*self._given_world)
            agreement = Agreement(world)
            if world.world_size > 1 and not self._seed_is_given and self._is_random:
                if get_worker_info() is not None:
                    raise InputError(
                        "a DataLoader worker cannot agree on a seed with other ranks: pass seed=, or call "
                        "len(dataset) once on every rank after init_process_group and before iterating"
                    )
                self._seed = agreement.seed(self._seed)
                self.__dict__.pop("fingerprint", None)
            self._agreement = agreement
            self._world = world
        return world

    def _check_world(self) -> World:
        world = self._settle()
        if get_worker_info() is None:
            found = World.detect(*self._given_world)
            if (found.rank, found.world_size) != (world.rank, world.world_size):
                raise InputError(
                    f"this data set was settled as rank {world.rank} of {world.world_size} (from {world.source}), but "
                    f"this process is rank {found.rank} of {found.world_size} (from {found.source}) now. Make it, or "
                    "first ask for its length, after the process group is initialised"
                )
        return world

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read epoch `epoch`; those after it count on from there."""
        self._counter.set(config.whole_number("epoch", epoch, 0, 2**32))
        self._place = self._resume

    def _plan_of(self, world: World, epoch: int, consumed: tuple[Stretch, ...] = ()) -> EpochPlan:
        return EpochPlan(
            sampler=self._sampler,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            drop_last=self.drop_last,
            equal_ranks=self.equal_ranks,
            seed=self._seed,
            epoch=epoch,
            rank=world.rank,
            world_size=world.world_size,
            consumed=consumed,
        )

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Return this rank's plan of an epoch; default: of the next one to be read."""
        _ = self.seed  # agreed on
        return self._plan_of(self._here(), self._counter.peek() if epoch is None else epoch)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What ranks compare: a digest of shapes, types, the strategy with its arrays, the sizes and the seed."""
        maker = self._maker
        columns = maker and {name: one.positions.tobytes() for name, one in maker.columns.items()}
        yielded = None if maker is None else (maker.layout, str(maker.dtype), columns)
        sizes = (self.batch_size, self.fetch_factor, self.seed, yielded)
        return hashlib.blake2b(repr((self._identity, sizes)).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to be resumed from; never paths or times."""
        matrices = self._matrices or {}
        identity = {
            "n_obs": self._n_obs,
            "matrices": {name: [*matrix.shape, str(matrix.stored_dtype)] for name, matrix in matrices.items()},
            "strategy": f"{type(self.strategy).__name__} {self._sampler.digest()}",
            "drop_last": self.drop_last,
            "equal_ranks": self.equal_ranks,
        }
        if (self.drop_last and self._sampler.shuffle_blocks) or getattr(self.strategy, "drop_last", False):
            identity["left_out"] = "evenly"  # versions that left out other rows did not say
        return identity

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where in its epochs the data set is, from which `load_state_dict` continues.

        The state is the same on every rank when all have yielded equally many batches, and holds plain
        numbers and strings. Inside a DataLoader worker it is the worker's own. In a process whose
        DataLoader workers do the reading it tells whole epochs only, and warns where they are in the middle of one.

        Returns
        -------
        dict
            ``version``, ``seed``, ``epoch``, ``fingerprint`` (what must match) and ``consumed``: for each
            stretch of the epoch its world size, batch size, fetch factor and batches per rank.
        """
        epoch, consumed = self._place or (self._counter.peek(), ())
        state = {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "fingerprint": dict(self._identity),
            "consumed": [dataclasses.astuple(stretch) for stretch in consumed],
        }
        worker = get_worker_info()
        if worker is not None:
            state["worker"] = (worker.id, worker.num_workers)
        elif (unfinished := self._counter.unfinished()) is not None:
            logger.warning(
                "the state tells whole epochs only: DataLoader workers are in the middle of epoch %d, of which a run "
                "that goes on from it reads no more. Use num_workers=0, or the state of torchdata's StatefulDataLoader",
                unfinished,
            )
        return state

    def load_state_dict(self, state: Any) -> None:
        """Continue from `state` at the next iteration, with the very next batch.

        Another world size, batch size or fetch size deals what is left of the epoch again: every row of
        the epoch is still yielded exactly once, up to padding, and what was dropped stays dropped.

        Raises
        ------
        InputError
            If the state is of other data, another strategy or seed; says what differs.
        """
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            version = state.get("version") if isinstance(state, dict) else state
            raise InputError(f"this is no state of version {_STATE_VERSION} of a dasksc.scDataset; got {version!r}")
        epoch, seed, consumed = _checked_state(state)
        was = dict(state["fingerprint"])
        if "left_out" not in was and "left_out" in self._identity:
            if state["consumed"] and was.get("drop_last") == self.drop_last:
                raise InputError(
                    f"the state was taken in the middle of epoch {state['epoch']} by a version of dasksc whose "
                    "drop_last left out other rows, so the rest of that epoch is unknown. Begin an epoch: set "
                    "state['consumed'] = [] and load it again"
                )
            was["left_out"] = self._identity["left_out"]
        differing = [
            f"{name} is {self._identity[name]!r} and was {was.get(name)!r}"
            for name in self._identity
            if self._identity[name] != was.get(name)
        ]
        if self._seed_is_given and self._seed != seed:
            differing.append(f"seed is {self._seed} and was {seed}")
        if differing:
            raise InputError(
                f"the state does not fit this data set: {'; '.join(differing)}. Make the data set as it was made when "
                "the state was taken; rank, world size, batch size and fetch size may differ"
            )
        worker = get_worker_info()
        if tuple(state.get("worker", ())) != (() if worker is None else (worker.id, worker.num_workers)):
            raise InputError("a state taken inside DataLoader workers fits the same number of workers only")
        world = self._here()
        last = consumed[-1] if consumed else None
        if worker is not None and last is not None and not self._goes_on(last, world):
            raise InputError(
                "inside DataLoader workers an epoch goes on with the same world, batch and fetch size only: it was "
                f"read as {last}"
            )
        # Agreed on or not, the seed is the one that the state's batches came from.
        self._seed, self._seed_is_given = seed, True
        self.__dict__.pop("fingerprint", None)
        self._place = self._resume = (epoch, consumed)
        if worker is None:
            self._counter.set(epoch)
        else:
            self._counter.resume(worker.seed - worker.id, worker.id, worker.num_workers, epoch)

    def _goes_on(self, stretch: Stretch, world: World) -> bool:
        """Whether a stretch was read as this data set reads, so that its next batch is simply the next."""
        sizes = (world.world_size, self.batch_size, self.fetch_factor)
        return (stretch.world_size, stretch.batch_size, stretch.fetch_factor) == sizes

    # --- Iterating ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if not self._hooked:
            refuse_stacking(sys._getframe(1).f_locals.get("self"))
        if self._ended is not None:
            self._place, self._ended = (self._ended + 1, ()), None
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # A generator: nothing is settled, and no epoch bound, before the first batch is asked for.
        world = self._check_world()
        worker = get_worker_info()
        if worker is None:
            epoch = self._counter.advance()
        else:
            epoch = self._counter.join(worker.seed - worker.id, worker.id, worker.num_workers)
            self._warn_of_workers()
        consumed, n_done = self._resumed(epoch, world)
        plan = self._plan_of(world, epoch, consumed)
        first, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        agreement = self._agreement if worker is None else None
        iteration = self._iteration
        self._iteration += 1
        if agreement is not None:
            agreement.begin(iteration, epoch, self.fingerprint)
        ks = range(first, plan.n_fetches, n_workers)
        n_batches = _n_batches(plan, ks) - n_done
        batches = self._batches(plan, ks, n_done, world, n_workers)
        has_last = plan.n_fetches - 1 in ks
        self._stats = stats = EpochStats(plan, n_done=n_done, n_left=n_batches, has_last=has_last)
        # Also what fails before its first batch can be continued.
        self._place = epoch, (*consumed, self._stretch(world, n_done)) if n_done or worker is not None else consumed
        try:
            with progress_bar(stats, n_batches=n_batches, shown=self._progress and first == 0) as bar:
                for batch in stats.timed(batches):
                    bar.update()
                    self._place = epoch, (*consumed, self._stretch(world, n_done + stats.n_batches))
                    yield batch
                    if stats.n_batches == 1 and agreement is not None:
                        agreement.go_on(iteration, 1)
            if worker is None:
                self._place = epoch + 1, ()
            else:
                self._ended = epoch
        finally:
            batches.close()
            stats.freeze()
            if worker is not None:
                self._report(worker, epoch, stats.report())
            elif stats.n_batches == n_batches:
                logger.info("%s", line_of(stats.report()))
            if agreement is not None:
                if stats.n_batches < n_batches:
                    agreement.leave(iteration, stats.n_batches)
                else:
                    agreement.finish(iteration)

    def _stretch(self, world: World, n_batches: int) -> Stretch:
        return Stretch(
            world_size=world.world_size,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            n_batches=n_batches,
        )

    def _resumed(self, epoch: int, world: World) -> tuple[tuple[Stretch, ...], int]:
        """Return what was read of an epoch in other ways, and how many batches in this one."""
        resume, self._resume = self._resume, None
        if resume is None:
            return (), 0
        if resume[0] != epoch:
            # Workers of later passes are copies of a data set that has not itself gone on.
            level = logging.WARNING if get_worker_info() is None else logging.DEBUG
            logger.log(
                level, "the state that was loaded is of epoch %d; epoch %d begins at its start", resume[0], epoch
            )
            return (), 0
        return self._split(resume[1], world)

    def _split(self, consumed: tuple[Stretch, ...], world: World) -> tuple[tuple[Stretch, ...], int]:
        """Part the stretches that were read in other ways from the batches read in this one."""
        if consumed and self._goes_on(consumed[-1], world):
            return consumed[:-1], consumed[-1].n_batches
        return consumed, 0

    def _batches(
        self, plan: EpochPlan, ks: range, n_done: int, world: World, n_workers: int
    ) -> Generator[Any, None, None]:
        """Yield the batches of the fetches `ks` but for the first `n_done`."""
        ks = ks[n_done // plan.fetch_factor :]
        n_skipped = n_done % plan.fetch_factor
        n_threads = default_threads(local_world_size=world.local_world_size, n_workers=n_workers)
        if self._matrices is not None:
            n_threads = min(n_threads, self._n_threads)
        key = f"dasksc-fetch-{self._name}-e{plan.epoch}-r{plan.rank}"
        if self._matrices is not None and self._maker is not None:
            return self._gathered(plan, ks, n_skipped, key, n_threads)
        return self._indexed(plan, ks, n_skipped, key, n_threads)

    def _describe(self, plan: EpochPlan, plans: dict[int, FetchPlan], n_parts: int) -> Callable[[int], str]:
        labels = [matrix.label for matrix in (self._matrices or {}).values()] or [self._name]

        def describe(i: int) -> str:
            k, part = divmod(i, n_parts)
            what = f"fetch {k} of {plan.n_fetches} (epoch {plan.epoch}, rank {plan.rank}"
            if k in plans:  # else it is the plan itself that failed
                rows = part_of(plans[k].rows, part, n_parts)
                what += f", {len(rows)} rows from {rows[0]} to {rows[-1]}"
            return f"{what}) of {', '.join(labels)}"

        return describe

    def _window(
        self,
        task: Callable[[Any], Any],
        plan: EpochPlan,
        ks: range,
        key: str,
        n_threads: int,
        in_process: bool,
        reading: Reading | None = None,
    ) -> tuple[Window[Any], dict[int, FetchPlan]]:
        """Start fetching. The plans of fetches in flight are kept beside it, to make their batches by."""
        plans: dict[int, FetchPlan] = {}
        planning = threading.Lock()
        n_parts = self._parts_of(reading)

        def rows_of(i: int) -> NDArray[np.int64]:
            k, part = divmod(i, n_parts)
            with planning:
                if k not in plans:
                    plans[k] = plan.fetch(k)
            return part_of(plans[k].rows, part, n_parts)

        scheduler = resolve_scheduler(self._scheduler)
        depth: int | Callable[[], int]
        if reading is not None:
            depth = reading.depth
        elif scheduler.client is None:
            depth = self._depth()
        elif in_process:
            scheduler, depth = resolve_scheduler("threads"), self._depth(n_threads)
        else:
            depth = self._current_depth(scheduler)
        window: Window[Any] = Window(
            task,
            PartNumbers(ks, n_parts) if n_parts > 1 else ks,
            name=key,
            scheduler=scheduler,
            depth=depth,
            max_bytes=self._memory_share(),
            argument=rows_of,
            describe=self._describe(plan, plans, n_parts),
            n_threads=n_threads,
            expected_bytes=None if self._matrices is None else self._part_bytes(reading),
        )
        self._stats.fetches = window.figures
        return window, plans

    def _part_bytes(self, reading: Reading | None) -> int:
        """Return what a part of a fetch holds in this process, in bytes."""
        model, unmapped = self._model(self.fetch_factor), () if reading is None else reading.unmapped
        return int(self.fetch_size / self._parts_of(reading) * model.held_row_bytes(unmapped))

    def _parts_of(self, reading: Reading | None) -> int:
        return self._n_parts if reading is None else reading.n_parts

    def _loader(self) -> dict[str, str | int | None]:
        """Return what tells this loader from others on the loader page."""
        worker = get_worker_info()
        return {
            "key": self._token,
            "name": self._name,
            "worker": None if worker is None else worker.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _gathered(
        self, plan: EpochPlan, ks: range, n_skipped: int, key: str, n_threads: int
    ) -> Generator[Any, None, None]:
        """Batches gathered straight from fetched matrices."""
        maker = cast(BatchMaker, self._maker)
        reading = None if self._fetches_travel else Reading(self._way, self._name, self._job_bytes)
        task = FetchMatrices(cast(dict[str, Matrix], self._matrices), reading)
        n_ahead = self._batches_ahead()
        # Handing a batch over costs as much as gathering a small one: some are made in one go.
        n_together = max(1, min(int(_TOGETHER_BYTES / self._batch_bytes()), n_ahead // 2, self.fetch_factor))
        left_in_fetch = 0
        transform = self.transform
        if transform is not None and hasattr(transform, "at_epoch"):
            transform = transform.at_epoch(plan.epoch)

        def make(fetched: FetchedMatrices, fetch: FetchPlan, numbers: range) -> _Made:
            start = perf_counter()
            made: list[Any] = []
            for i in numbers:
                try:
                    batch = maker.make(fetched, fetch.rows, fetch.batch(i))
                    made.append(batch if transform is None else transform(cast(Batch, batch)))
                except Exception as error:
                    _note(error, fetch, i, plan)
                    return _Made(made, perf_counter() - start, error)
            return _Made(made, perf_counter() - start)

        def jobs() -> Iterator[Callable[[], _Made]]:
            nonlocal left_in_fetch
            for k, fetched in fetches:
                fetch = plans.pop(k)
                for first in range(n_skipped if k == ks[0] else 0, fetch.n_batches, n_together):
                    numbers = range(first, min(first + n_together, fetch.n_batches))
                    left_in_fetch = fetch.n_batches - numbers.stop
                    yield functools.partial(make, fetched, fetch, numbers)
                del fetched

        if self._recycling is None:
            # What an epoch used is at hand for the next one.
            self._recycling = memory.Recycling()
        stats, loader = self._stats, self._loader()
        window, plans = self._window(task, plan, ks, key, n_threads, in_process=False, reading=reading)
        # Entered at once, since Ctrl-C before that would leave it open; closed before its last report.
        with window, reporting(window.scheduler.client, lambda: loader | stats.report() | stats.now()), window:
            fetches = Assembled(window, self._parts_of(reading))
            synchronous = window.scheduler.kind == "synchronous"
            for made, gather_s, error in run_ahead(
                jobs(),
                is_ready=lambda: left_in_fetch > 0 or fetches.is_ready(),
                n_ahead=-(-n_ahead // n_together),
                n_threads=0 if synchronous else min(config.get("gather-threads"), n_threads + 1),
            ):
                stats.gather_s += gather_s
                made.reverse()
                while made:
                    yield self._placed(made.pop())
                if error is not None:
                    raise error

    def _indexed(
        self, plan: EpochPlan, ks: range, n_skipped: int, key: str, n_threads: int
    ) -> Generator[Any, None, None]:
        """Batches of a collection that is read by indexing, or through hooks."""
        stats = self._stats
        window, plans = self._window(self._read, plan, ks, key, n_threads, in_process=True)
        with window:
            for k, data in window:
                fetch = plans.pop(k)
                for i in range(n_skipped if k == ks[0] else 0, fetch.n_batches):
                    with self._lock, stats.gathering(), _noting(fetch, i, plan):
                        if self.batch_callback is not None:
                            batch = self.batch_callback(data, fetch.batch(i))
                        else:
                            batch = take_rows(data, fetch.batch(i))
                        if self.batch_transform is not None:
                            batch = self.batch_transform(batch)
                    yield self._placed(batch)
                del data

    def _read(self, rows: NDArray[np.int64]) -> Any:
        # The fetches of an AnnData run side by side; hooks, and the user's own collections, one at a time.
        ours = isinstance(self.collection, collections.AnnDataView | lazy.MatrixRows)
        data = None
        if self.fetch_callback is None and ours:
            data = self.collection[rows]
        with self._lock:
            if self.fetch_callback is not None:
                data = self.fetch_callback(self.collection, rows)
            elif not ours:
                data = take_rows(self.collection, rows)
            return data if self.fetch_transform is None else self.fetch_transform(data)

    def _placed(self, batch: Any) -> Any:
        if self._pin_memory:
            batch = _each(batch, "pin_memory")
        if self._device is not None:
            batch = _each(batch, "to", self._device, non_blocking=self._pin_memory)
        return batch

    # --- Accounts ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what the latest epoch of this rank did.

        Also logged at its end, at the level INFO, by ``dasksc.dataset``. Where DataLoader workers read, both
        add up what the workers have done that came to their end (the last of them logs), and times are
        those of the slowest.

        Returns
        -------
        dict
            ``epoch``, ``rank``, ``world_size``; ``n_batches`` and ``n_rows`` yielded, ``n_batches_before``
            those that were yielded before the epoch was resumed, ``n_batches_left`` those to come;
            ``n_rank_padded`` and ``n_rank_dropped``, rows
            that this rank repeats and leaves out in a whole epoch (of what was left when it was resumed), of
            ``n_rank_batches`` batches;
            ``n_padded`` and ``n_dropped``, those of all ranks, and rows that no rank was dealt; ``wait_s`` the
            loop waited for batches, ``elapsed_s`` since the first was asked for, ``wait_share`` of it, and
            ``rows_per_s``. Over all ranks ``n_rows`` add up to the rows of the epoch + ``n_padded`` -
            ``n_dropped``.
            Fetch tasks (a large fetch is several): ``n_fetching``, ``n_ready`` and ``n_fetched`` (taken);
            ``in_flight_bytes`` of what is ready and, as the largest seen, of what is being fetched, against
            ``limit_bytes``. Seconds, summed over threads: ``fetch_s`` that the tasks taken took, ``read_s`` and
            ``decode_s`` of it (where files are mapped, pages are waited for where they are first used),
            ``transfer_s`` that results took from a cluster's workers, ``gather_s`` of making batches.
        """
        reports = self._counter.reports() if get_worker_info() is None else None
        return merged(reports) if reports else self._stats.report()

    def _report(self, worker: Any, epoch: int, figures: dict[str, Any]) -> None:
        """Leave what a DataLoader worker did where the loop's process finds it."""
        everything = self._counter.report(worker.seed - worker.id, worker.id, worker.num_workers, epoch, figures)
        if everything is not None:
            total = merged(everything)
            if total["n_batches"] + total["n_batches_before"] == total["n_rank_batches"]:
                logger.info("%s", line_of(total))

    def to_dask(self, epoch: int | None = None) -> da.Array:
        """Return this rank's epoch of X as one lazy Dask array.

        Parameters
        ----------
        epoch
            Which epoch; default: the next one to be read, which is not used up.

        Returns
        -------
        dask.array.Array
            Shape (rows the rank yields, n_vars); chunk k holds fetch k, its rows in the order in which
            they are yielded: `csr_matrix` or ndarray, in the data set's layout, dtype and genes.

        Raises
        ------
        InputError
            If the collection is read by indexing or through hooks.
        """
        if self._matrices is None or self._maker is None or self._maker.modalities:
            raise InputError("to_dask needs an AnnData or a Dask array, read without hooks")
        plan = self.plan(epoch)
        return epoch_array(
            self._matrices["X"],
            plan,
            name=f"dasksc-fetch-{self._name}-e{plan.epoch}-r{plan.rank}",
            layout=self._maker.layout,
            dtype=self._maker.dtype,
            columns=self._maker.columns.get("X"),
        )

    # --- Copies ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A DataLoader worker that is spawned sees no process group. Other copies, and ranks that are spawned by a
        # process that is none, find out for themselves.
        if get_spawning_popen() is not None and self._here().world_size > 1:
            self._settle()
        state = self.__dict__.copy()
        if self._given_world[2] is not None:
            # A process group stays where it was made; what it said of this rank goes along.
            world = self._here()
            state["_given_world"] = (world.rank, world.world_size, None)
        for name in ("_lock", "_agreement", "_stats"):
            del state[name]
        state["_recycling"] = None
        state["_scheduler"] = portable_scheduler(self._scheduler)
        state["_securities"] = securities_for_child()
        state["_hooks"] = cloudpickle.dumps({name: state.pop(name) for name in _CALLED})
        if self._matrices is not None:
            # Workers read matrices; the tables of an atlas would travel for nothing.
            state["collection"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for address, security in state.pop("_securities").items():
            remember_security(address, security)
        hooks = cloudpickle.loads(state.pop("_hooks"))
        self.__dict__.update(state)
        self.__dict__.update(hooks)
        self._lock = threading.Lock()
        self._agreement = None
        self._stats = EpochStats()

    def __repr__(self) -> str:
        return (
            f"scDataset({self._name}, {self._n_obs} rows, {self.strategy!r}, batch_size={self.batch_size}, "
            f"fetch_factor={self.fetch_factor})"
        )


def _checked_state(state: Mapping[str, Any]) -> tuple[int, int, tuple[Stretch, ...]]:
    """Return the epoch, the seed and the stretches of a state, or say which of its parts is missing or wrong."""
    names = [field.name for field in dataclasses.fields(Stretch)]
    part, expected = "", ""
    try:
        part, expected = "fingerprint", "a dict"
        state["fingerprint"].keys()
        part, expected = "epoch", "a whole number"
        epoch = config.whole_number(part, _whole(state[part]), 0, 2**32)
        part, expected = "seed", "a whole number"
        seed = config.whole_number(part, _whole(state[part]), 0, 2**64)
        part, expected = "consumed", f"a list of lists of whole numbers: {', '.join(names)}"
        stretches = tuple(
            Stretch(
                **{
                    name: config.whole_number(name, _whole(number), low=name != "n_batches")
                    for name, number in zip(names, stretch, strict=True)
                }
            )
            for stretch in state[part]
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found = f"{part}={state[part]!r:.100}" if part in state else f"only {', '.join(map(repr, state))}"
        raise InputError(
            f"this is no state that scDataset.state_dict() returned: it needs {part!r}, {expected}, and has {found}. "
            "Load another checkpoint, or set_epoch(n) to begin an epoch anew"
        ) from error
    return epoch, seed, stretches


def _whole(value: Any) -> int:
    """Return a number of a state, which may be a tensor by now, as an int; a ValueError if that is another number."""
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r} is no whole number")
    return number


def _n_batches(plan: EpochPlan, ks: range) -> int:
    """Batches of the fetches `ks`: all but the rank's last fetch are full."""
    if not ks:
        return 0
    last = plan.n_fetches - 1
    return len(ks) * plan.fetch_factor - (plan.n_fetches * plan.fetch_factor - plan.n_batches) * (last in ks)


@contextmanager
def _noting(fetch: FetchPlan, i: int, plan: EpochPlan) -> Iterator[None]:
    """Add to any error raised inside in which batch it happened."""
    try:
        yield
    except Exception as error:
        _note(error, fetch, i, plan)
        raise


def _note(error: Exception, fetch: FetchPlan, i: int, plan: EpochPlan) -> None:
    batch = fetch.number * plan.fetch_factor + i
    rows = fetch.rows[fetch.batch(i)].tolist()
    more = f" and {len(rows) - _ROWS_TOLD} more" if len(rows) > _ROWS_TOLD else ""
    error.add_note(
        f"in batch {batch} of {plan.n_batches} (epoch {plan.epoch}, rank {plan.rank} of {plan.world_size}), "
        f"rows {', '.join(map(str, rows[:_ROWS_TOLD]))}{more}"
    )


def _each(batch: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method of what is moved as one, or of the tensors in it; leave the rest as it is."""
    if hasattr(batch, method):
        return getattr(batch, method)(*args, **options)
    if isinstance(batch, dict):
        return {key: _each(value, method, *args, **options) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_each(value, method, *args, **options) for value in batch)
    return batch


def _names(option: str, value: Any) -> list[str]:
    if isinstance(value, str):
        raise WrongTypeError(f"{option}={value!r} is a string; give a list of names: {option}=[{value!r}]")
    return list(value)


def _given(value: Any) -> bool:
    return value is not None and (not isinstance(value, list) or len(value) > 0)


def _is_obsm(key: str) -> bool:
    """Whether a matrix is one of obsm: ``"obsm/X_pca"``, or ``"rna:obsm/X_pca"`` of several modalities."""
    group, slash, _ = key.partition("/")
    return bool(slash) and group.endswith("obsm")


def _matrices(arrays: Mapping[str, Any]) -> dict[str, Matrix]:
    for name, array in arrays.items():
        if not isinstance(array, da.Array):
            raise InputError(f"{name} is a {type(array).__name__}, not a numeric matrix; it cannot be yielded")
    return {name: lazy.matrix_of(array) for name, array in arrays.items()}


def _for_each(columns: Columns | None, keys: Iterable[str]) -> dict[str, Columns]:
    """Return the columns to keep of each matrix that has genes."""
    return {} if columns is None else {key: columns for key in keys if not _is_obsm(key)}


def _value_dtype(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    try:
        # Tensors have no byte order.
        result = np.dtype(name).newbyteorder("=")
        torch_dtype(result)
    except TypeError as error:
        raise InputError(f"dtype={dtype!r} is no type that tensors gathered from NumPy can have") from error
    return result


def _columns(genes: Any, var_names: Iterable[Any]) -> Columns | None:
    """Turn names, a mask or positions into the columns to keep."""
    if genes is None:
        return None
    n_vars = len(cast(Sequence[Any], var_names))
    if isinstance(genes, str):
        raise WrongTypeError(f"genes={genes!r} is a string; give a list of names: genes=[{genes!r}]")
    if isinstance(genes, set | frozenset | Mapping):
        # The order of a set differs between processes, and with it the columns.
        raise WrongTypeError(f"genes is a {type(genes).__name__}, which has no order; give a list: genes=sorted(...)")
    wanted = np.arange(n_vars)[genes] if isinstance(genes, slice) else array_of("genes", genes)
    if wanted.ndim != 1:
        raise InputError(f"genes has shape {wanted.shape}; give one list of names, a mask or positions")
    if wanted.dtype == np.bool_:
        if wanted.shape != (n_vars,):
            raise InputError(f"genes is a mask of shape {wanted.shape} for {n_vars} columns")
        wanted = np.flatnonzero(wanted)
    if not len(wanted):
        raise InputError("genes leave no column; give at least one")
    if wanted.dtype.kind not in "iu":
        if wanted.dtype.kind not in "UOT":
            raise InputError(f"genes holds {wanted.dtype}; names, a mask or whole positions are needed")
        position: dict[Any, int] = {}
        repeated = set()
        for i, name in enumerate(var_names):
            if position.setdefault(name, i) != i:
                repeated.add(name)
        unclear = [name for name in wanted.tolist() if name in repeated]
        if unclear:
            raise InputError(f"var_names repeats {unclear[:3]}, so they do not say which column; give positions")
        wanted = np.array(
            [position[collections.known("var_names", name, position)] for name in wanted.tolist()], dtype=np.int64
        )
    elif wanted.max() >= n_vars:  # also those that int64 does not hold
        raise InputError(f"genes holds position {wanted.max()}; positions lie in [0, {n_vars})")
    return Columns(wanted.astype(np.int64), n_vars)

"""`scDataset`, the data set that a training loop iterates over."""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import operator
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import dask.array as da
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from dasksc import checks
from dasksc.atlas.expressions import columns_of
from dasksc.atlas.filtering import explaining_control
from dasksc.batches.batch import Batch
from dasksc.displays import brief, changed_arguments
from dasksc.errors import InputError, RankMismatchError
from dasksc.executor.progress import EPOCH_TITLE, EpochStats, epoch_line, merged
from dasksc.executor.schedulers import FetchScheduler, SchedulerChoice
from dasksc.executor.tasks import epoch_array, fetch_name
from dasksc.loader.epoch import Epoch
from dasksc.loader.genes import Missing, Repeated
from dasksc.loader.position import (
    STATE_VERSION,
    EpochTracker,
    RankSession,
    of_worker,
    parse_state,
    settings_of,
    settings_of_batches,
)
from dasksc.loader.projection import MemoryProjection
from dasksc.loader.source import IndexedSource, MatrixSource, source_of
from dasksc.loader.spec import LoaderSpec
from dasksc.plan.binding import StrategyName, as_strategy, bind, is_random, reason_for_no_batches, restricted
from dasksc.plan.cell_sets import CellSets
from dasksc.plan.deal import ConsumedSegment
from dasksc.plan.epoch_plan import EpochPlan
from dasksc.plan.ranks import World
from dasksc.plan.samplers import Sampler, StratifiedSampler
from dasksc.plan.sets import SetSampler
from dasksc.plan.strategies import SamplingStrategy
from dasksc.storage import BFLOAT16, Layout, UseMmap

if TYPE_CHECKING:
    from distributed import Client
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("dasksc.loader")

# Attributes that ranks compare, besides the strategy and the content of batches.
_COMPARED = ("batch_size", "fetch_factor", "drop_last", "equal_ranks", "seed")


def _argument(name: str) -> Any:
    """Return a read-only attribute with the value of an argument."""
    return property(operator.attrgetter(f"spec.{name}"), doc=f"Argument `{name}`, which cannot be changed.")


class scDataset(IterableDataset[Any]):
    """Shuffled, weighted or class-balanced minibatches of an atlas on disk, as torch tensors.

    Parameters by purpose:

    - **What to read**: `data_collection`, `obs`, `categories`, `layers`, `obsm`, `genes`, `genes_missing`,
      `genes_key`, `genes_repeated`, `filter`, `return_index`
    - **How to draw**: `strategy`, `label_key`, `seed`
    - **Batches**: `batch_size`, `drop_last`, `layout`, `dtype`, `device`, `expand`, `pin_memory`,
      `transform`
    - **Hooks**: `fetch_callback`, `fetch_transform`, `batch_callback`, `batch_transform`
    - **Ranks and resuming**: `rank`, `world_size`, `group`, `equal_ranks`; methods `state_dict` and `load_state_dict`
    - **Execution and memory**: `fetch_factor`, `scheduler`, `prefetch`, `memory_limit`, `mmap`, `progress`

    Parameters
    ----------
    data_collection
        One of:

        - an argument or result of `dasksc.open`: the path of an h5ad file or Zarr store, or an AnnData (in memory,
          backed or of Dask arrays)
        - a 2-D Dask array
        - several modalities of the same cells: `Modalities`, a MuData, or the path of an ``.h5mu`` file
        - any object with ``len()`` that can be indexed by an ascending array of row numbers (NumPy, SciPy, pandas, a
          HuggingFace dataset, a `MultiIndexable`). Batches have the type that indexing returns.
    strategy
        Sampling strategy: `Streaming`, `BlockShuffling`, `BlockWeightedSampling`, `ClassBalancedSampling`,
        `CellSets` or your own `SamplingStrategy`. Three names select a strategy with its default arguments:
        ``"shuffle"`` (`BlockShuffling`), ``"stream"`` (`Streaming`) and ``"balance"`` (`ClassBalancedSampling` of
        `label_key`).
    batch_size
        Number of rows in a batch, per rank.
    fetch_factor
        Number of batches read at once: a fetch is ``batch_size * fetch_factor`` rows, read in ascending order and, with
        `BlockShuffling`, `BlockWeightedSampling`, `ClassBalancedSampling` or ``Streaming(shuffle=True)``, then shuffled
        in memory. None chooses the largest number, up to 4096, that `memory_limit` allows. For the same arguments, the
        choice depends only on the stored data, so it is equal on every rank and machine.
    drop_last
        If True, omit the last, smaller batch of each rank and, with `equal_ranks`, rows that cannot be divided equally
        among ranks.
    fetch_callback
        ``fetch_callback(collection, rows)`` reads the ascending `rows`, in place of
        ``collection[rows]``.
    fetch_transform
        Function applied to each fetch.
    batch_callback
        ``batch_callback(data, positions)`` takes a batch from a fetch, in place of ``data[positions]``.
    batch_transform
        Function applied to each batch. If the collection is an AnnData and no other hook converts its rows, the
        function receives AnnData objects, not tensors. Hooks run one at a time.
    rank, world_size
        Rank of this process, and number of ranks. The ranks divide the rows of every epoch among them. Default: those
        of the process group or the launcher (see `World.detect`).
    seed
        Seed of all random draws, an integer in [0, 2**64). None draws a random seed, the same on all ranks of a
        process group. `Streaming` without shuffling needs no seed.
    obs, layers, obsm
        Names of columns, layers and entries to yield in addition to X. For several modalities, ``"rna:counts"`` names
        an element of one modality.
    genes
        Genes to keep (columns of X and of every layer): names, a boolean mask or positions. A
        `dasksc.tokens.Vocabulary`, or the ``pathlib.Path`` of a vocabulary file, selects its genes in ascending order
        of ids, without special tokens such as ``<pad>``. For several modalities, a dict with one such value per
        modality.
    filter
        Expression over obs, such as ``"cell_type == 'T cell' and n_genes > 500"``; only rows that match are drawn.
        `dasksc.rows_where` documents the syntax. The filter also applies to the ``indices``
        and ``control_indices`` of the strategy. A strategy of your own chooses its rows itself and takes no filter.
    layout
        Layout of X and the layers: ``"dense"`` or ``"csr"`` tensors.
    dtype
        Data type of the values. None keeps the data type that ``adata.X`` reports, even if the file stores the values
        in a narrower type. A batch with a value that an integer type, float16 or bfloat16 cannot represent raises an
        `InputError`; these two floats round, in bfloat16 counts above 256. With ``"bool"``, nonzeros become True.
    equal_ranks
        If True, give every rank the same number of batches of the same sizes. A rank then repeats at most one row, one
        set of `CellSets`, or one batch of ``ClassBalancedSampling(per_batch=True)``; `EpochPlan.n_padded` counts the
        repeated rows. If False, no row is repeated to make the ranks equal, so ranks may yield different numbers of
        rows. In this case, unless `drop_last` is True, the ranks together yield every row of the epoch exactly once, as
        evaluation requires.
    scheduler
        Scheduler of fetches: ``"threads"``, ``"synchronous"``, a Dask Client or the address of its scheduler. None
        uses the active Client, or threads of this process if there is none. Data sets with hooks, and those that
        read their collection by indexing, always use this process.
    prefetch
        Number of fetches in flight in addition to the one being yielded. None keeps about two tasks per fetching thread
        in flight, within `memory_limit`; a large fetch is divided into several tasks.
    memory_limit
        Maximum anonymous memory (allocated memory, without memory-mapped files and page cache) during iteration on this
        rank, in bytes or as text such as ``"2GiB"``. DataLoader workers divide the limit equally, so each prefetches
        less. A warning is logged if their total still exceeds it.
    mmap
        Setting for memory-mapping local files, as for `dasksc.open`. For an AnnData that `dasksc.open` returns, pass
        `mmap` to `dasksc.open` instead.
    device
        Device of batches; default: the CPU. ``"cuda"`` is the current device of the process. Batches are copied ahead
        of the loop, from pinned memory, on a stream of their own; `n_device_bytes` limits them.
    expand
        Where matrices stored as CSR become dense, with ``layout="dense"`` and `device`: ``"host"``, or ``"device"`` to
        copy them as CSR. ``"auto"`` chooses the device if it is neither the CPU nor Apple's MPS, which has no CSR
        tensors, CSR takes at most half the memory, and no `transform` needs dense batches; those of dasksc need none.
        With ``"device"``, transforms receive CSR tensors. A tokenizer that is the last transform then only counts and
        draws on the host, and makes its tokens on the device.
    pin_memory
        If True, batches are in pinned memory, unless they are on a `device`.
    progress
        Show a progress bar (requires tqdm).
    group
        Processes that divide the rows of every epoch among themselves: a ``torch.distributed`` process group, or a
        ``DeviceMesh`` with a single dimension or a dimension named ``"dp"``, ``"data"``, ``"fsdp"`` or similar. Ranks
        that differ only in other dimensions (tensor or pipeline parallel) read the same batches. Default: all processes
        of the run.
    transform
        Function that maps each `Batch` to the item to yield, such as `dasksc.tokens.RankTokens` or
        `dasksc.transforms.Downsample`. A list of functions is applied in order. Unlike hooks, transforms receive
        tensors and run ahead of the loop, in several threads at once. A transform may have a method ``at_epoch(epoch)``
        that returns the function for an epoch, and a method ``at_batch(number)`` that returns the function for a
        batch. The number of a batch is unique in its epoch, across all ranks.
    genes_missing
        Treatment of names in `genes` that the atlas lacks: ``"error"``, a column of zeros (``"zero"``), or ``"drop"``
        to leave them out. If the atlas has none of the names, an error is raised in any case.
    genes_key
        Column of var with which names are compared, such as ``"ensembl_id"``. Default: var_names. Genes with a missing
        value in this column match no name.
    genes_repeated
        Treatment of a name in `genes` that several columns of the atlas share: ``"error"``, or ``"sum"`` to add up
        these columns. Integers are summed in 64 bits, floats in the data type of the matrix.
    label_key
        Column of obs whose classes ``strategy="balance"`` draws evenly.
    return_index
        If True, yield a `Batch`, which has the row numbers ``batch.index``, even if only X is requested. If False, a
        data set of X alone yields plain tensors.
    categories
        Labels of columns of `obs`, in the order of their codes, such as ``dataset.categories`` of a training data set.
        Other labels get the code -1, and are listed in a log record of level WARNING. By default, the labels are those
        of the column.

    Attributes
    ----------
    categories
        Labels of each encoded column of `obs`, in the order of their codes.
    gene_match
        `GeneMatch` of the names in `genes`; its ``names`` are the columns of a batch. For several modalities, a dict of
        `GeneMatch`. None if `genes` contains no names.
    spec, source, ranks, memory
        Checked arguments, data to read, rank and seed, and memory of an epoch, for other parts of dasksc.

    Raises
    ------
    InputError
        If arguments do not fit the collection, contradict each other, or need more than `memory_limit`. The error is
        raised before matrices are read.

    Notes
    -----
    Each iteration reads the next epoch, including in DataLoader workers, persistent or not. An iteration that stops
    early also counts as an epoch: the next iteration reads the following one. `set_epoch` selects an epoch.
    `projected_bytes` is an estimate of the maximum anonymous memory of an iteration.

    Examples
    --------
    >>> dataset = dasksc.scDataset("atlas.h5ad", batch_size=64, obs=["cell_type", "donor"], seed=0)
    >>> len(dataset)  # batches in an epoch of shuffled blocks
    32
    >>> next(iter(dataset))
    Batch
      X                 (64, 300) float32
      obs['cell_type']  (64,) int64, 6 classes
      obs['donor']      (64,) int64, 12 classes
      index             (64,) int64
    >>> dataset.categories["cell_type"][:2]
    ['T cell', 'B cell']
    >>> balanced = dasksc.scDataset("atlas.h5ad", "balance", 64, label_key="cell_type", seed=0)
    """

    def __init__(
        self,
        data_collection: Any,
        strategy: SamplingStrategy | StrategyName = "shuffle",
        batch_size: int = 64,
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
        scheduler: FetchScheduler | Client | str | None = None,
        prefetch: int | None = None,
        memory_limit: int | str | None = None,
        mmap: UseMmap = "auto",
        device: torch.device | str | int | None = None,
        expand: Literal["auto", "host", "device"] = "auto",
        pin_memory: bool = False,
        progress: bool = False,
        group: ProcessGroup | DeviceMesh | None = None,
        transform: Callable[[Batch], Any] | Sequence[Callable[[Any], Any]] | None = None,
        genes_missing: Missing = "error",
        genes_key: str | None = None,
        genes_repeated: Repeated = "error",
        label_key: str | None = None,
        return_index: bool = False,
        categories: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        given = locals()
        del given["data_collection"], given["label_key"]
        super().__init__()
        given["strategy"] = as_strategy(strategy, label_key=label_key)
        self.spec = spec = LoaderSpec(**{one.name: given[one.name] for one in fields(LoaderSpec) if one.init})
        self._scheduler = SchedulerChoice(scheduler)
        with explaining_control(spec.control):
            self.source = source = source_of(data_collection, spec)
            self.strategy, self._sampler = _bound(spec, source)
        self.collection = source.collection
        self.categories = source.categories
        self.gene_match: Any = source.gene_match
        kind = f"{source.n_obs} rows by {type(spec.strategy).__name__} in batches of {batch_size}"
        self.ranks = RankSession(rank, world_size, group, seed=seed, is_random=is_random(self._sampler), kind=kind)
        self.memory = MemoryProjection(
            *(spec, source, self.ranks, self._scheduler), strategy=self.strategy, sampler=self._sampler
        )
        self.fetch_factor = self.memory.fetch_factor
        others = changed_arguments(scDataset.__init__, given | {"fetch_factor": self.fetch_factor})
        self._arguments = {"strategy": brief(spec.strategy), "batch_size": brief(batch_size)} | others
        self._epochs = EpochTracker()
        self._iteration = 0
        self._stats = EpochStats()
        self._token = secrets.token_hex(4)  # distinguishes data sets with the same name
        self._plan_of(self.ranks.detect(), epoch=0)  # raises an error for inconsistent sizes
        self.ranks.fix_world_if_distributed()
        self._mismatch: RankMismatchError | None = None
        try:
            self._compare("made")
        except RankMismatchError as error:
            self._mismatch = error  # raised by DataLoader workers, which cannot compare ranks themselves

    _title = EPOCH_TITLE
    batch_size: int = _argument("batch_size")
    drop_last: bool = _argument("drop_last")
    equal_ranks: bool = _argument("equal_ranks")
    fetch_callback = _argument("fetch_callback")
    fetch_transform = _argument("fetch_transform")
    batch_callback = _argument("batch_callback")
    batch_transform = _argument("batch_transform")
    transform = _argument("transform")

    @property
    def fetch_size(self) -> int:
        """Number of rows in a fetch, including controls."""
        return self.batch_size * (1 + self._sampler.n_controls) * self.fetch_factor

    @property
    def groups(self) -> Any:
        """Table of the groups of `CellSets`, or None; the codes in ``batch.sets`` are row numbers of this table."""
        return self._sampler.table if isinstance(self._sampler, SetSampler) else None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.ranks.current_world().rank

    @property
    def world_size(self) -> int:
        """Number of processes that share every epoch."""
        return self.ranks.current_world().world_size

    @property
    def seed(self) -> int:
        """Seed of all random draws."""
        return self.ranks.seed

    @property
    def projected_bytes(self) -> int | None:
        """Maximum anonymous memory during iteration, in bytes; None for collections read by indexing.

        It includes the fetch being yielded, those in flight, the memory to read and decode them, and batches gathered
        ahead. Memory-mapped files need no anonymous memory, so the value is larger if files are not mapped. The
        projection includes a margin of a tenth for fetches whose rows have more nonzeros than the average row; with a
        strategy that favors rows with many nonzeros, memory may exceed the projection. On a cluster the value increases
        with the number of workers, up to ``memory_limit``.
        """
        return self.memory.reading_mode().anonymous if isinstance(self.source, MatrixSource) else None

    @property
    def n_device_bytes(self) -> int | None:
        """Maximum memory of batches on `device`, in bytes; 0 on the CPU, and None if `projected_bytes` is None.

        It includes the batches that are copied ahead of the loop, the one being yielded, and two that the loop still
        uses. Their pinned memory counts towards `projected_bytes`.
        """
        return self.memory.n_device_bytes if isinstance(self.source, MatrixSource) else None

    @property
    def projected_pages(self) -> int | None:
        """Page cache that iteration needs at one time, in bytes; None if `projected_bytes` is None.

        For memory-mapped files, the value covers the pages of the fetch being yielded and of all fetches in flight; for
        files that are read instead of mapped, it covers only the pages of the fetch tasks in progress. Pages do not
        count towards `memory_limit` or `projected_bytes`, but the cgroup of a Slurm job or a container counts them.
        """
        return self.memory.reading_mode().pages if isinstance(self.source, MatrixSource) else None

    def __getitem__(self, index: Any) -> NoReturn:
        # The message of the base class does not say what to do instead.
        raise NotImplementedError(
            "an scDataset cannot be indexed; iterate over it for batches, or read rows with dasksc.open(path)[rows]"
        )

    def __len__(self) -> int:
        """Return the number of batches that this rank yields in a whole epoch."""
        return self._plan_of(self.ranks.fix_world(), epoch=0).n_batches

    @property
    def n_batches_left(self) -> int:
        """Number of batches of this rank in the next iteration; for a resumed epoch, the remaining ones."""
        world, position = self.ranks.current_world(), self._epochs.next()
        consumed, n_done = position.parted(self._sizes(world))
        return self._plan_of(world, position.epoch, consumed).n_batches - n_done

    def _sizes(self, world: World) -> tuple[int, int, int]:
        """Return the sizes on which the segments of an epoch depend."""
        return world.world_size, self.batch_size, self.fetch_factor

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read epoch `epoch`, and later iterations the following epochs."""
        self._epochs.set_epoch(checks.whole_number("epoch", epoch, 0, 2**32))

    def _plan_of(self, world: World, epoch: int, consumed: tuple[ConsumedSegment, ...] = ()) -> EpochPlan:
        return EpochPlan(
            sampler=self._sampler,
            batch_size=self.spec.batch_size,
            fetch_factor=self.fetch_factor,
            drop_last=self.spec.drop_last,
            equal_ranks=self.spec.equal_ranks,
            seed=self.ranks.own_seed,
            epoch=epoch,
            rank=world.rank,
            world_size=world.world_size,
            consumed=consumed,
        )

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Return the plan of this rank for an epoch; default: the next one to be read."""
        _ = self.seed  # makes the ranks agree on a seed
        return self._plan_of(self.ranks.current_world(), self._epochs.counter.peek() if epoch is None else epoch)

    @property
    def fingerprint(self) -> str:
        """Digest of the properties that must be equal on all ranks.

        These are shapes and data types, the strategy and its arrays, batch size, fetch factor, `drop_last`,
        `equal_ranks`, seed, and the layout, data type and columns of batches.
        """
        sizes = (self.batch_size, self.fetch_factor, self.seed, self.source.yielded)
        return hashlib.blake2b(repr((self._identity, sizes)).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Properties that must be equal in a state and in the data set that resumes from it, whatever its files."""
        return {
            "n_obs": self.source.n_obs,
            "matrices": self.source.identity,
            "strategy": f"{type(self.strategy).__name__} {self._sampler.digest()}",
            "drop_last": self.drop_last,
            "equal_ranks": self.equal_ranks,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position from which `load_state_dict` resumes.

        The state contains plain numbers and strings. It is equal on all ranks that have yielded the same number of
        batches. In a DataLoader worker, it is the state of that worker. In the main process of a DataLoader with
        workers, the state covers only whole epochs, and calling this method within an epoch logs a warning.

        Returns
        -------
        dict
            ``version``, ``seed``, ``epoch``, ``fingerprint`` (properties that must match), ``settings`` (the strategy
            as text, for error messages) and ``consumed``, the segments of the epoch that have been read: for each
            segment, its world size, batch size and fetch factor, and the number of batches that every rank has read
            with them.
        """
        (position, of_rank), worker = self._epochs.to_save(), get_worker_info()
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": position.epoch,
            "fingerprint": dict(self._identity),
            "settings": settings_of(self.spec),
            "consumed": [astuple(segment) for segment in position.consumed],
        }
        if worker is not None:
            state |= {"worker": (worker.id, worker.num_workers), "of_rank": of_rank}
        return state

    def load_state_dict(self, state: Any) -> None:
        """Make the next iteration resume from the position that `state` records.

        With another world size, batch size or fetch size, the remaining rows of the epoch are distributed again.
        Resuming repeats no row of the epoch, except to make the ranks equal (`equal_ranks`). Dropped rows stay dropped,
        and with `drop_last`, the new ranks may drop more.

        Raises
        ------
        InputError
            If the state is invalid, belongs to other data, or was saved with a different strategy, `drop_last` or
            `equal_ranks`. Also if its seed differs from a seed that was passed as `seed` or loaded earlier. The message
            lists the differences. Also if the state was saved in the main process and is loaded in a DataLoader worker,
            or the reverse; or if it was saved in another worker, or with another `num_workers`. In a DataLoader worker,
            also if the state was saved in the middle of an epoch and with another world size, batch size or fetch size.
        """
        given_seed = self.ranks.own_seed if self.ranks.seed_is_given else None
        position, seed = parse_state(state, self._identity, settings_of(self.spec), seed=given_seed)
        worker = get_worker_info()
        if tuple(state.get("worker", ())) != (() if worker is None else (worker.id, worker.num_workers)):
            raise InputError(
                "a DataLoader worker resumes only from a state that the same worker saved, and the main process only "
                "from its own. Use the same num_workers as before"
            )
        others, _ = position.parted(self._sizes(self.ranks.current_world()))
        if worker is not None and others and others == position.consumed and not state.get("of_rank"):
            last = position.consumed[-1]
            raise InputError(
                "in DataLoader workers, an epoch can be resumed only with the same world size, batch_size and "
                f"fetch_factor as before ({last.world_size}, {last.batch_size} and {last.fetch_factor}). Restore them, "
                "or resume from a state saved at the end of an epoch"
            )
        self.ranks.seed = seed
        self._epochs.load(position, of_rank=worker is None or bool(state.get("of_rank")))

    def __iter__(self) -> Iterator[Any]:
        reader = sys._getframe(1).f_locals.get("self")  # the object that requests the batches
        is_stacking = (
            getattr(reader, "auto_collation", False) and getattr(reader, "collate_fn", None) is default_collate
        )
        if is_stacking and not self.spec.has_hooks:  # what hooks return need not be batches
            raise InputError(
                "the DataLoader has a batch_size of its own, and would stack k batches of the data set into arrays of "
                "shape (k, batch_size, n_vars). The data set already yields batches; use "
                "DataLoader(dataset, batch_size=None)"
            )
        self._refuse_sharding(reader)
        self._epochs.leave()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # This is a generator function, so `world` is determined, and the epoch begins, only when the first batch is
        # requested.
        world = self.ranks.require_same_world()
        worker = get_worker_info()
        first, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is not None and self._mismatch is not None:
            raise self._mismatch
        position = self._epochs.begin()
        number, (consumed, n_done) = position.epoch, position.parted(self._sizes(world))
        plan = self._plan_of(world, number, consumed)
        if worker is not None and not self._epochs.is_of_worker:
            # Of the batches that the rank had read, only some are of this worker.
            k, n_in_fetch = divmod(n_done, self.fetch_factor)
            n_done = len(range(first, k, n_workers)) * self.fetch_factor + n_in_fetch * (k % n_workers == first)
        if not plan.n_batches and not consumed and plan.n_dropped == plan.n_rows and plan.rank == 0 and first == 0:
            logger.warning("epoch %d has no batches: %s", number, reason_for_no_batches(plan))
        agreement = self.ranks.agreement if worker is None else None
        iteration, after_first = self._iteration, None
        self._iteration += 1
        if agreement is not None:
            where = "-".join(map(str, [*consumed, n_done])).replace(" ", "")
            self._compare(str(iteration), number, where)
            after_first = functools.partial(agreement.require_not_abandoned, iteration)
        epoch = Epoch(
            *(self.spec, self.source, plan, range(first, plan.n_fetches, n_workers), n_done),
            memory=self.memory,
            key=self._token,
        )
        self._stats = epoch.stats
        self._epochs.place = epoch.position  # before reading, so that an epoch that fails can also be resumed
        batches = epoch.batches(shown=self.spec.progress and first == 0, after_first=after_first)
        try:
            for batch in batches:
                self._epochs.place = epoch.position
                yield batch
            self._epochs.finish(number, epoch.position)
        finally:
            batches.close()
            if worker is not None:
                self._report(worker, number, epoch.stats.report())
            elif epoch.is_whole:
                logger.info("%s", epoch_line(epoch.stats.report(), self._title))
            if agreement is not None:
                agreement.end(iteration, epoch.stats.n_batches, is_whole=epoch.is_whole)

    def _compare(self, what: str, epoch: int = 0, where: str = "") -> None:
        """Compare what this rank reads in an iteration, or will read, with the other ranks."""
        if self.ranks.agreement is not None and self.ranks.agreement.has_store:
            own = {name: str(getattr(self, name)) for name in _COMPARED} | {"position in the epoch": where}
            settings = settings_of_batches(self.source) | settings_of(self.spec) | own
            self.ranks.agreement.begin(what, epoch, f"{self.fingerprint}-{where}", settings)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the latest epoch of this rank.

        The logger ``dasksc.loader`` also logs them at the end of an epoch, at level INFO. With DataLoader workers, the
        last worker to finish writes the log line, and this method combines the statistics of the workers that have
        finished so far: times of the loop are the maximum over the workers, and other figures are added.

        Returns
        -------
        dict
            Statistics by name.

            Progress:

            - ``epoch``, ``rank``, ``world_size``
            - ``n_batches``, ``n_rows``: batches and rows yielded
            - ``n_control_rows``: control rows yielded in addition (`CellSets`)
            - ``n_batches_before``: batches yielded before the epoch was resumed with the same sizes
            - ``n_batches_left``: remaining batches

            Sizes of the epoch, or of its remainder if it was resumed with other sizes:

            - ``n_rank_batches``, ``n_rank_fetches``: batches and fetches of this rank
            - ``n_rank_padded``, ``n_rank_dropped``: repeated and omitted rows of this rank
            - ``n_padded``, ``n_dropped``: repeated and omitted rows over all ranks; omitted rows include those assigned
              to no rank. The ranks together yield the rows of the epoch + ``n_padded`` - ``n_dropped``.

            Speed of the loop, in seconds:

            - ``compile_s``: time that the loop waited while kernels were compiled; no other figure contains it
            - ``wait_s``: time that the loop waited for batches
            - ``elapsed_s``: time from the request of the first batch until the latest batch
            - ``wait_share``: ``wait_s / elapsed_s``; ``rows_per_s``: rows yielded per second

            Fetch tasks (a large fetch consists of several):

            - ``n_fetching``, ``n_ready``, ``n_fetched``: tasks in progress, tasks finished but not yet received, and
              tasks received
            - ``in_flight_bytes``: size of the results not yet received, plus an estimate for the tasks in progress (for
              each, the size of the largest result so far); ``limit_bytes``: its limit

            Work times in seconds, summed over threads:

            - ``fetch_s``: duration of the received tasks
            - ``read_s``, ``decode_s``: parts of ``fetch_s``. For memory-mapped files, the wait for a page counts
              towards the step that first accesses it.
            - ``transfer_s``: transfer of results from the workers of a cluster
            - ``gather_s``: creation of batches
        """
        reports = self._epochs.counter.reports() if get_worker_info() is None else None
        return merged(reports) if reports else self._stats.report()

    def _report(self, worker: Any, epoch: int, figures: dict[str, Any]) -> None:
        """Pass the statistics of a DataLoader worker to the process that runs the loop."""
        everything = self._epochs.counter.report(*of_worker(worker), epoch, figures)
        if everything is not None:
            total = merged(everything)
            if total["n_batches"] + total["n_batches_before"] == total["n_rank_batches"]:
                logger.info("%s", epoch_line(total, self._title))

    def to_dask(self, epoch: int | None = None) -> da.Array:
        """Return X of this rank's epoch as one lazy Dask array.

        Parameters
        ----------
        epoch
            Number of the epoch; default: the next one to be read. The call does not advance the epoch of the data set.

        Returns
        -------
        dask.array.Array
            Shape (number of rows that the rank yields, n_vars). Chunk k is a `csr_matrix` or ndarray with the rows of
            fetch k in the order in which they are yielded. The array has the layout, dtype and genes of the data set.

        Raises
        ------
        InputError
            If the collection has several modalities, or is read by indexing or through hooks.
        """
        if not isinstance(self.source, MatrixSource) or self.source.maker.modalities:
            raise InputError(
                "to_dask needs an AnnData or a Dask array, and a data set without fetch and batch hooks; use plan() "
                "for other collections"
            )
        plan, maker = self.plan(epoch), self.source.maker
        if maker.dtype == BFLOAT16 or (maker.layout == "csr" and maker.dtype == "float16"):
            raise InputError("Dask arrays cannot have dtype='bfloat16', nor CSR ones 'float16'; use 'float32'")
        return epoch_array(
            self.source.matrices["X"],
            plan,
            name=fetch_name(self.source.name, plan),
            layout=maker.layout,
            dtype=maker.dtype,
            columns=maker.columns.get("X"),
        )

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_sharding()
        state = self.__dict__ | {"_epochs": copy.copy(self._epochs)}
        del state["_stats"]
        if isinstance(self.source, MatrixSource):
            state["collection"] = None  # pickled sources have no collection either
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stats = EpochStats()

    def _refuse_sharding(self, reader: Any = None) -> None:
        """Raise an error if Accelerate, which transformers uses, divides the batches among the ranks."""
        # Most cells would be lost, without an error.
        if self.world_size == 1:
            return
        state = sys.modules.get("accelerate.state")
        loader: Any = None if state is None else state.GradientState().active_dataloader
        is_dispatched = type(loader).__name__ == "DataLoaderDispatcher" and loader.dataset is self
        if is_dispatched or type(reader).__name__ == "IterableDatasetShard":
            raise InputError(
                "Accelerate divides the batches among the ranks, but the data set already yields each of them its own "
                "share, so most cells would never be used. Iterate over the data set, or a DataLoader of it, as it is: "
                "prepare only the model and the optimizer. Or give the data set rank=0, world_size=1 and a seed, to "
                "leave the division among ranks to Accelerate"
            )

    def __repr__(self) -> str:
        strategy, *others = self._arguments.items()
        arguments = [strategy[1], *(f"{name}={text}" for name, text in others)]
        return f"scDataset({self.source.name}, {self.source.n_obs} rows, {', '.join(arguments)})"


def _bound(spec: LoaderSpec, source: MatrixSource | IndexedSource) -> tuple[SamplingStrategy, Sampler]:
    """Return the strategy with row numbers and masks in place of expressions over obs, and bound to the rows."""
    strategy = spec.strategy
    if spec.filter is not None:
        strategy = restricted(strategy, source.rows_where(spec.filter), repr(spec.filter))
    if spec.control is not None and isinstance(strategy, CellSets):
        strategy = strategy.with_control(source.rows_where(spec.control), list(columns_of(spec.control)))
    sampler = bind(strategy, source.collection, source.n_obs, source.labels_of)
    if isinstance(sampler, StratifiedSampler):
        sampler = sampler.of_batches(spec.batch_size)
    if sampler.n_controls and isinstance(source, IndexedSource):
        raise InputError(
            "CellSets(control=) needs an atlas and cannot be combined with fetch or batch hooks, because batches "
            "would then lack batch.control. Instead of hooks, give transform=, a function that receives the batch"
        )
    return strategy, sampler

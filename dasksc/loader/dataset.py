"""The data set that a training loop iterates."""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cloudpickle
import dask.array as da
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dasksc import config
from dasksc.atlas import filtering
from dasksc.batches.batch import Batch, refuse_stacking
from dasksc.errors import InputError, WrongTypeError
from dasksc.executor.epoch_array import epoch_array
from dasksc.executor.progress import EpochStats, line_of, merged
from dasksc.executor.schedulers import (
    Scheduler,
    portable_scheduler,
    remember_security,
    resolve_scheduler,
    securities_for_child,
)
from dasksc.loader.epoch_run import EpochRun, Placement
from dasksc.loader.genes import GeneRequest, Missing, Repeated
from dasksc.loader.position import STATE_VERSION, EpochPosition, parse_state
from dasksc.loader.projection import MemoryProjection
from dasksc.loader.rank_session import RankSession
from dasksc.loader.request import BatchRequest
from dasksc.loader.source import Hooks, IndexedSource, MatrixSource, source_of
from dasksc.planning.consumed_segments import Stretch
from dasksc.planning.epochs import EpochCounter
from dasksc.planning.plan import EpochPlan
from dasksc.planning.ranks import World
from dasksc.sampling.binding import bind, is_random, restricted
from dasksc.sampling.cell_sets import CellSets
from dasksc.sampling.samplers import Sampler
from dasksc.sampling.set_sampler import SetSampler
from dasksc.sampling.strategies import SamplingStrategy
from dasksc.sampling.stratified import StratifiedSampler
from dasksc.storage import Layout, UseMmap
from dasksc.transforms.composed import as_transform

if TYPE_CHECKING:
    from distributed import Client
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["LoaderParts", "parts_of", "scDataset"]

logger = logging.getLogger("dasksc.dataset")

_HOOKS = ("fetch_callback", "fetch_transform", "batch_callback", "batch_transform")
_CALLED = (*_HOOKS, "transform")


class LoaderParts(NamedTuple):
    """The parts of a data set, for those that explain or measure it."""

    source: MatrixSource | IndexedSource
    projection: MemoryProjection
    counter: EpochCounter
    plan_of: Callable[[World, int], EpochPlan]


def parts_of(dataset: scDataset) -> LoaderParts:
    """Return the parts of a data set."""
    return LoaderParts(dataset._source, dataset._projection, dataset._counter, dataset._plan_of)


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
        What is drawn: `Streaming`, `BlockShuffling`, `BlockWeightedSampling`, `ClassBalancedSampling`,
        `CellSets` or your own `SamplingStrategy`.
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
        Keep only these columns of X and the layers: names, a boolean mask or positions; or the genes of a
        `dasksc.tokens.Vocabulary` or of the file of one (a ``pathlib.Path``), columns by ascending id, tokens such as
        ``<pad>`` left out. Of several modalities, a dict of these by modality.
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
        rank, or one batch where batches hold shares of classes (`EpochPlan.n_padded`). False yields every row exactly
        once, for evaluation.
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
        Called with each `Batch`, whose result is yielded; such as `dasksc.tokens.RankTokens` or
        `dasksc.transforms.Downsample`. A list of transforms is called in order, each with the result of the one
        before. Unlike hooks transforms are given tensors, and by several threads at once, ahead of the loop. If one has
        a method ``at_epoch``, the result of ``transform.at_epoch(epoch)`` is called in an epoch; if it has
        ``at_batch``, that of ``transform.at_batch(number)`` for a batch, whose number no other batch of the epoch has
        on any rank.
    genes_missing
        What becomes of names in `genes` that the atlas lacks: ``"error"``, a column of zeros (``"zero"``), or
        ``"drop"``, which leaves them out. If the atlas has none of them, that is always an error.
    genes_key
        The column of var to compare names with, such as ``"ensembl_id"``. Default: var_names. Columns of the atlas
        with a missing value there match nothing.
    genes_repeated
        What becomes of a name in `genes` that several columns of the atlas have: ``"error"``, or ``"sum"``, which adds
        them up in the type of the matrix, integers in 64 bits.

    Attributes
    ----------
    categories
        For each name in `obs` that was encoded, its labels in the order of their codes.
    gene_match
        How the names in `genes` matched: a `GeneMatch`, whose ``names`` are the columns of a batch; of several
        modalities, a dict of these. None where `genes` holds no names.

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
        transform: Callable[[Batch], Any] | Sequence[Callable[[Any], Any]] | None = None,
        genes_missing: Missing = "error",
        genes_key: str | None = None,
        genes_repeated: Repeated = "error",
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
        prefetch = None if prefetch is None else config.whole_number("prefetch", prefetch)
        limit = config.memory_limit(memory_limit)
        self._placement = Placement(device, pin_memory)
        self._progress = progress
        self._scheduler = _Where(scheduler)
        chosen = GeneRequest(genes, genes_missing, genes_key, genes_repeated)
        in_sets = isinstance(strategy, CellSets)
        request = BatchRequest(obs, layers, obsm, chosen, layout, dtype, as_transform(transform), pin_memory, in_sets)
        if not isinstance(strategy, SamplingStrategy):
            raise WrongTypeError(
                f"strategy must be a SamplingStrategy such as dasksc.BlockShuffling(); got {strategy!r}"
            )
        for name in _HOOKS:
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise WrongTypeError(f"{name} must be callable; got {getattr(self, name)!r}")
        filtered_by = [] if filter is None else filtering.columns_of(filter)
        control = getattr(strategy, "control", None)
        controlled_by = filtering.columns_of(control) if isinstance(control, str) else []
        self._source = source_of(
            data_collection,
            request,
            self._hooks,
            strategy=strategy,
            filtered_by=[*filtered_by, *controlled_by],
            mmap=mmap,
        )
        self.collection = self._source.collection
        self.categories = self._source.categories
        self.gene_match = getattr(self._source, "gene_match", None)
        if filter is not None:
            self.strategy = strategy = restricted(strategy, self._source.rows_where(filter), repr(filter))
        if isinstance(control, str):
            self.strategy = strategy = cast(CellSets, strategy).with_control(
                self._source.rows_where(control), controlled_by
            )
        self._sampler: Sampler = bind(strategy, self.collection, self._source.n_obs, self._source.labels_of)
        if isinstance(self._sampler, StratifiedSampler):
            self._sampler = self._sampler.of_batches(self.batch_size)
        if self._sampler.n_controls and isinstance(self._source, IndexedSource):
            raise InputError(
                "CellSets(control=) needs matrices of an atlas: hooks and collections that are indexed "
                "yield rows, which have no place for controls"
            )
        self._session = RankSession(rank, world_size, group, seed=seed, is_random=is_random(self._sampler))
        self._projection = MemoryProjection(
            self._source,
            self._session,
            self._scheduler,
            batch_size=self.batch_size * (1 + self._sampler.n_controls),
            fetch_factor=fetch_factor,
            run_rows=float(getattr(self._sampler, "block_rows", getattr(strategy, "block_size", 1))),
            prefetch=prefetch,
            limit=limit,
        )
        self.fetch_factor = self._projection.fetch_factor
        self._counter = EpochCounter()
        self._iteration = 0
        # Where this process is, and where it is to resume.
        self._position: EpochPosition | EpochRun | None = None
        self._resume: EpochPosition | None = None
        # The epoch whose end a DataLoader worker has reached, while others may be in the middle of it.
        self._ended: int | None = None
        self._stats = EpochStats()
        self._token = secrets.token_hex(4)  # tells data sets of one name apart
        self._plan_of(self._session.detect(), epoch=0)  # refuse sizes that do not fit
        self._session.settle_early()

    @property
    def _hooks(self) -> Hooks:
        return Hooks(**{name: getattr(self, name) for name in _HOOKS})

    # --- Sizes ----------------------------------------------------------------------------------------

    @property
    def fetch_size(self) -> int:
        """Rows of a fetch, controls included."""
        return self.batch_size * (1 + self._sampler.n_controls) * self.fetch_factor

    @property
    def groups(self) -> Any:
        """Labels of the groups of `CellSets`: a table whose row g describes code g of ``batch.sets``; otherwise None."""
        return self._sampler.table if isinstance(self._sampler, SetSampler) else None

    @property
    def rank(self) -> int:
        """Which share of every epoch this process reads."""
        return self._session.here().rank

    @property
    def world_size(self) -> int:
        """How many processes share every epoch."""
        return self._session.here().world_size

    @property
    def seed(self) -> int:
        """What everything random is keyed by."""
        return self._session.seed

    @property
    def projected_bytes(self) -> int | None:
        """Anonymous memory that iterating needs at most, in bytes; None for collections read by indexing.

        The fetch being yielded, those in flight, what reading and decoding them takes, and the batches
        gathered ahead. Mapped files need none, so it is more on a file system that files are not mapped from.
        Rows are taken to be up to a tenth longer than the average one. On a cluster it grows with the workers that
        join, as far as ``memory_limit`` allows.
        """
        return self._projection.way().demand.anonymous if isinstance(self._source, MatrixSource) else None

    @property
    def projected_pages(self) -> int | None:
        """Pages of files that iterating needs in the page cache at the same time, in bytes; None as above.

        Of mapped files, those of all fetches in flight, of others those being read. They are no memory of this process,
        yet a control group, such as that of a Slurm job or a container, counts them.
        """
        return self._projection.way().demand.pages if isinstance(self._source, MatrixSource) else None

    def __len__(self) -> int:
        """Batches this rank yields in a whole epoch."""
        return self._plan_of(self._session.settle(), epoch=0).n_batches

    @property
    def n_batches_left(self) -> int:
        """Batches this rank yields in the next iteration: of a whole epoch, or what `load_state_dict` left of one."""
        epoch = self._counter.peek()
        world = self._session.here()
        if self._resume is None or self._resume.epoch != epoch:
            return self._plan_of(world, epoch=0).n_batches
        consumed, n_done = self._resume.parted(self._sizes(world))
        return self._plan_of(world, epoch, consumed).n_batches - n_done

    # --- Epochs ---------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read epoch `epoch`; those after it count on from there."""
        self._counter.set(config.whole_number("epoch", epoch, 0, 2**32))
        self._position = self._resume

    def _plan_of(self, world: World, epoch: int, consumed: tuple[Stretch, ...] = ()) -> EpochPlan:
        return EpochPlan(
            sampler=self._sampler,
            batch_size=self.batch_size,
            fetch_factor=self.fetch_factor,
            drop_last=self.drop_last,
            equal_ranks=self.equal_ranks,
            seed=self._session.own_seed,
            epoch=epoch,
            rank=world.rank,
            world_size=world.world_size,
            consumed=consumed,
        )

    def plan(self, epoch: int | None = None) -> EpochPlan:
        """Return this rank's plan of an epoch; default: of the next one to be read."""
        _ = self.seed  # agreed on
        return self._plan_of(self._session.here(), self._counter.peek() if epoch is None else epoch)

    @property
    def fingerprint(self) -> str:
        """What ranks compare: a digest of shapes, types, the strategy with its arrays, the sizes and the seed."""
        sizes = (self.batch_size, self.fetch_factor, self.seed, self._source.yielded)
        return hashlib.blake2b(repr((self._identity, sizes)).encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to be resumed from; never paths or times."""
        identity = {
            "n_obs": self._source.n_obs,
            "matrices": self._source.identity,
            "strategy": f"{type(self.strategy).__name__} {self._sampler.digest()}",
            "drop_last": self.drop_last,
            "equal_ranks": self.equal_ranks,
        }
        if (self.drop_last and self._sampler.shuffle_blocks) or getattr(self.strategy, "drop_last", False):
            identity["left_out"] = "evenly"  # versions that left out other rows did not say
        return identity

    def _sizes(self, world: World) -> Stretch:
        return Stretch(
            world_size=world.world_size, batch_size=self.batch_size, fetch_factor=self.fetch_factor, n_batches=0
        )

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
        position = self._here() or EpochPosition(self._counter.peek())
        state = {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": position.epoch,
            "fingerprint": dict(self._identity),
            "consumed": position.consumed_numbers,
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
        given_seed = self._session.own_seed if self._session.seed_is_given else None
        position, seed = parse_state(state, self._identity, drop_last=self.drop_last, seed=given_seed)
        worker = get_worker_info()
        if tuple(state.get("worker", ())) != (() if worker is None else (worker.id, worker.num_workers)):
            raise InputError("a state taken inside DataLoader workers fits the same number of workers only")
        last = position.consumed[-1] if position.consumed else None
        if worker is not None and last is not None and len(position.parted(self._sizes(self._session.here()))[0]):
            raise InputError(
                "inside DataLoader workers an epoch goes on with the same world, batch and fetch size only: it was "
                f"read as {last}"
            )
        self._session.seed = seed
        self._position = self._resume = position
        if worker is None:
            self._counter.set(position.epoch)
        else:
            self._counter.resume(worker.seed - worker.id, worker.id, worker.num_workers, position.epoch)

    # --- Iterating ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if not self._hooks:
            refuse_stacking(sys._getframe(1).f_locals.get("self"))
        if self._ended is not None:
            self._position, self._ended = EpochPosition(self._ended + 1), None
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        # A generator: nothing is settled, and no epoch bound, before the first batch is asked for.
        session = self._session
        world = session.check()
        worker = get_worker_info()
        if worker is None:
            epoch = self._counter.advance()
        else:
            epoch = self._counter.join(worker.seed - worker.id, worker.id, worker.num_workers)
            self._projection.warn_of_workers()
        sizes = self._sizes(world)
        consumed, n_done = self._resumed(epoch).parted(sizes)
        plan = self._plan_of(world, epoch, consumed)
        agreement = session.agreement if worker is None else None
        iteration = self._iteration
        self._iteration += 1
        if agreement is not None:
            agreement.begin(iteration, epoch, self.fingerprint)
        first, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        run = EpochRun(
            self._source,
            plan,
            range(first, plan.n_fetches, n_workers),
            n_done,
            scheduler=self._scheduler(),
            projection=self._projection,
            hooks=self._hooks,
            transform=as_transform(self.transform),
            placement=self._placement,
            key=self._token,
        )
        self._stats = run.stats
        # Also what fails before its first batch can be continued.
        self._position = run.position if n_done or worker is not None else EpochPosition(epoch, consumed)
        try:
            yield from run.batches(
                moved=self._moved,
                after_first=None if agreement is None else functools.partial(agreement.go_on, iteration, 1),
                shown=self._progress and first == 0,
            )
            if worker is None:
                self._position = EpochPosition(epoch + 1)
            else:
                self._ended = epoch
        finally:
            if worker is not None:
                self._report(worker, epoch, run.stats.report())
            elif run.is_whole:
                logger.info("%s", line_of(run.stats.report()))
            if agreement is not None:
                if run.is_whole:
                    agreement.finish(iteration)
                else:
                    agreement.leave(iteration, run.stats.n_batches)

    def _moved(self, run: EpochRun) -> None:
        self._position = run

    def _here(self) -> EpochPosition | None:
        return self._position.position if isinstance(self._position, EpochRun) else self._position

    def _resumed(self, epoch: int) -> EpochPosition:
        """Return where an epoch is to resume, once; its start if no state is of it."""
        resume, self._resume = self._resume, None
        if resume is None or resume.epoch == epoch:
            return resume or EpochPosition(epoch)
        # Workers of later passes are copies of a data set that has not itself gone on.
        level = logging.WARNING if get_worker_info() is None else logging.DEBUG
        logger.log(level, "the state that was loaded is of epoch %d; epoch %d begins at its start", resume.epoch, epoch)
        return EpochPosition(epoch)

    # --- Accounts -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what the latest epoch of this rank did.

        Also logged at its end, at the level INFO, by ``dasksc.dataset``. Where DataLoader workers read, both
        add up what the workers have done that came to their end (the last of them logs), and times are
        those of the slowest.

        Returns
        -------
        dict
            ``epoch``, ``rank``, ``world_size``; ``n_batches`` and ``n_rows`` yielded, ``n_control_rows`` beside them
            (`CellSets`), ``n_batches_before`` the batches that were yielded before the epoch was resumed,
            ``n_batches_left`` those to come; ``n_rank_padded`` and ``n_rank_dropped``, rows that this rank repeats
            and leaves out in a whole epoch (of what was left when it was resumed), of ``n_rank_batches`` batches;
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
        if not isinstance(self._source, MatrixSource) or self._source.maker.modalities:
            raise InputError("to_dask needs an AnnData or a Dask array, read without hooks")
        plan, maker = self.plan(epoch), self._source.maker
        return epoch_array(
            self._source.matrices["X"],
            plan,
            name=f"dasksc-fetch-{self._source.name}-e{plan.epoch}-r{plan.rank}",
            layout=maker.layout,
            dtype=maker.dtype,
            columns=maker.columns.get("X"),
        )

    # --- Copies ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_position": self._here()}
        del state["_stats"]
        if isinstance(self._source, MatrixSource):
            state["collection"] = None  # as the source that travels has none
        state["_securities"] = securities_for_child()
        # Plain pickle, which DataLoader workers get, fails on lambdas.
        state["_called"] = cloudpickle.dumps({name: state.pop(name) for name in _CALLED})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for address, security in state.pop("_securities").items():
            remember_security(address, security)
        called = cloudpickle.loads(state.pop("_called"))
        self.__dict__.update(state)
        self.__dict__.update(called)
        self._stats = EpochStats()

    def __repr__(self) -> str:
        return (
            f"scDataset({self._source.name}, {self._source.n_obs} rows, {self.strategy!r}, "
            f"batch_size={self.batch_size}, fetch_factor={self.fetch_factor})"
        )


class _Where:
    """Where fetches run, as given; resolved anew each time, since a Client may come or go."""

    def __init__(self, given: Scheduler | Client | str | None) -> None:
        self._given = given
        resolve_scheduler(given)  # refuse a wrong one now

    def __call__(self) -> Scheduler:
        return resolve_scheduler(self._given)

    def __getstate__(self) -> dict[str, Any]:
        return {"_given": portable_scheduler(self._given)}

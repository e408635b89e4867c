"""A dry run: what an epoch will be, computed from its plan, before anything of a matrix is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from dasksc.errors import InputError
from dasksc.kernels.draw import count_codes
from dasksc.loader import MatrixSource, parts_of, scDataset
from dasksc.memory.limits import to_ask_for
from dasksc.planning.label_entropy import Diversity
from dasksc.planning.plan import EpochPlan
from dasksc.planning.ranks import World
from dasksc.sampling.labels import encode_labels
from dasksc.storage import is_url

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["Check", "ClassShare", "RankShare", "check", "diversity"]

# Rows of the epoch that are looked at for its mix of classes, at most.
_LOOKED_AT = 2**20
_N_SHOWN = 12
# Batches whose labels are less mixed than this share of random ones' are warned of.
_MIXED = 0.9
_MUCH_DROPPED = 0.05
# Less wanted of what crosses a network than this share is warned of.
_WANTED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What a rank gets of the epoch.

    Parameters
    ----------
    rank
        Which.
    n_rows, n_fetches, n_batches
        What it yields, and in how many fetches it reads that.
    n_padded, n_dropped
        Rows it yields that another rank yields too; rows dealt to it that it leaves out.
    """

    rank: int
    n_rows: int
    n_fetches: int
    n_batches: int
    n_padded: int
    n_dropped: int

    def __str__(self) -> str:
        extra = "".join(
            f", {n} {what}" for n, what in ((self.n_padded, "of them padded"), (self.n_dropped, "rows dropped")) if n
        )
        return f"{self.n_rows:,} rows in {self.n_batches:,} batches, read in {self.n_fetches:,} fetches{extra}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShare:
    """How often a class comes.

    Parameters
    ----------
    name
        Its label.
    drawn
        Its share of the rows of the epoch that have a label.
    stored
        Its share of those of the collection.
    """

    name: Any
    drawn: float
    stored: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """What `check` found; printing it shows the report.

    Parameters
    ----------
    name
        The data set and its strategy.
    epoch
        Which epoch it is of.
    n_obs
        Rows of the collection.
    n_rows
        Rows of the epoch over all ranks, before any are repeated or left out.
    n_blocks, block_size
        Blocks that are dealt to the ranks, the last of which may be short, and their rows.
    batch_size, global_batch_size
        Rows of a batch of one rank, and of all ranks together.
    fetch_size
        Rows of a fetch.
    ranks
        What each rank gets.
    n_padded, n_dropped
        Rows repeated and left out, over all ranks.
    label_key
        The column whose classes are counted.
    classes
        Its classes, those that most rows are of first.
    num_workers, prefetch_factor
        Of the DataLoader.
    process_bytes, prefetched_bytes
        Memory that one reading process needs at most, and that of batches the DataLoader holds ready; None where
        rows have no known size.
    pages_bytes
        Pages of files that one reading process needs in the page cache at the same time.
    job_bytes
        What a rank needs in a job whose memory is limited: all of the above, the interpreter and the libraries, but
        no model.
    warnings
        What could be better, and how.
    """

    name: str
    epoch: int
    n_obs: int
    n_rows: int
    n_blocks: int
    block_size: int
    batch_size: int
    global_batch_size: int
    fetch_size: int
    ranks: tuple[RankShare, ...]
    n_padded: int
    n_dropped: int
    label_key: str | None
    classes: tuple[ClassShare, ...]
    num_workers: int
    prefetch_factor: int
    process_bytes: int | None
    prefetched_bytes: int | None
    pages_bytes: int | None
    job_bytes: int | None
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """How many ranks share the epoch."""
        return len(self.ranks)

    @property
    def rank_bytes(self) -> int | None:
        """Memory that a rank needs at most, its DataLoader workers and their batches included."""
        if self.process_bytes is None or self.prefetched_bytes is None:
            return None
        return max(1, self.num_workers) * self.process_bytes + self.prefetched_bytes

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.name}, epoch {self.epoch}, {self.world_size} rank{'s' * (self.world_size > 1)}"
        yield (
            f"  rows     {self.n_rows:,} of the {self.n_obs:,} stored, in {self.n_blocks:,} blocks of "
            f"{self.block_size:,}"
        )
        yield (
            f"  batches  {self.batch_size:,} rows a rank, {self.global_batch_size:,} over all; "
            f"fetches of {self.fetch_size:,} rows"
        )
        for share, ranks in groupby(self.ranks, key=lambda one: str(one)):
            first, *others = (one.rank for one in ranks)
            name = f"rank {first}" if not others else f"ranks {first} to {others[-1]}"
            yield f"  {name}: {share}"
        yield f"  padded   {self.n_padded:,} rows over all ranks; dropped {self.n_dropped:,}"
        if self.classes:
            shown = [f"{one.name} {one.drawn:.1%} ({one.stored:.1%} stored)" for one in self.classes[:_N_SHOWN]]
            rest = len(self.classes) - len(shown)
            more = f" and {rest} more" if rest else ""
            yield f"  {self.label_key or 'classes'}: {', '.join(shown)}{more}"
        yield f"  memory   {self._memory()}"
        if self.job_bytes is not None:
            yield (
                f"           this run needs {format_bytes(self.job_bytes)} a rank, beside its model; ask for "
                f"{format_bytes(to_ask_for(self.job_bytes))}"
            )
        for warning in self.warnings:
            yield f"  warning: {warning}"

    def _memory(self) -> str:
        if self.rank_bytes is None or self.process_bytes is None or self.prefetched_bytes is None:
            return "unknown: rows that are read by indexing have no known size"
        pages = format_bytes(max(1, self.num_workers) * (self.pages_bytes or 0))
        if not self.num_workers:
            return f"{format_bytes(self.rank_bytes)} a rank at most, and {pages} of page cache"
        return (
            f"{format_bytes(self.rank_bytes)} a rank at most: {self.num_workers} workers x "
            f"{format_bytes(self.process_bytes)}, and {format_bytes(self.prefetched_bytes)} of batches they "
            f"prefetch ({self.prefetch_factor} each); beside it {pages} of page cache"
        )


def check(data: scDataset | DataLoader[Any], world_size: int | None = None, *, label_key: str | None = None) -> Check:
    """Tell what the next epoch will be, without reading X.

    Parameters
    ----------
    data
        A data set, or the DataLoader of one, whose workers and prefetched batches are then counted.
    world_size
        How many ranks to plan for; default: as many as there are now.
    label_key
        The obs column whose classes to count; default: the strategy's labels, or else the first column of
        ``obs=`` that has classes.

    Returns
    -------
    Check
        What each rank gets, what is padded or dropped, the mix of classes, the memory, and warnings of what could
        be better. ``print(dasksc.check(dataset))`` shows it.

    Raises
    ------
    InputError
        If `data` is neither, or `world_size` is not positive.
    """
    dataset = getattr(data, "dataset", data)
    if not isinstance(dataset, scDataset):
        raise InputError(f"check takes a dasksc.scDataset, or a DataLoader of one; got {data!r}")
    loader = None if dataset is data else data
    if world_size is None:
        world_size = dataset.world_size
    parts = parts_of(dataset)
    source = parts.source
    plan = parts.plan_of(World(0, world_size), parts.counter.peek())
    ranks = tuple(_share_of(dataclasses.replace(plan, rank=rank)) for rank in range(world_size))
    num_workers = int(getattr(loader, "num_workers", 0))
    prefetch_factor = int(getattr(loader, "prefetch_factor", None) or 0)
    name, labels = _labels_of(dataset, label_key)
    known = isinstance(source, MatrixSource)
    return Check(
        name=f"{source.name} by {type(dataset.strategy).__name__}",
        epoch=plan.epoch,
        n_obs=source.n_obs,
        n_rows=plan.n_rows,
        n_blocks=-(-plan.n_rows // plan.block_size),
        block_size=plan.block_size,
        batch_size=plan.batch_size,
        global_batch_size=plan.batch_size * world_size,
        fetch_size=plan.fetch_rows,
        ranks=ranks,
        n_padded=plan.n_padded,
        n_dropped=plan.n_dropped,
        label_key=name,
        classes=() if labels is None else _classes_of(plan, labels),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        process_bytes=dataset.projected_bytes,
        pages_bytes=dataset.projected_pages,
        job_bytes=max(1, num_workers) * parts.projection.job_bytes if known else None,
        prefetched_bytes=int(num_workers * prefetch_factor * parts.projection.batch_bytes) if known else None,
        warnings=(*_of_sizes(dataset, plan, ranks), *_of_loader(loader, plan), *_of_mixing(plan, name, labels)),
    )


def diversity(dataset: Any, column: str, n_batches: int = 1000) -> Diversity:
    """Measure how well the batches of a data set mix the labels of an obs column; reads no matrix.

    Parameters
    ----------
    dataset
        A `scDataset` of an AnnData.
    column
        Which column of obs, such as ``"plate"``.
    n_batches
        About how many batches of this rank's next epoch to look at.

    Returns
    -------
    Diversity
        Mean and spread of the entropy of batches, beside those of ideal random batches.
    """
    measured: Diversity = dataset.plan().diversity(parts_of(dataset).source.labels_of(column), n_batches)
    return measured


def _share_of(plan: EpochPlan) -> RankShare:
    return RankShare(
        rank=plan.rank,
        n_rows=plan.n_rank_rows,
        n_fetches=plan.n_fetches,
        n_batches=plan.n_batches,
        n_padded=plan.n_rank_padded,
        n_dropped=plan.n_rank_dropped,
    )


def _labels_of(dataset: scDataset, label_key: str | None) -> tuple[str | None, Any]:
    """The column to look at, and its labels; None where there is none."""
    strategy = dataset.strategy
    name = label_key or getattr(strategy, "label_key", None)
    labels = getattr(strategy, "labels", None)
    if name is None and labels is not None:
        return None, labels if len(labels) == parts_of(dataset).source.n_obs else None
    if name is None:
        name = next(iter(dataset.categories), None)
    return name, None if name is None else parts_of(dataset).source.labels_of(name)


def _classes_of(plan: EpochPlan, labels: Any) -> tuple[ClassShare, ...]:
    """Count the classes of rows spread over the epoch, in storage order."""
    codes, names = encode_labels(labels)
    positions = np.linspace(0, plan.n_rows - 1, min(plan.n_rows, _LOOKED_AT)).astype(np.int64)
    drawn = _shares(codes[plan.sampler.draw(plan.seed, plan.epoch).rows(positions)], len(names))
    stored = _shares(codes, len(names))
    order = [int(c) for c in np.argsort(-stored, kind="stable") if drawn[c] or stored[c]]
    return tuple(ClassShare(name=names[c], drawn=float(drawn[c]), stored=float(stored[c])) for c in order)


def _shares(codes: NDArray[Any], n_names: int) -> NDArray[np.float64]:
    counts = np.zeros(n_names + 1, dtype=np.int64)
    count_codes(len(codes), codes, np.empty(0, dtype=np.int64), counts)
    shares: NDArray[np.float64] = counts[1:] / max(1, counts[1:].sum())
    return shares


def _of_sizes(dataset: scDataset, plan: EpochPlan, ranks: tuple[RankShare, ...]) -> Iterator[str]:
    if not plan.n_rows:
        yield "there are no rows to read: indices= leaves none"
        return
    if not any(share.n_batches for share in ranks):
        yield (
            f"no rank yields a batch: {plan.n_rows:,} rows over {plan.world_size} ranks leave each less than a batch "
            f"of {plan.batch_size}, and drop_last=True. Lower batch_size, or use drop_last=False"
        )
    elif plan.n_dropped > _MUCH_DROPPED * plan.n_rows:
        yield (
            f"{plan.n_dropped / plan.n_rows:.0%} of the rows are dropped in every epoch. Lower batch_size, or use "
            "drop_last=False"
        )
    n_blocks = -(-plan.n_rows // plan.block_size)
    if n_blocks < plan.world_size:
        yield (
            f"there are more ranks ({plan.world_size}) than blocks ({n_blocks}): blocks are cut, and ranks read their "
            "pieces of the same chunks. Lower block_size"
            + ("" if plan.sampler.block_size else " (for Streaming a fetch: lower fetch_factor)")
        )
    source = parts_of(dataset).source
    for name, matrix in source.matrices.items() if isinstance(source, MatrixSource) else ():
        chunk_rows = matrix.cost.chunk_rows
        if plan.fetch_rows < chunk_rows:
            yield (
                f"a fetch ({plan.fetch_rows:,} rows) is smaller than a storage chunk of {name} (about "
                f"{chunk_rows:,.0f} rows): chunks are decoded again and again for a few rows each. Raise fetch_factor, "
                "or store smaller chunks"
            )
        elif is_url(matrix.label) and (share := _wanted_share(plan, source.n_obs, chunk_rows)) < _WANTED:
            yield (
                f"about {share:.0%} of what is asked for of {name} over the network is wanted: chunks of about "
                f"{chunk_rows:,.0f} rows come whole, and blocks have {plan.block_size:,}. Raise block_size or "
                "fetch_factor, or store smaller chunks in shards (dasksc convert)"
            )


def _wanted_share(plan: EpochPlan, n_obs: int, chunk_rows: float) -> float:
    """Return the rows of a fetch as a share of all in the chunks that its blocks lie in, were they anywhere."""
    chunk_rows = max(1.0, chunk_rows)
    n_blocks = plan.fetch_rows / plan.block_size
    n_obs = max(1, n_obs)
    touched_by_one = min(1.0, (plan.block_size + chunk_rows - 1) / n_obs)
    read_rows = n_obs * (1 - float((1 - touched_by_one) ** n_blocks))
    return min(1.0, plan.fetch_rows / read_rows)


def _of_loader(loader: Any, plan: EpochPlan) -> Iterator[str]:
    if loader is None:
        return
    if loader.batch_size is not None:
        yield (
            f"the DataLoader collects batches of {loader.batch_size} from a data set that yields whole batches. "
            "Use DataLoader(dataset, batch_size=None)"
        )
    if loader.num_workers > plan.n_fetches:
        yield (
            f"{loader.num_workers} DataLoader workers share {plan.n_fetches} fetches: some have nothing to do. Use "
            "num_workers=0, which reads ahead on threads, or lower fetch_factor"
        )


def _of_mixing(plan: EpochPlan, name: str | None, labels: Any) -> Iterator[str]:
    if labels is None or not plan.n_fetches:
        return
    share = plan.diversity(labels).share
    if share < _MIXED:
        n_blocks = max(1, plan.fetch_rows // plan.block_size)
        yield (
            f"batches hold {share:.0%} of the mix of labels that random ones would ({name or 'labels'}): labels lie in "
            f"long runs, and a fetch mixes only {n_blocks:,} blocks. Raise fetch_factor, or lower block_size"
        )

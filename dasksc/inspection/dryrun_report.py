"""What an epoch will be, and its report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dask.utils import format_bytes

from dasksc.memory.limits import to_ask_for

__all__ = ["Check", "ClassShare", "RankShare"]

_N_SHOWN = 12


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
    """What `dasksc.check` found; printing it shows the report.

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
    genes
        How the names of genes matched, a line for each modality.
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
    genes: tuple[str, ...] = ()

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
        for line in self.genes:
            yield f"  genes    {line}"
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

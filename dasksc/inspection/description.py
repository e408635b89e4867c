"""What is found in an atlas, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dask.utils import format_bytes

from dasksc.storage import Layout

__all__ = ["Column", "Description", "Modality", "Rate", "StoredMatrix"]

_N_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of obs.

    Parameters
    ----------
    name, dtype
        As pandas has them.
    n_classes
        Categories; None where it is no categorical.
    n_missing
        Rows without a value.
    """

    name: str
    dtype: str
    n_classes: int | None
    n_missing: int

    def __str__(self) -> str:
        kind = self.dtype if self.n_classes is None else f"{self.n_classes:,} classes"
        return f"{self.name} ({kind}{f', {self.n_missing:,} missing' if self.n_missing else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """How a matrix is stored; of several files, those that store it alike are one.

    Parameters
    ----------
    key
        ``"X"``, ``"layers/counts"``, ``"raw/X"``, ...
    n_files
        Files that store it like this.
    encoding
        ``"csr"``, ``"csc"`` or ``"dense"``.
    dtype, indices_dtype
        Of the values, and of column numbers where there are any.
    chunks, shards
        Shape of a chunk (of values) and of what holds several; None where it is contiguous, or not sharded.
    codec
        What chunks are compressed by; None where they are not.
    nbytes, stored_bytes
        Uncompressed, and as stored, over all files; `stored_bytes` is None of a Zarr store on a web server, which does
        not tell what it has.
    """

    key: str
    n_files: int
    encoding: str
    dtype: str
    indices_dtype: str | None
    chunks: tuple[int, ...] | None
    shards: tuple[int, ...] | None
    codec: str | None
    nbytes: int
    stored_bytes: int | None

    def __str__(self) -> str:
        types = self.dtype if self.indices_dtype is None else f"{self.dtype}, columns {self.indices_dtype}"
        chunks = "contiguous" if self.chunks is None else f"chunks of {_shape(self.chunks)}"
        shards = "" if self.shards is None else f" in shards of {_shape(self.shards)}"
        if self.stored_bytes is None:
            size = f"{format_bytes(self.nbytes)} uncompressed, stored size unknown"
        else:
            size = format_bytes(self.stored_bytes)
            if self.codec is not None:
                size += f" ({self.nbytes / max(1, self.stored_bytes):.1f}x smaller)"
        files = f", in {self.n_files} files" if self.n_files > 1 else ""
        return f"{self.encoding} {types}; {chunks}{shards}, {self.codec or 'uncompressed'}; {size}{files}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast batches came in a short probe, on this machine and from its page cache as it was.

    Parameters
    ----------
    layout
        Of the batches.
    block_size
        Rows that were read as one.
    rows_per_s
        Rows a second.
    first_batch_s
        Until the first batch, in which kernels may be compiled.
    """

    layout: Layout
    block_size: int
    rows_per_s: float
    first_batch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """A modality of several.

    Parameters
    ----------
    name
        Before the keys of its matrices, and its columns of obs.
    n_vars
        Its variables.
    """

    name: str
    n_vars: int

    def __str__(self) -> str:
        return f"{self.name} ({self.n_vars:,} variables)"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `dasksc.describe` found; printing it shows the report.

    Parameters
    ----------
    name
        What was described.
    n_files
        Files or stores.
    n_obs, n_vars
        Cells and genes; of several modalities, the cells that all have, and the variables of all.
    modalities
        Of a MuData; empty where there is one matrix X.
    obs
        Columns.
    matrices
        How what has a row per cell is stored.
    rates
        How fast it was read.
    advice
        What could be better, and how.
    """

    name: str
    n_files: int
    n_obs: int
    n_vars: int
    modalities: tuple[Modality, ...] = ()
    obs: tuple[Column, ...]
    matrices: tuple[StoredMatrix, ...]
    rates: tuple[Rate, ...]
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        files = f" in {self.n_files:,} files" if self.n_files > 1 else ""
        columns = "genes" if not self.modalities else f"variables of {len(self.modalities)} modalities"
        yield f"{self.name}: {self.n_obs:,} cells x {self.n_vars:,} {columns}{files}"
        if self.modalities:
            yield f"  mod  {', '.join(map(str, self.modalities))}"
        columns_shown = ", ".join(map(str, self.obs[:_N_SHOWN]))
        more = f" and {len(self.obs) - _N_SHOWN} more" if len(self.obs) > _N_SHOWN else ""
        yield f"  obs  {columns_shown or 'no columns'}{more}"
        width = max((len(one.key) for one in self.matrices), default=0)
        for matrix in self.matrices:
            yield f"  {matrix.key:<{width}}  {matrix}"
        for rate in self.rates:
            rows = "single rows" if rate.block_size == 1 else f"blocks of {rate.block_size}"
            yield f"  {rate.layout:<5} batches, {rows:<12} {rate.rows_per_s:>10,.0f} cells/s"
        for advice in self.advice:
            yield f"  -> {advice}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)

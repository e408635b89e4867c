"""Description of an atlas, and its printed report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dask.utils import format_bytes

from dasksc.storage import Layout

__all__ = ["PROBED_BLOCKS", "Column", "Description", "Modality", "Rate", "StoredMatrix"]

PROBED_BLOCKS = (64, 1)
"""Block sizes of the probes."""

_N_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of obs.

    Parameters
    ----------
    name, dtype
        Name and data type of the column in pandas.
    n_classes
        Number of categories; None if the column is not categorical.
    n_missing
        Number of rows without a value.
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
    """Storage of a matrix, described once for all files that store it in the same way.

    Parameters
    ----------
    key
        ``"X"``, ``"layers/counts"``, ``"raw/X"``, ...
    n_files
        Number of files that store the matrix in this way.
    encoding
        ``"csr"``, ``"csc"`` or ``"dense"``.
    dtype, indices_dtype
        Data type of the values, and that of the column numbers of a sparse matrix; None for a dense matrix.
    chunks, shards
        Shape of a chunk (None if the values are stored contiguously), and shape of a shard (None if there are no
        shards).
    codec
        Compression of the chunks; None if they are uncompressed.
    nbytes, stored_bytes
        Uncompressed and stored size of all files, in bytes. `stored_bytes` is None for a Zarr store on a web server,
        which cannot list its contents.
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
    """Rate of batches in a short probe on this machine, with the page cache in its current state.

    Parameters
    ----------
    layout
        Layout of the batches.
    block_size
        Rows per block of contiguous rows; 1 for single rows.
    rows_per_s
        Rows per second.
    first_batch_s
        Time until the first batch in seconds, which may include the compilation of kernels.
    memory_bytes, page_bytes
        Projected memory of the probe's epochs in bytes: anonymous memory, and pages of files in the page cache. None
        for collections whose rows have no known size.
    """

    layout: Layout
    block_size: int
    rows_per_s: float
    first_batch_s: float
    memory_bytes: int | None = None
    page_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """One modality of a multimodal collection.

    Parameters
    ----------
    name
        Name of the modality, the prefix of the keys of its matrices and of its obs columns.
    n_vars
        Number of its variables.
    """

    name: str
    n_vars: int

    def __str__(self) -> str:
        return f"{self.name} ({self.n_vars:,} variables)"


@dataclass(frozen=True, kw_only=True)
class Description:
    """Result of `dasksc.describe`; printing it shows a report.

    Parameters
    ----------
    name
        Name of the atlas.
    n_files
        Number of files or stores.
    n_obs, n_vars
        Number of cells and genes. With several modalities, the number of cells that all of them have, and the total
        number of variables.
    modalities
        Modalities of a MuData; empty if there is a single matrix X.
    obs
        Columns of obs.
    matrices
        Storage of the matrices with one row per cell.
    rates
        Measured rates of batches.
    advice
        Possible improvements, and how to make them.
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
        if not self.modalities and all(one.key != "X" for one in self.matrices):
            yield "  X    not stored, so there are no batches until adata.X is set, for example from a layer"
        width = max((len(one.key) for one in self.matrices), default=0)
        for matrix in self.matrices:
            yield f"  {matrix.key:<{width}}  {matrix}"
        for rate in self.rates:
            rows = "single rows" if rate.block_size == 1 else f"blocks of {rate.block_size}"
            yield f"  {rate.layout:<5} batches, {rows:<12} {rate.rows_per_s:>10,.0f} cells/s"
        memory = [(one.memory_bytes, one.page_bytes or 0) for one in self.rates if one.memory_bytes is not None]
        if memory:
            anonymous, pages = max(memory, key=sum)
            yield f"  an epoch takes up to {format_bytes(anonymous)} of memory, and {format_bytes(pages)} of page cache"
        for advice in self.advice:
            yield f"  -> {advice}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)

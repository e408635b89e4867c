"""What is in an atlas, how it is stored, and how fast it can be read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
import pandas as pd
import zarr
from anndata import AnnData
from dask.utils import format_bytes

from dasksc.atlas import opening
from dasksc.atlas.concat import Join
from dasksc.atlas.modalities import Modalities, is_modalities
from dasksc.batches.batch import Batch
from dasksc.errors import InputError, StorageError
from dasksc.loader import scDataset
from dasksc.sampling.strategies import BlockShuffling
from dasksc.storage import Cache, Layout, Place, is_url, open_place, shown

__all__ = ["Column", "Description", "Modality", "Rate", "StoredMatrix", "describe"]

# As in the benchmarks: batches of 64 rows, of which a fetch holds 64.
_BATCH_SIZE = 64
_FETCH_FACTOR = 64
_BLOCK_SIZES = (64, 1)
# Files of many that are looked at.
_MAX_FILES = 64
_N_SHOWN = 12
# Blocks that read so much slower than long ones are worth a word.
_SLOW_BLOCKS = 0.5


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
    """What `describe` found; printing it shows the report.

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


def describe(data: Any, *, join: Join = "inner", seconds: float = 1.0) -> Description:
    """Tell what is in an atlas, how it is stored, how fast it can be read here, and what to do about it.

    Parameters
    ----------
    data
        What `dasksc.open` takes, or `Modalities`. How it is stored is told of paths and URLs, of the first 64 of many;
        not of an AnnData that is open already.
    join
        Of several, as for `dasksc.open`.
    seconds
        For how long each of four probes reads batches of X: dense and CSR, by blocks of 64 rows and by single ones.
        0 for none.

    Returns
    -------
    Description
        ``print(dasksc.describe("atlas.h5ad"))`` shows it.

    Raises
    ------
    InputError, StorageError
        As for `dasksc.open`.
    """
    if seconds < 0:
        raise InputError(f"seconds={seconds} is negative; give 0 for no probe")
    several = None if is_modalities(data) else opening.several_of(data)
    parts = [data] if several is None else several[0]
    opened: AnnData | Modalities
    if is_modalities(data):
        opened = data if isinstance(data, Modalities) else Modalities(data)
        modalities = tuple(Modality(name=name, n_vars=int(part.n_vars)) for name, part in opened.mod.items())
        has_x = all(part.X is not None for part in opened.mod.values())
    else:
        opened = data if isinstance(data, AnnData) else opening.open(data, names=False, join=join)
        modalities, has_x = (), opened.X is not None
    stored = [_stored(part) for part in parts[:_MAX_FILES]]
    matrices = _alike([matrix for one in stored for matrix in one.matrices])
    rates = tuple(_rates(opened, seconds)) if seconds and has_x and opened.n_obs else ()
    return Description(
        name=_shown(data) if isinstance(data, str | os.PathLike) else _names(parts),
        n_files=len(parts),
        n_obs=int(opened.n_obs),
        n_vars=int(opened.n_vars) if isinstance(opened, AnnData) else sum(one.n_vars for one in modalities),
        modalities=modalities,
        obs=tuple(_columns(opened.obs)),
        matrices=tuple(matrices),
        rates=rates,
        # Several that are each shuffled are not shuffled as one.
        advice=tuple(_advice(matrices, rates, is_shuffled=len(parts) == 1 and stored[0].is_shuffled)),
    )


def _shown(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return shown(text) if is_url(text) else text


def _names(parts: Sequence[Any]) -> str:
    names = [Path(_shown(part)).name if isinstance(part, str | os.PathLike) else type(part).__name__ for part in parts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _columns(obs: pd.DataFrame) -> Iterator[Column]:
    for name, column in obs.items():
        is_category = isinstance(column.dtype, pd.CategoricalDtype)
        yield Column(
            name=str(name),
            dtype=str(column.dtype),
            n_classes=len(column.cat.categories) if is_category else None,
            n_missing=int(column.isna().sum()),
        )


# --- How it is stored -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What is known of one file or store: its matrices, and whether `dasksc.convert` has shuffled its cells."""

    matrices: tuple[StoredMatrix, ...] = ()
    is_shuffled: bool = False


def _stored(part: Any) -> _Stored:
    """Describe a file or store; of what is in memory nothing is known."""
    with _root_of(part) as root:
        if root is None:
            return _Stored()
        how = root.attrs.get("dasksc")
        # What was put together by a column of obs is in no random order, shuffled within or not.
        is_shuffled = isinstance(how, Mapping) and how.get("order") == "shuffle" and how.get("group_by") is None
        return _Stored(matrices=tuple(_matrices_of(root)), is_shuffled=is_shuffled)


@contextmanager
def _root_of(part: Any) -> Iterator[Any]:
    """Open a file or store by its path or URL; None for what is neither."""
    if not isinstance(part, str | os.PathLike):
        yield None
        return
    place = Place.of(os.fspath(part)) if is_url(os.fspath(part)) else None
    path = os.fspath(part) if place is None else place.local
    if path is None:
        assert place is not None
        with open_place(place, cache=Cache.of(None)) as root:
            yield root
    elif os.path.isdir(path):
        yield zarr.open_group(path, mode="r")
    else:
        with h5py.File(path, "r") as file:
            yield file


def _matrices_of(root: Any, prefix: str = "") -> Iterator[StoredMatrix]:
    if "mod" in root:
        for name in root["mod"]:
            yield from _matrices_of(root["mod"][name], f"{name}/")
        return
    keys = ["X", *(f"{group}/{name}" for group in ("layers", "obsm") if group in root for name in root[group]), "raw/X"]
    for key in keys:
        if key not in root:
            continue
        stored = root[key]
        if isinstance(stored, h5py.Dataset | zarr.Array):
            if len(stored.shape) == 2:
                yield _matrix(prefix + key, "dense", stored, [stored])
        elif "data" in stored and "indices" in stored:
            kind = str(stored.attrs.get("encoding-type", stored.attrs.get("h5sparse_format", "csr")))
            arrays = [stored[name] for name in ("data", "indices", "indptr")]
            yield _matrix(prefix + key, kind.removesuffix("_matrix"), arrays[0], arrays)


def _matrix(key: str, encoding: str, values: Any, arrays: Sequence[Any]) -> StoredMatrix:
    return StoredMatrix(
        key=key,
        n_files=1,
        encoding=encoding,
        dtype=str(values.dtype),
        indices_dtype=str(arrays[1].dtype) if len(arrays) > 1 else None,
        chunks=values.chunks,
        shards=getattr(values, "shards", None),
        codec=_codec(values),
        nbytes=sum(int(np.prod(array.shape)) * array.dtype.itemsize for array in arrays),
        stored_bytes=_total(_stored_bytes(array) for array in arrays),
    )


def _stored_bytes(array: h5py.Dataset | zarr.Array[Any]) -> int | None:
    if isinstance(array, h5py.Dataset):
        return int(array.id.get_storage_size())
    try:
        return int(array.nbytes_stored())
    except StorageError:  # a web server does not list what it has
        return None


def _total(sizes: Iterable[int | None]) -> int | None:
    """Return the sum of sizes; None if one of them is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _codec(array: Any) -> str | None:
    """Return the names of what compresses an array's chunks; None where nothing does."""
    if isinstance(array, h5py.Dataset):
        pipeline = array.id.get_create_plist()
        filters = [pipeline.get_filter(i) for i in range(pipeline.get_nfilters())]
        names = [_filter_name(number, text.decode()) for number, _, _, text in filters]
    else:
        names = [_compressor_name(one) for one in (*array.filters, *array.compressors)]
    return ", ".join(names) or None


def _filter_name(number: int, text: str) -> str:
    known = {1: "gzip", 2: "shuffle", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32015: "zstd", 32026: "blosc2"}
    return known.get(number, text or f"filter {number}")


def _compressor_name(compressor: Any) -> str:
    cname = getattr(compressor, "cname", None)
    name = getattr(compressor, "codec_id", None) or type(compressor).__name__.removesuffix("Codec").lower()
    return str(name) if cname is None else f"{name} {getattr(cname, 'value', cname)}"


def _alike(matrices: Sequence[StoredMatrix]) -> list[StoredMatrix]:
    """Return as one what several files store alike."""

    def kind(one: StoredMatrix) -> tuple[Any, ...]:
        # Chunks are as long as a short array is, so of several files their lengths say little.
        return one.key, one.encoding, one.dtype, one.indices_dtype, one.codec, one.shards is None, one.chunks is None

    groups: dict[tuple[Any, ...], list[StoredMatrix]] = {}
    for one in matrices:
        groups.setdefault(kind(one), []).append(one)
    return [
        StoredMatrix(
            key=same[0].key,
            n_files=len(same),
            encoding=same[0].encoding,
            dtype=same[0].dtype,
            indices_dtype=same[0].indices_dtype,
            chunks=Counter(one.chunks for one in same).most_common(1)[0][0],
            shards=Counter(one.shards for one in same).most_common(1)[0][0],
            codec=same[0].codec,
            nbytes=sum(one.nbytes for one in same),
            stored_bytes=_total(one.stored_bytes for one in same),
        )
        for same in groups.values()
    ]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


# --- How fast it is read ----------------------------------------------------------------------------


def _rates(data: AnnData | Modalities, seconds: float) -> Iterator[Rate]:
    layouts: tuple[Layout, ...] = ("dense", "csr")
    for layout in layouts:
        for block_size in _BLOCK_SIZES:
            dataset = scDataset(
                data,
                BlockShuffling(block_size),
                min(_BATCH_SIZE, data.n_obs),
                _FETCH_FACTOR,
                layout=layout,
                rank=0,
                world_size=1,
                seed=0,
            )
            yield _rate(dataset, layout, block_size, seconds)


def _rate(dataset: scDataset, layout: Layout, block_size: int, seconds: float) -> Rate:
    """Read for some seconds, and a fetch at least, after a first fetch that is not counted; epoch after epoch."""

    def batches() -> Iterator[Any]:
        while True:
            yield from dataset

    start = perf_counter()
    endless = batches()
    next(endless)
    first_batch_s = perf_counter() - start
    # Kernels are compiled in the first fetch, and it was there when its first batch was.
    for _ in range(min(len(dataset), _FETCH_FACTOR) - 1):
        next(endless)
    n_rows, elapsed_s = 0, 0.0
    start = perf_counter()
    while elapsed_s < seconds or n_rows < min(dataset.fetch_size, len(dataset) * dataset.batch_size):
        batch = next(endless)
        n_rows += len(batch.index if isinstance(batch, Batch) else batch)
        elapsed_s = perf_counter() - start
    endless.close()  # type: ignore[attr-defined]
    return Rate(layout=layout, block_size=block_size, rows_per_s=n_rows / elapsed_s, first_batch_s=first_batch_s)


# --- What to do about it ----------------------------------------------------------------------------


def _advice(matrices: Sequence[StoredMatrix], rates: Sequence[Rate], *, is_shuffled: bool) -> Iterator[str]:
    for one in matrices:
        if one.encoding == "csc":
            yield (
                f"{one.key} is stored by columns, so that the first fetch reads all of it; dasksc convert writes it by "
                "rows"
            )
    # Of a modality, X has its name before it.
    x = [one for one in matrices if one.key.rpartition("/")[2] == "X" and one.key.split("/")[-2:-1] != ["raw"]]
    if any(one.chunks is not None and one.codec and one.encoding == "dense" and one.chunks[0] > 4096 for one in x):
        yield "chunks of X hold more rows than a fetch, and are decoded for few; dasksc convert makes them smaller"
    speed = {(rate.layout, rate.block_size): rate.rows_per_s for rate in rates}
    for layout in ("dense", "csr"):
        if speed.get((layout, 1), np.inf) < _SLOW_BLOCKS * speed.get((layout, _BLOCK_SIZES[0]), 0.0):
            times = speed[layout, _BLOCK_SIZES[0]] / speed[layout, 1]
            otherwise = (
                "; its cells were shuffled when it was converted, so that blocks mix as well as single rows"
                if is_shuffled
                else ", or dasksc convert, which shuffles cells once"
            )
            yield (
                f"single rows come {times:.1f} times slower than blocks of {_BLOCK_SIZES[0]} ({layout}): use "
                f"BlockShuffling(block_size=64) with a large fetch_factor{otherwise}"
            )
            break

#!/usr/bin/env python
"""Write a synthetic single-cell atlas of any size, chunk by chunk, as AnnData writes one.

    python make_atlas.py --cells 100000 --out atlas.h5ad
    python make_atlas.py --cells 1000000 --compression gzip --out atlas-gzip.h5ad
    python make_atlas.py --cells 100000 --zarr --out atlas.zarr

A cell is a draw of molecules from the expression profile of its type, stopped when as many
different genes were seen as the cell's depth allows: integer counts (float32), most genes rare,
about 1,450 of 20,000 genes per cell. The 50 cell types have Zipf-distributed sizes, their own
marker genes, and lie sorted on disk, which is the hard case for a loader: rows read in order
are all of one type.

Every cell has its own random stream, so the atlas depends on its arguments only, not on the
number of threads, and memory holds a few chunks of cells however many there are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata
import h5py
import numba
import numpy as np
import pandas as pd
import zarr
from anndata.io import write_elem

GENES_SEEN = 0.0725  # of all genes, in a cell of typical depth: 1,450 of 20,000
MARKERS = 0.002  # of all genes, for each type
MARKER_FOLD = 6.0
CELLS_PER_CHUNK = 2_048


def make_atlas(
    path: str | os.PathLike[str],
    n_cells: int,
    n_genes: int = 20_000,
    *,
    seed: int = 0,
    n_types: int = 50,
    n_plates: int = 14,
    dense: bool = False,
    compression: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Write an atlas to `path`: an h5ad file, or a Zarr v3 store if the name ends in ``.zarr``.

    Parameters
    ----------
    path
        Where to write. It appears when the atlas is complete.
    n_cells, n_genes
        Shape of the matrix.
    seed
        The same arguments and seed give the same atlas.
    n_types, n_plates
        Categories of the obs columns ``cell_type`` and ``plate``.
    dense
        Write X as a dense array instead of CSR.
    compression
        ``"gzip"`` or ``"lzf"`` for an h5ad; Zarr stores use AnnData's defaults.
    overwrite
        Replace what is at `path`; otherwise that is an error.
    progress
        Show a progress bar (if tqdm is installed).

    Returns
    -------
    Path
        The `path` that was written.

    Raises
    ------
    FileExistsError
        If there is something at `path` and `overwrite` was not asked for.
    """
    path = Path(path)
    is_zarr = path.suffix == ".zarr"
    if min(n_cells, n_genes, n_types, n_plates) < 1:
        raise ValueError("an atlas needs at least one cell, gene, type and plate")
    if is_zarr and compression is not None:
        raise ValueError("compression is for h5ad files; a Zarr store uses AnnData's defaults")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; remove it, or pass overwrite=True (--overwrite)")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    _remove(partial)

    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    type_codes = _zipf_codes(n_cells, n_types)
    plate_codes = rng.integers(n_plates, size=n_cells, dtype=np.int8 if n_plates < 128 else np.int16)
    depths = _depths(rng, plate_codes, n_genes)
    indptr = np.zeros(n_cells + 1, dtype=np.int64)
    np.cumsum(depths, out=indptr[1:])
    if indptr[-1] <= np.iinfo(np.int32).max:
        indptr = indptr.astype(np.int32)
    tables = _alias_tables(_profiles(rng, n_types, n_genes))

    def chunk(start: int) -> _Chunk:
        rows = slice(start, min(start + CELLS_PER_CHUNK, n_cells))
        return _Chunk(rows, type_codes[rows], depths[rows], tables, seed, dense=dense)

    filters = {} if compression is None else {"compression": compression}
    try:
        root = zarr.open_group(partial, mode="w", zarr_format=3) if is_zarr else h5py.File(partial, "w")
        _mark(root, "anndata", "0.1.0")
        total = np.empty(n_cells, dtype=np.float32)
        matrix = _Matrix(root, (n_cells, n_genes), indptr, dense=dense, filters=filters)
        with _bar(n_cells, path, show=progress) as bar:
            for made in _ahead(chunk, range(0, n_cells, CELLS_PER_CHUNK)):
                matrix.append(made)
                total[made.rows] = made.total
                bar.update(len(made.total))
        matrix.close()
        labels = {
            "cell_type": pd.Categorical.from_codes(type_codes, _names("type", n_types)),
            "plate": pd.Categorical.from_codes(plate_codes, _names("plate", n_plates)),
        }
        genes = pd.DataFrame(index=pd.Index(_names("gene", n_genes), dtype=object))
        with anndata.settings.override(auto_shard_zarr_v3=bool(anndata.settings.auto_shard_zarr_v3)):
            _write_obs(root, {**labels, "n_counts": total}, filters=filters)
            write_elem(root, "var", genes, dataset_kwargs=filters)
            for empty in ("layers", "obsm", "varm", "obsp", "varp", "uns"):
                write_elem(root, empty, {})
        _close(root)
        if overwrite:
            _remove(path)
        os.replace(partial, path)
    finally:
        _remove(partial)
    return path


def _zipf_codes(n_cells: int, n_types: int) -> np.ndarray:
    """Type of every cell, sorted: type k has a share proportional to 1 / (k + 1)."""
    share = 1 / np.arange(1, n_types + 1)
    ends = np.rint(np.cumsum(share / share.sum()) * n_cells).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    return np.repeat(np.arange(n_types, dtype=np.int8 if n_types < 128 else np.int16), sizes)


def _depths(rng: np.random.Generator, plate_codes: np.ndarray, n_genes: int) -> np.ndarray:
    """Different genes seen in every cell; plates differ a little in depth. Shape (n_cells,), int32."""
    of_plate = rng.normal(0, 0.1, plate_codes.max() + 1)
    of_plate -= of_plate.mean()
    depths = np.empty(len(plate_codes), dtype=np.int32)
    for start in range(0, len(depths), 1 << 20):
        part = slice(start, start + (1 << 20))
        log = rng.normal(-0.035, 0.25, len(depths[part])) + of_plate[plate_codes[part]]
        depths[part] = np.clip(np.exp(log) * GENES_SEEN * n_genes, 1, max(1, 0.3 * n_genes))
    return depths


def _profiles(rng: np.random.Generator, n_types: int, n_genes: int) -> np.ndarray:
    """Return the expected share of every gene in every type, shape (n_types, n_genes)."""
    base = np.exp(rng.normal(0, 2, n_genes))
    profiles = np.tile(base, (n_types, 1))
    candidates = np.flatnonzero(base >= np.median(base))
    n_markers = min(len(candidates), max(2, round(MARKERS * n_genes)))
    for profile in profiles:
        profile[rng.choice(candidates, n_markers, replace=False)] *= MARKER_FOLD
    return profiles / profiles.sum(axis=1, keepdims=True)


def _alias_tables(profiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's alias tables (1977), by Vose's method: a draw costs one random number and one look-up."""
    keep = np.empty(profiles.shape, dtype=np.uint32)
    other = np.empty(profiles.shape, dtype=np.int32)
    for profile, keep_row, other_row in zip(profiles, keep, other, strict=True):
        _fill_alias_table(profile * len(profile), keep_row, other_row)
    return keep, other


@numba.njit(nogil=True)
def _fill_alias_table(share: np.ndarray, keep: np.ndarray, other: np.ndarray) -> None:
    n = len(share)
    stack = np.empty(n, dtype=np.int32)  # the poor (share < 1) from the left, the rich from the right
    n_poor, n_rich = 0, 0
    for i in range(n):
        if share[i] < 1:
            stack[n_poor] = i
            n_poor += 1
        else:
            n_rich += 1
            stack[n - n_rich] = i
    while n_poor and n_rich:
        n_poor -= 1
        poor, rich = stack[n_poor], stack[n - n_rich]
        keep[poor] = np.uint32(share[poor] * 4294967295.0)
        other[poor] = rich
        share[rich] -= 1 - share[poor]
        if share[rich] < 1:
            n_rich -= 1
            stack[n_poor] = rich
            n_poor += 1
    for i in range(n_poor):
        keep[stack[i]], other[stack[i]] = np.uint32(0xFFFFFFFF), stack[i]
    for i in range(n - n_rich, n):
        keep[stack[i]], other[stack[i]] = np.uint32(0xFFFFFFFF), stack[i]


@numba.njit(nogil=True)
def _mix(z: int) -> int:
    """Splitmix64's output function (Steele, Lea and Flood, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(nogil=True)
def _draw_cells(
    key: int,
    first_cell: int,
    types: np.ndarray,
    depths: np.ndarray,
    keep: np.ndarray,
    other: np.ndarray,
    indices: np.ndarray,
    data: np.ndarray,
    total: np.ndarray,
) -> None:
    """Fill `indices` and `data` with the rows of the chunk; both have room for one element more."""
    n_genes = keep.shape[1]
    counts = np.zeros(n_genes, dtype=np.int32)
    low = np.uint64(0xFFFFFFFF)
    end = 0
    for cell in range(len(depths)):
        keep_of, other_of = keep[types[cell]], other[types[cell]]
        state = _mix(np.uint64(key) ^ _mix(np.uint64(first_cell + cell + 1)))
        seen, molecules = 0, 0
        while seen < depths[cell]:
            state += np.uint64(0x9E3779B97F4A7C15)
            bits = _mix(state)
            gene = np.int64(((bits >> np.uint64(32)) * np.uint64(n_genes)) >> np.uint64(32))
            if (bits & low) > keep_of[gene]:
                gene = np.int64(other_of[gene])
            seen += counts[gene] == 0
            counts[gene] += 1
            molecules += 1
        total[cell] = molecules
        for gene in range(n_genes):  # no branch: an unseen gene is overwritten by the next
            indices[end] = gene
            data[end] = counts[gene]
            end += counts[gene] > 0
            counts[gene] = 0


class _Chunk:
    """A run of cells: its part of X, and the molecules in each cell."""

    def __init__(
        self,
        rows: slice,
        types: np.ndarray,
        depths: np.ndarray,
        tables: tuple[np.ndarray, np.ndarray],
        seed: int,
        *,
        dense: bool,
    ) -> None:
        self.rows = rows
        self.total = np.empty(len(depths), dtype=np.float32)
        nnz = int(depths.sum())
        indices, data = np.empty(nnz + 1, dtype=np.int32), np.empty(nnz + 1, dtype=np.float32)
        key = np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0]
        _draw_cells(key, rows.start, types, depths, *tables, indices, data, self.total)
        self.indices, self.data = indices[:nnz], data[:nnz]
        if dense:
            self.dense = np.zeros((len(depths), tables[0].shape[1]), dtype=np.float32)
            self.dense[np.repeat(np.arange(len(depths)), depths), self.indices] = self.data


def _ahead(make: Any, items: Any) -> Iterator[Any]:
    """``map(make, items)`` on all cores, in order, with a few results ready ahead."""
    n_threads = os.cpu_count() or 1
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > n_threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Matrix:
    """X on disk: CSR or dense, growing by chunks."""

    def __init__(
        self,
        root: Any,
        shape: tuple[int, int],
        indptr: np.ndarray,
        *,
        dense: bool,
        filters: dict[str, Any],
    ) -> None:
        if dense:
            x = _create(root, "X", shape, np.float32, **filters)
            _mark(x, "array", "0.2.0")
            self.dense = _Appender(x)
            return
        self.dense = None
        x = root.create_group("X")
        x.attrs["shape"] = shape
        _mark(x, "csr_matrix", "0.1.0")
        nnz = (int(indptr[-1]),)
        if isinstance(root, h5py.File):
            filters = {**filters, "maxshape": (None,)}  # AnnData's sparse arrays can grow, so are chunked
        self.data = _Appender(_create(x, "data", nnz, np.float32, **filters))
        self.indices = _Appender(_create(x, "indices", nnz, np.int32, **filters))
        _create(x, "indptr", indptr.shape, indptr.dtype, **filters)[...] = indptr

    def append(self, chunk: _Chunk) -> None:
        if self.dense is not None:
            self.dense.append(chunk.dense)
        else:
            self.data.append(chunk.data)
            self.indices.append(chunk.indices)

    def close(self) -> None:
        for appender in [self.dense] if self.dense is not None else [self.data, self.indices]:
            appender.flush()


class _Appender:
    """Writes an array from its start on, only ever whole chunks (or shards), so none is written twice."""

    def __init__(self, array: Any) -> None:
        self.array = array
        unit = getattr(array, "shards", None) or array.chunks
        self.unit = 1 if unit is None else unit[0]
        self.written = 0
        self.waiting: list[np.ndarray] = []

    def append(self, part: np.ndarray) -> None:
        self.waiting.append(part)
        n_waiting = sum(map(len, self.waiting))
        if n_waiting >= self.unit:
            self._write(n_waiting - n_waiting % self.unit)

    def flush(self) -> None:
        self._write(sum(map(len, self.waiting)))

    def _write(self, n: int) -> None:
        if n == 0:
            return
        block = self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.array[self.written : self.written + n] = block[:n]
        self.written += n
        self.waiting = [block[n:]] if n < len(block) else []


def _create(group: Any, name: str, shape: tuple[int, ...], dtype: Any, **options: Any) -> Any:
    """Make an array with the layout AnnData would give it."""
    if isinstance(group, h5py.Group):
        return group.create_dataset(name, shape=shape, dtype=dtype, **options)
    if not anndata.settings.auto_shard_zarr_v3:
        return group.create_array(name, shape=shape, dtype=dtype)
    with zarr.config.set({"array.target_shard_size_bytes": 1_000_000_000}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Automatic shard shape inference", UserWarning)
        return group.create_array(name, shape=shape, dtype=dtype, shards="auto")


def _mark(element: Any, encoding: str, version: str) -> None:
    element.attrs["encoding-type"] = encoding
    element.attrs["encoding-version"] = version


def _write_obs(root: Any, columns: dict[str, Any], *, filters: dict[str, Any]) -> None:
    """Write the obs table, the names of the cells in pieces: as one array of strings they are large."""
    obs = root.create_group("obs")
    _mark(obs, "dataframe", "0.2.0")
    obs.attrs["_index"] = "_index"
    obs.attrs["column-order"] = list(columns)
    for name, column in columns.items():
        write_elem(obs, name, column, dataset_kwargs=filters)
    n_cells = len(next(iter(columns.values())))
    if isinstance(obs, h5py.Group):
        names = obs.create_dataset("_index", shape=(n_cells,), dtype=h5py.string_dtype(), **filters)
    else:
        names = obs.create_array("_index", shape=(n_cells,), dtype="str", chunks=(min(n_cells, 1 << 18),))
    _mark(names, "string-array", "0.2.0")
    for start in range(0, n_cells, 1 << 18):
        stop = min(start + (1 << 18), n_cells)
        names[start:stop] = np.array(_names("cell", n_cells, start, stop), dtype=object)


def _close(root: Any) -> None:
    if isinstance(root, h5py.File):
        root.close()
        return
    with warnings.catch_warnings():  # as AnnData does: one file with all metadata, not yet in the Zarr 3 text
        warnings.filterwarnings("ignore", ".*[Cc]onsolidated metadata", UserWarning)
        zarr.consolidate_metadata(root.store)


def _names(what: str, n: int, start: int = 0, stop: int | None = None) -> list[str]:
    width = len(str(n - 1))
    return [f"{what}_{i:0{width}}" for i in range(start, n if stop is None else stop)]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _: int) -> None:
        pass


def _bar(n_cells: int, path: Path, *, show: bool) -> Any:
    if show:
        try:
            from tqdm import tqdm
        except ImportError:
            print(f"writing {n_cells:,} cells to {path}", flush=True)
        else:
            return tqdm(total=n_cells, desc=f"writing {path.name}", unit=" cells", unit_scale=True)
    return _NoBar()


def main() -> None:
    """Read the command line and write the atlas."""
    parser = argparse.ArgumentParser(description="Write a synthetic single-cell atlas.")
    parser.add_argument("--cells", type=int, default=100_000, help="number of cells (default: 100,000)")
    parser.add_argument("--genes", type=int, default=20_000, help="number of genes (default: 20,000)")
    parser.add_argument("--out", type=Path, default=None, help="default: atlas.h5ad, or atlas.zarr with --zarr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compression", choices=["gzip", "lzf"], help="compress the h5ad's arrays")
    parser.add_argument("--dense", action="store_true", help="X as a dense array")
    parser.add_argument("--zarr", action="store_true", help="a Zarr v3 store with AnnData's defaults")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    args = parser.parse_args()
    out = args.out or Path("atlas.zarr" if args.zarr else "atlas.h5ad")
    if args.zarr and out.suffix != ".zarr":
        parser.error("with --zarr the name given to --out must end in .zarr")
    try:
        make_atlas(
            out,
            args.cells,
            args.genes,
            seed=args.seed,
            dense=args.dense,
            compression=args.compression,
            overwrite=args.overwrite,
            progress=True,
        )
    except (FileExistsError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

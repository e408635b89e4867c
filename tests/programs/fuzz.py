#!/usr/bin/env python
"""Damage small atlases at random and read them.

    python tests/programs/fuzz.py --seconds 60 --seed 0

Each read runs in a separate process and must end with values or a `DaskscError`, and never with a crash, a hang,
another exception or a column that does not exist. If a checksum covers the damaged bytes, the values must be
unchanged. The program prints the seeds of failing cases, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anndata
import h5py
import hdf5plugin
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

import dasksc
from dasksc.errors import DaskscError
from dasksc.storage import open_matrix

N_OBS, N_VARS, CHUNK = 60, 40, 64
TIMEOUT_S = 20

SAME, REFUSED, CHANGED, FOUND = 0, 1, 2, 3


def write_h5(path: Path, values: Any, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        if not sp.issparse(values):
            file.create_dataset("X", data=values, **({"chunks": (7, N_VARS)} | options if options else {}))
            return
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": values.shape})
        for name in ("data", "indices", "indptr"):
            array = getattr(values, name)
            chunks = {"chunks": (min(CHUNK, len(array)),)} | options if options else {}
            group.create_dataset(name, data=array, **chunks)


def write_zarr(path: Path, values: Any, *, zarr_format: int = 3, shards: bool = False, **options: Any) -> None:
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    parts = {"X": values}
    if sp.issparse(values):
        group = root.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": list(values.shape)})
        parts = {f"X/{name}": getattr(values, name) for name in ("data", "indices", "indptr")}
    for name, array in parts.items():
        chunks = (16, N_VARS) if array.ndim == 2 else (min(CHUNK, len(array)),)
        more = {"shards": (chunks[0] * 3, *chunks[1:])} if shards else {}
        root.create_array(name, shape=array.shape, chunks=chunks, dtype=array.dtype, **more, **options)[:] = array


def write_atlas(path: Path, values: Any, **options: Any) -> None:
    obs = pd.DataFrame({"type": pd.Categorical.from_codes(np.arange(N_OBS) % 3, list("abc")), "n": np.arange(N_OBS)})
    obs.index = [f"cell{i}" for i in range(N_OBS)]
    adata = anndata.AnnData(X=values, obs=obs, layers={"twice": values * 2})
    if path.suffix == ".h5ad":
        adata.write_h5ad(path, **options)
    else:
        adata.write_zarr(path)


# Writers of atlases and matrices, and whether every chunk carries a checksum.
LAYOUTS: dict[str, tuple[Callable[[Path, Any], None], bool]] = {
    "h5 contiguous": (write_h5, False),
    "h5 chunked": (partial(write_h5, track_times=False), False),
    "h5 gzip": (partial(write_h5, compression="gzip"), True),
    "h5 gzip shuffle": (partial(write_h5, compression="gzip", shuffle=True), True),
    "h5 fletcher32": (partial(write_h5, fletcher32=True), True),
    "h5 lzf": (partial(write_h5, compression="lzf"), False),
    "h5 zstd": (partial(write_h5, **hdf5plugin.Zstd()), False),
    "h5 blosc": (partial(write_h5, **hdf5plugin.Blosc()), False),
    "h5 lz4": (partial(write_h5, **hdf5plugin.LZ4()), False),
    "zarr3 gzip": (partial(write_zarr, compressors=GzipCodec()), True),
    "zarr3 zstd": (partial(write_zarr, compressors=ZstdCodec()), False),
    "zarr3 zstd checksum": (partial(write_zarr, compressors=ZstdCodec(checksum=True)), True),
    "zarr3 blosc": (partial(write_zarr, compressors=BloscCodec(cname="lz4")), False),
    "zarr3 blosc crc32c": (partial(write_zarr, compressors=[BloscCodec(cname="zstd"), Crc32cCodec()]), True),
    "zarr3 sharded blosc": (partial(write_zarr, shards=True, compressors=BloscCodec(cname="lz4")), False),
    "zarr3 sharded plain": (partial(write_zarr, shards=True, compressors=None), False),
    "zarr2 blosc": (partial(write_zarr, zarr_format=2), False),
    "zarr2 plain": (partial(write_zarr, zarr_format=2, compressors=None), False),
    "h5 atlas": (write_atlas, False),
    "h5 atlas gzip": (partial(write_atlas, compression="gzip"), False),
    "zarr atlas": (write_atlas, False),
}


def matrix(kind: str) -> Any:
    values = sp.random(N_OBS, N_VARS, density=0.3, format="csr", dtype=np.float32, random_state=0)
    values.data = np.ceil(values.data * 9).astype(np.float32)
    return values if kind == "csr" else values.toarray()


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def chunk_ranges(path: Path) -> list[tuple[Path, int, int]]:
    """Return the byte ranges of chunks in an HDF5 file or an unsharded store; checksums, if any, cover these ranges."""
    if path.is_dir():
        return [(file, 0, file.stat().st_size) for file in files_of(path) if "/c/" in file.as_posix()]
    ranges: list[tuple[Path, int, int]] = []
    with h5py.File(path) as file:

        def note(_: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.chunks:
                item.id.chunk_iter(lambda chunk: ranges.append((path, chunk.byte_offset, chunk.size)))

        file.visititems(note)
    return ranges


def damage(path: Path, rng: random.Random, where: tuple[Path, int, int]) -> None:
    """Change some bytes within a range of a file, or truncate the file there."""
    file, offset, size = where
    data = bytearray(file.read_bytes())
    if not size:
        return
    kind = rng.choice(["flip", "flip", "flips", "zero", "random", "swap", "cut"])
    at = offset + rng.randrange(size)
    length = min(rng.choice([1, 4, 16, 200]), offset + size - at)
    match kind:
        case "flip":
            data[at] ^= 1 << rng.randrange(8)
        case "flips":
            for _ in range(rng.randrange(2, 20)):
                data[offset + rng.randrange(size)] = rng.randrange(256)
        case "zero":
            data[at : at + length] = bytes(length)
        case "random":
            data[at : at + length] = rng.randbytes(length)
        case "swap":
            other = offset + rng.randrange(size - length + 1)
            data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
        case "cut":
            del data[at:]
    file.write_bytes(data)


def read(path: Path, expected: Any, *, use_mmap: bool) -> int:
    """Read all rows in every way; return SAME if the values are unchanged, else CHANGED."""
    found = open_matrix(path, "X", use_mmap=use_mmap)
    n_obs, n_vars = found.shape
    if n_obs > 10_000 or n_vars > 10_000:  # the stored shape is damaged, so there is nothing to compare
        found.fetch(np.array([0, n_obs - 1]))
        return CHANGED
    rows = np.arange(n_obs)
    fetched = found.fetch(rows)
    out = np.full((n_obs, n_vars), 99, dtype=np.float32)
    fetched.gather(rows, out=out)
    indptr, indices, data = fetched.gather_csr(rows)
    assert indptr[0] == 0, "indptr"
    assert (np.diff(indptr) >= 0).all(), "indptr"
    assert indptr[-1] == len(indices) == len(data), "lengths"
    assert not len(indices) or 0 <= indices.min() <= indices.max() < n_vars, "columns"
    some = found.fetch(rows[::7])
    part = np.empty((len(rows[::7]), n_vars), dtype=np.float32)
    some.gather(np.arange(len(part)), out=part)
    np.testing.assert_array_equal(part, out[::7])
    return SAME if out.shape == expected.shape and np.array_equal(out, expected) else CHANGED


def read_atlas(path: Path, expected: Any, *, use_mmap: bool) -> int:
    """Open a whole atlas and read an epoch; return SAME if the values are unchanged, else CHANGED."""
    adata = dasksc.open(path, mmap=use_mmap)
    dataset = dasksc.scDataset(
        adata, dasksc.BlockShuffling(4), 8, 2, obs=["type", "n"], layers=["twice"], scheduler="synchronous", seed=0
    )
    if dataset.plan().n_rows > 10_000 or adata.n_vars > 10_000:
        return CHANGED
    out = np.full((adata.n_obs, adata.n_vars), 99, dtype=np.float32)
    types, numbers = np.full((2, adata.n_obs), -9)
    for batch in dataset:
        assert batch.X.shape == batch.layers["twice"].shape, "shapes"
        out[batch.index] = batch.X
        types[batch.index], numbers[batch.index] = batch.obs["type"], batch.obs["n"]
    same = out.shape == expected.shape and np.array_equal(out, expected)
    same = same and np.array_equal(types, np.arange(N_OBS) % 3) and np.array_equal(numbers, np.arange(N_OBS))
    return SAME if same else CHANGED


def in_a_process(work: Callable[[], int]) -> tuple[int, str]:
    """Run `work` in a forked child process; return its result, or FOUND and the failure."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(TIMEOUT_S)
        code, failure = FOUND, ""
        try:
            code = work()
        except DaskscError:
            code = REFUSED
        except BaseException:
            failure = traceback.format_exc()
        os.write(writer, failure.encode()[-4000:])
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        failure = pipe.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return FOUND, "it hung" if number == signal.SIGALRM else f"killed by {signal.Signals(number).name}"
    return os.WEXITSTATUS(status), failure


def h5py_fails_too(path: Path) -> bool:
    """Return True if HDF5 itself crashes or hangs on a file, so that no program can open it."""

    def work() -> int:
        try:
            with h5py.File(path) as file:
                found: list[h5py.Dataset] = []
                file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
                for dataset in found:
                    dataset.id.get_create_plist()
                    dataset[:10]
                    if dataset.chunks:
                        dataset.id.chunk_iter(lambda chunk: None)
        except Exception:
            return SAME
        return SAME

    return in_a_process(work)[0] == FOUND


def cases(folder: Path, first: int) -> Iterator[tuple[int, str, Counter[str], str]]:
    """Yield seed, layout, outcome and finding of an unlimited number of cases."""
    originals, expected = {}, matrix("dense")
    for name, (write, is_checked) in LAYOUTS.items():
        for kind in ("csr", "dense"):
            path = folder / f"{name} {kind}{'.h5ad' if name.startswith('h5') else '.zarr'}"
            write(path, matrix(kind))
            reader = read_atlas if "atlas" in name else read
            assert reader(path, expected, use_mmap=True) == SAME, path  # also compiles
            originals[path] = (reader, is_checked, chunk_ranges(path))
    for seed in range(first, sys.maxsize):
        rng = random.Random(seed)
        path = rng.choice(sorted(originals))
        reader, is_checked, ranges = originals[path]
        copy = folder / f"damaged{path.suffix}"
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
        covered = bool(ranges) and rng.random() < 0.5
        if covered:
            file, offset, size = rng.choice(ranges)
            damage(copy, rng, (copy / file.relative_to(path) if path.is_dir() else copy, offset, size))
        else:
            file = rng.choice(files_of(copy))
            damage(copy, rng, (file, 0, file.stat().st_size))
        use_mmap = rng.random() < 0.5
        code, finding = in_a_process(lambda: reader(copy, expected, use_mmap=use_mmap))  # noqa: B023
        if code == CHANGED and covered and is_checked:
            code, finding = FOUND, "other values, past a checksum"
        ended = ("same", "refused", "changed", "found")[code]
        if code == FOUND and not covered and copy.is_file() and h5py_fails_too(copy):
            ended, finding = "HDF5 itself fails", ""
        yield seed, path.name, Counter([ended]), finding
        (shutil.rmtree if copy.is_dir() else Path.unlink)(copy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the first case")
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    options = parser.parse_args()
    stop = time.monotonic() + options.seconds
    ended: Counter[str] = Counter()
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for n, (seed, name, how, finding) in enumerate(cases(Path(folder), options.seed), 1):
            ended += how
            if finding:
                found.append(f"--- seed {seed}, {name}\n{finding}")
            if n >= options.cases or time.monotonic() > stop:
                break
    print("\n".join(found[:20]))
    print(f"{ended.total()} cases: {', '.join(f'{n} {how}' for how, n in ended.most_common())}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

"""The folder beside a target in which it grows: locked, resumable, and gone when the target is there.

`OUT.zarr.partial` holds what was asked for (``plan.json``), what is known of the input (``order.npy``, ``scan``),
the input sorted roughly where its rows cannot be read one by one (``stage``), and the store (``store``). Every file
appears there under its name by one renaming, complete; so after a kill at any moment what is there counts, and the
rest is made. Metadata of the store's root come last: until then nothing opens it. One renaming makes it the target.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from dask.utils import format_bytes
from numpy.typing import DTypeLike, NDArray

from dasksc.errors import InputError, StorageError
from dasksc.platforms import lock_file

__all__ = ["Workplace", "appearing", "array_appearing", "mapped_array"]

_ZEROS_BYTES = 2**20
# Headers of .npy files are parsed by Python's own parser, which in Python 3.11 fails now and then (SystemError: AST
# constructor recursion depth mismatch) where several threads use it at once.
_parsing = threading.Lock()


class Workplace:
    """Where a target grows.

    Parameters
    ----------
    target
        The directory that is to appear.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.with_name(target.name + ".partial")
        self.store = self.folder / "store"
        self._replaced = self.folder / "replaced"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from working on the same target.

        The lock goes with the process, however that ends.

        Raises
        ------
        StorageError
            If another process works on it.
        """
        lock = self._lock()
        try:
            yield
        finally:
            # Where nothing was begun, nothing stays behind.
            if self.folder.exists() and os.listdir(self.folder) == ["lock"]:
                self.remove()
            lock.close()

    def _lock(self) -> IO[str]:
        path = self.folder / "lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = path.open("a+")
            except FileNotFoundError:  # the folder went away: another process is done with it
                continue
            try:
                lock_file(lock, wait=False)
            except BlockingIOError as error:
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                lock.close()
                raise StorageError(
                    f"{self.target} is being written by {owner}. Wait for it, or give another target."
                ) from error
            # Whoever had it may have removed it between the opening and the locking.
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {platform.node()}\n")
                lock.flush()
                return lock
            lock.close()

    def begin(self, plan: dict[str, Any], *, overwrite: bool) -> bool:
        """Prepare for a plan; return False if all that was left of it to do was done in here.

        Raises
        ------
        InputError
            If the target exists, or what was begun for it followed another plan, and `overwrite` is False.
        """
        begun = self._begun()
        published = begun is not None and begun.pop("published", False) and not self.store.exists()
        if published and begun == plan and self.target.exists() and not overwrite:
            # Killed between the renaming and the removal.
            self.remove()
            return False
        if published:
            begun = None
        if self._is_taken():
            if not overwrite:
                raise InputError(f"{self.target} exists. Give another target, or overwrite=True (--overwrite).")
            if not self._may_be_replaced():
                raise InputError(f"{self.target} is no Zarr store, and is not overwritten. Give another target.")
        if begun is not None and begun != plan and not overwrite:
            differing = [name for name in sorted({*plan, *begun}) if plan.get(name) != begun.get(name)]
            raise InputError(
                f"{self.folder} holds an unfinished conversion that differs from this one in "
                f"{', '.join(differing)}. Finish that with the arguments it was begun with, or give "
                "overwrite=True (--overwrite) to begin anew."
            )
        if begun != plan:
            self.clear()
            self._write_plan(plan)
        return True

    def _is_taken(self) -> bool:
        # A link that leads nowhere is in the way, too.
        return os.path.lexists(self.target)

    def _may_be_replaced(self) -> bool:
        return any((self.target / marker).exists() for marker in ("zarr.json", ".zgroup"))

    def _begun(self) -> dict[str, Any] | None:
        try:
            begun: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        except FileNotFoundError:
            return None
        return begun

    def _write_plan(self, plan: dict[str, Any]) -> None:
        with appearing(self.folder / "plan.json") as path:
            path.write_text(json.dumps(plan, indent=1))

    def clear(self) -> None:
        """Remove all that was made: the next conversion begins anew."""
        # First the plan: what is left of a clearing that is cut short belongs to no plan.
        (self.folder / "plan.json").unlink(missing_ok=True)
        self._remove_all_but("lock")

    def _remove_all_but(self, *kept: str) -> None:
        for entry in self.folder.iterdir():
            if entry.name not in kept:
                _discard(entry)

    def publish(self, *, overwrite: bool) -> None:
        """Make the store the target, in one step where there was none, and remove the rest.

        Raises
        ------
        InputError
            If something else has appeared at the target that is not to be replaced; what is done is kept.
        """
        if self._is_taken() and not (overwrite and self._may_be_replaced()):
            raise InputError(
                f"{self.target} appeared while it was being written, and is not replaced. What was written is kept in "
                f"{self.folder}. Move away what has appeared and run the same again"
                + (", or give overwrite=True (--overwrite)." if not overwrite else ".")
            )
        # Left by tasks that were killed.
        for leftover in self.store.rglob(".*.partial"):
            leftover.unlink()
        begun = self._begun() or {}
        self._write_plan(begun | {"published": True})
        if self._is_taken():
            _discard(self._replaced)
            os.rename(self.target, self._replaced)
        os.rename(self.store, self.target)
        _sync_folder(self.target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the folder; last what says that all is done, then the lock."""
        self._remove_all_but("plan.json", "lock")
        self._remove_all_but("lock")
        (self.folder / "lock").unlink()
        self.folder.rmdir()

    def no_space(self, error: OSError, *, needed_bytes: int) -> StorageError:
        """Return what to say when the disk is full."""
        free = shutil.disk_usage(self.target.parent).free
        return StorageError(
            errno.ENOSPC,
            f"no space is left for {self.target}: about {format_bytes(needed_bytes)} more will be needed, "
            f"{format_bytes(free)} are free there ({error}). The input is untouched, and what has been written is "
            f"kept in {self.folder}: make room and run the same again to go on, or remove that folder.",
        )


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Give a path to write to; what is there afterwards appears at `path`, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def mapped_array(path: Path, *, mode: Literal["r", "r+"] = "r") -> np.memmap[Any, Any]:
    """Map the array in a ``.npy`` file; any number of threads may do so at once."""
    with _parsing:
        array: np.memmap[Any, Any] = np.load(path, mmap_mode=mode)
    return array


@contextmanager
def array_appearing(path: Path, dtype: DTypeLike, n: int) -> Iterator[NDArray[Any]]:
    """Give a mapped array to fill, shape (n,); as a ``.npy`` file it appears at `path`, in one step.

    Raises
    ------
    OSError
        If the disk has no room for it, before anything is mapped: a page of a map for which there is none ends the
        process by a signal.
    """
    dtype = np.dtype(dtype)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
    with appearing(path) as partial:
        with partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            _extend(file, n * dtype.itemsize)
        out = mapped_array(partial, mode="r+")
        yield out
        out.flush()


def _extend(file: IO[bytes], n_bytes: int) -> None:
    """Extend a file by zeros for which the file system sets space aside."""
    start = file.tell()
    file.flush()
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, start + n_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    # Where there is no such call (macOS), or the file system does not know it, zeros are written.
    for at in range(0, n_bytes, _ZEROS_BYTES):
        file.write(bytes(min(_ZEROS_BYTES, n_bytes - at)))


def _discard(path: Path) -> None:
    """Remove what is at a path; of a link, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # which opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

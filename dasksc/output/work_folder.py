"""Work folder next to a target: locked, resumable, and removed once the target is complete.

Every file has a temporary name until it is complete. If the process is killed at any time, existing files therefore
remain valid, and a later run writes only the missing ones.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import anndata
import numpy as np
from dask.utils import format_bytes
from numpy.typing import DTypeLike, NDArray

from dasksc.errors import DaskscError, InputError, StorageError


@contextmanager
def as_anndata_writes() -> Iterator[None]:
    """Suppress the warnings that libraries raise per element, and allow AnnData to write nullable strings."""
    settings = anndata.settings
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Unless the setting has an explicit value, AnnData warns, once per array, that its default will change.
        stack.enter_context(settings.override(auto_shard_zarr_v3=bool(settings.auto_shard_zarr_v3)))
        if hasattr(settings, "allow_write_nullable_strings"):
            stack.enter_context(settings.override(allow_write_nullable_strings=True))
        yield


def is_node(path: Path) -> bool:
    """Return True if a folder is a Zarr group or array."""
    return any((path / marker).exists() for marker in ("zarr.json", ".zgroup", ".zarray"))


_ZEROS_BYTES = 2**20
# NumPy parses the headers of .npy files with Python's parser, which in Python 3.11 occasionally fails if several
# threads use it at once (SystemError: AST constructor recursion depth mismatch).
_parsing = threading.Lock()


class WorkFolder:
    """Folder of unfinished work at a target, with a lock and the plan; `what` names the work in error messages."""

    def __init__(self, target: Path, folder: Path, *, what: str) -> None:
        self.target = target
        self.folder = folder
        self._what = what

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Lock the target until this process ends; if another one has it, `wait` for it or raise `StorageError`."""
        lock = self._lock(wait=wait)
        try:
            yield
        finally:
            # Remove the folder if it holds no work.
            if self.folder.exists() and os.listdir(self.folder) == ["lock"]:
                self.remove()
            lock.close()

    def _lock(self, *, wait: bool) -> IO[str]:
        path = self.folder / "lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = path.open("a+")
            except FileNotFoundError:  # another process has finished and removed the folder
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                lock.seek(0)
                owner = lock.read().strip() or "another process"
                lock.close()
                raise StorageError(
                    f"{self.target} is being written by {owner}. Wait for it, or give another target."
                ) from error
            # The previous owner may have removed the file between opening and locking.
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {platform.node()}\n")
                lock.flush()
                return lock
            lock.close()

    def read_plan(self) -> dict[str, Any] | None:
        """Return the plan of the work in the folder, or None if it is missing or unreadable."""
        try:
            begun: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        except (FileNotFoundError, ValueError):  # a file may be empty after a power failure
            return None
        return begun

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write the plan of the work to the folder, atomically."""
        with atomic_path(self.folder / "plan.json") as path:
            path.write_text(json.dumps(plan, indent=1))

    def clear(self) -> None:
        """Remove all results, so that the work starts from the beginning."""
        # The plan is removed first, so that files left by an interrupted removal belong to no plan.
        (self.folder / "plan.json").unlink(missing_ok=True)
        self._remove_all_but("lock")

    def _remove_all_but(self, *kept: str) -> None:
        for entry in self.folder.iterdir():
            if entry.name not in kept:
                discard(entry)

    def other_plan_error(self, begun: dict[str, Any], plan: dict[str, Any]) -> InputError:
        """Return the error to raise when the folder holds work with another plan."""
        names = [name for name in sorted({*plan, *begun}) if plan.get(name) != begun.get(name)]
        return InputError(
            f"{self.folder} holds an unfinished {self._what} that differs from this one in {', '.join(names)}. Run "
            f"that {self._what} again with its arguments to finish it, or give overwrite=True (--overwrite) to start "
            "over."
        )

    def remove(self) -> None:
        """Remove the folder: first the results, then the plan, and finally the lock."""
        # If the removal is interrupted, the plan still records whether the results were published.
        self._remove_all_but("plan.json", "lock")
        self._remove_all_but("lock")
        (self.folder / "lock").unlink()
        self.folder.rmdir()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn errors of the operating system into errors that say what to do."""
        try:
            yield
        except DaskscError:
            raise
        except OSError as error:
            # Libraries may wrap the error of the operating system and lose its errno.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) and "No space left" not in str(error):
                raise StorageError(f"{self.target} cannot be written: {error}") from error
            free = format_bytes(shutil.disk_usage(self.target.parent).free)
            raise StorageError(
                errno.ENOSPC,
                f"no space is left for {self.target}: {free} are free ({error}). The input is unchanged. Free some "
                f"space and run the same {self._what} again to resume it, from {self.folder} if that exists.",
            ) from error


class StoreWorkFolder(WorkFolder):
    """Work folder of a store that is written as a whole, and becomes the target by a final rename."""

    def __init__(self, target: Path) -> None:
        super().__init__(target, target.with_name(target.name + ".partial"), what="conversion")
        self.store = self.folder / "store"

    def begin(self, plan: dict[str, Any], *, overwrite: bool) -> bool:
        """Prepare the folder for work with a plan; return False if the target is already complete."""
        begun = self.read_plan()
        published = begun is not None and begun.pop("published", False) and not self.store.exists()
        if published and begun == plan and self.target.exists() and not overwrite:
            # The process was killed between the final rename and the removal of the folder.
            self.remove()
            return False
        if published:
            begun = None
        if os.path.lexists(self.target):  # True for a dangling link, too
            if not overwrite:
                raise InputError(f"{self.target} exists. Give another target, or overwrite=True (--overwrite).")
            if not is_node(self.target):
                raise InputError(f"{self.target} is not a Zarr store, so it is not overwritten. Give another target.")
        if begun is not None and begun != plan and not overwrite:
            raise self.other_plan_error(begun, plan)
        if begun != plan:
            self.clear()
            self.write_plan(plan)
        return True

    def publish(self, *, overwrite: bool) -> None:
        """Rename the store to the target (atomic if it replaces none), and remove the work folder."""
        if os.path.lexists(self.target) and not (overwrite and is_node(self.target)):
            raise InputError(
                f"{self.target} was created by another process during the conversion, so it is not replaced. The "
                f"written data are kept in {self.folder}. Move {self.target} away and run the same conversion again."
            )
        remove_leftovers(self.store)
        begun = self.read_plan() or {}
        self.write_plan(begun | {"published": True})
        if os.path.lexists(self.target):
            discard(self.folder / "replaced")
            os.rename(self.target, self.folder / "replaced")
        os.rename(self.store, self.target)
        self.remove()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; then rename it to `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        discard(partial)


def mapped_array(path: Path, *, mode: Literal["r", "r+"] = "r") -> np.memmap[Any, Any]:
    """Memory-map the array in a ``.npy`` file; safe for concurrent calls from threads."""
    with _parsing:
        array: np.memmap[Any, Any] = np.load(path, mmap_mode=mode)
    return array


@contextmanager
def atomic_array(path: Path, dtype: DTypeLike, n: int) -> Iterator[NDArray[Any]]:
    """Yield a memory-mapped array to fill, shape (n,); then save it as the ``.npy`` file `path`, atomically."""
    dtype = np.dtype(dtype)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (n,)}
    with atomic_path(path) as partial:
        with partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            # Writing to a mapped page without disk space would kill the process, so zeros reserve it.
            for at in range(0, n * dtype.itemsize, _ZEROS_BYTES):
                file.write(bytes(min(_ZEROS_BYTES, n * dtype.itemsize - at)))
        out = mapped_array(partial, mode="r+")
        yield out
        out.flush()


def remove_leftovers(store: Path) -> None:
    """Remove what killed processes leave in a store: files of `atomic_path`, and ``zarr.*.partial`` of Zarr."""
    for leftover in list(store.rglob("*.partial")):
        if leftover.is_file():  # a folder is an element with such a name
            leftover.unlink()


def discard(path: Path) -> None:
    """Remove a file, directory or symbolic link, but not the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(file: IO[bytes]) -> None:
    """Flush a file to the disk, so that its name never refers to incomplete contents after a power loss."""
    file.flush()
    os.fsync(file.fileno())

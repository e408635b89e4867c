"""Emulate a system without some Linux functions: ``other_system.py SYSTEM FOLDER ATLAS...``.

SYSTEM is a key of `LACKING`. The program imports every module twice, before and after it removes the functions that the
system lacks, and reads and converts the atlases both times. Libraries are imported only before the removal.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
import pkgutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

LACKING: dict[str, list[tuple[Any, list[str]]]] = {
    "macos": [
        (os, ["sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "O_DIRECT", "RWF_NOWAIT"]),
        (os, ["copy_file_range", "memfd_create", "fdatasync"]),
    ],
}
LACKING["windows"] = [
    *LACKING["macos"],
    (os, ["fork", "register_at_fork", "uname", "getuid", "geteuid", "getgid", "fchmod", "killpg", "getpgid"]),
    (os, ["pread", "preadv", "pwrite", "pwritev", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"]),
    (mmap, ["PROT_READ", "PROT_WRITE", "MAP_SHARED", "MAP_PRIVATE", "MADV_DONTNEED", "MADV_WILLNEED", "MADV_RANDOM"]),
    (signal, ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT"]),
]


def modules() -> dict[str, types.ModuleType]:
    """Import every module of dasksc whose dependencies are installed."""
    package = importlib.import_module("dasksc")
    found = {"dasksc": package}
    for module in pkgutil.walk_packages(package.__path__, "dasksc."):
        try:
            found[module.name] = importlib.import_module(module.name)
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] in ("dasksc", "fcntl", "resource", "msvcrt"):
                raise
    return found


def become(system: str) -> None:
    """Remove the functions that another system lacks."""
    for owner, names in LACKING[system]:
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)
    if system == "windows":
        sys.modules["fcntl"] = sys.modules["resource"] = None  # type: ignore[assignment]
        sys.modules["msvcrt"] = msvcrt()
        ctypes.CDLL = no_libc  # type: ignore[assignment,misc]


def msvcrt() -> Any:
    """Emulate the file locks of Windows, which cover a range of bytes from the file position."""
    module: Any = types.ModuleType("msvcrt")
    module.LK_LOCK, module.LK_NBLCK = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB

    def locking(number: int, mode: int, n_bytes: int) -> None:
        assert os.lseek(number, 0, os.SEEK_CUR) > os.fstat(number).st_size
        fcntl.lockf(number, mode, n_bytes, os.lseek(number, 0, os.SEEK_CUR))

    module.locking = locking
    return module


def no_libc(name: str | None, *_: Any, **__: Any) -> Any:
    """Raise the errors of Windows on loading a library."""
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")
    raise OSError(f"no library {name}")


def values(atlas: str, folder: Path, *, target: str) -> list[np.ndarray]:
    """Read an epoch of an atlas with and without memory mapping, and after conversion."""
    dasksc = importlib.import_module("dasksc")
    read = [dasksc.open(atlas, mmap=mapped).X.compute().toarray() for mapped in (True, False)]
    dataset = dasksc.scDataset(atlas, dasksc.BlockShuffling(8), batch_size=16, seed=0)
    read.extend(np.concatenate([batch.numpy() for batch in dataset]) for _ in range(2))
    dasksc.convert(atlas, folder / target, progress=False)
    read.append(dasksc.open(folder / target).X.compute().toarray())
    return read


def main(system: str, folder: str, *atlases: str) -> None:
    """Compare the results on this system with those on the emulated one; print the number of modules."""
    first = modules()
    here = [values(atlas, Path(folder), target=f"here{i}.zarr") for i, atlas in enumerate(atlases)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "dasksc"]:
        del sys.modules[name]
    become(system)
    second = modules()
    assert [*first] == [*second]
    assert all(first[name] is not second[name] for name in first)
    there = [values(atlas, Path(folder), target=f"there{i}.zarr") for i, atlas in enumerate(atlases)]
    for one, other in zip(here, there, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    print(len(second), "modules")


if __name__ == "__main__":
    main(*sys.argv[1:])

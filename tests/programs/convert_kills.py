"""Convert an atlas repeatedly and send SIGKILL during the conversion: ``convert_kills.py IN FOLDER how N``.

With ``steps``, conversions are killed at N of their file system steps, and each is run once more. With ``moments``,
N conversions are killed at random moments, and each resumes from the files of the previous one. Completed stores
remain in FOLDER. Children are forked before any thread starts.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import dasksc
from dasksc.conversion import converting, scanning, tables, writing
from dasksc.conversion.contents import matrices_of
from dasksc.output import shards
from dasksc.output import work_folder as workplace


def in_child(work: Callable[[], Any]) -> int:
    """Start `work` in a child process; return its process ID."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def finished(pid: int) -> bool:
    """Wait for a child process; return True if it finished, False if it was killed."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("a conversion failed")
    return True


def convert(source: str, target: Path) -> None:
    """Convert in many small tasks, by way of sorted runs of rows in intermediate files."""
    with (
        mock.patch.object(writing, "_CHUNK_VALUES", 512),
        mock.patch.object(converting, "_SCAN_ROWS", 64),
        mock.patch.object(shards, "sync"),
    ):
        dasksc.convert(source, target, memory_limit="200kB", verify=True)


def counting(work: Callable[[], Any], report: Callable[[int], Any]) -> Callable[[], None]:
    """Do `work` and report the number of its file system steps."""

    def run() -> None:
        steps = watch(lambda taken: None, lambda taken: None)
        work()
        report(next(steps) - 1)

    return run


def killed_at(step: int, work: Callable[[], Any]) -> Callable[[], None]:
    """Do `work` until file system step `step`; kill it just before or just after that step."""

    def kill(taken: int) -> None:
        if taken == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        watch(kill if step % 2 else lambda taken: None, kill)
        work()

    return run


def watch(before: Callable[[int], None], after: Callable[[int], None]) -> Iterator[int]:
    """Call back before and after every file system step of a conversion; return the step numbers."""
    numbers = itertools.count(1)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            taken = next(numbers)
            before(taken)
            result = function(*args, **kwargs)
            after(taken)
            return result

        return call

    for module in (workplace, shards, tables, converting):
        for owner, name in ((os, "replace"), (os, "rename"), (shutil, "rmtree")):
            if getattr(module, owner.__name__, None) is owner:
                proxy = SimpleNamespace(**vars(owner))
                setattr(proxy, name, watched(getattr(proxy, name)))
                # Only the steps of the conversion itself count, not those inside Zarr.
                setattr(module, owner.__name__, proxy)
    return numbers


def warm(source: str) -> None:
    """Load compiled kernels before any fork, without starting a thread."""
    matrix = matrices_of(dasksc.open(source))["X"]
    rows = np.arange(10)
    fetched = matrix.fetch(rows)
    scanning.described(scanning.gather(fetched, rows, matrix.stored_dtype))
    fetched.gather_csr(rows, dtype=np.dtype(np.uint16))


def at_steps(source: str, folder: Path, n_kills: int) -> int:
    """Kill conversions at their last steps, which rename files to their final names, and at some earlier steps."""
    counted = folder / "counted"
    assert finished(
        in_child(counting(lambda: convert(source, folder / "0.zarr"), lambda n: counted.write_text(str(n))))
    )
    n_steps = int(counted.read_text())
    last = range(n_steps - n_kills // 3, n_steps + 1)
    steps = [*sorted(random.Random(0).sample(range(1, last.start), n_kills - len(last))), *last]
    for step in steps:
        target = folder / f"{step}.zarr"
        assert not finished(in_child(killed_at(step, lambda target=target: convert(source, target))))
        if target.exists() and not (target / "zarr.json").exists():
            raise SystemExit(f"half a store after step {step}")
        # A conversion killed after the last step is complete.
        if not is_done(target):
            assert finished(in_child(lambda target=target: convert(source, target)))
    return len(steps)


def at_moments(source: str, folder: Path, n_kills: int) -> int:
    """Kill conversions at random moments; each resumes from the files of the previous one."""
    rng = random.Random(0)
    begun = time.perf_counter()
    assert finished(in_child(lambda: convert(source, folder / "timed.zarr")))
    whole_s = time.perf_counter() - begun
    killed = number = 0
    while killed < n_kills:
        target = folder / f"{number}.zarr"
        pid = in_child(lambda target=target: convert(source, target))
        time.sleep(rng.uniform(0, whole_s))
        os.kill(pid, signal.SIGKILL)
        # A conversion killed after its last step counts as finished.
        if finished(pid) or is_done(target):
            number += 1
        else:
            killed += 1
    target = folder / f"{number}.zarr"
    if partial(target).exists() and not is_done(target):
        assert finished(in_child(lambda: convert(source, target)))
    return killed


def is_done(target: Path) -> bool:
    """Return True if a target exists and its conversion left no plan to resume."""
    return target.exists() and not (partial(target) / "plan.json").exists()


def partial(target: Path) -> Path:
    """Return the path of an unfinished target."""
    return target.with_name(target.name + ".partial")


if __name__ == "__main__":
    source, folder, how, n_kills = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    warm(source)
    n = at_steps(source, folder, n_kills) if how == "steps" else at_moments(source, folder, n_kills)
    print(json.dumps({"n_kills": n}))

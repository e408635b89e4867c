"""Convert an atlas again and again, killed by SIGKILL on the way: ``convert_kills.py IN FOLDER how``.

With ``steps``, a conversion is killed at its first step in the file system, then at its second, ... and each is run once more.
With a number, so many conversions are killed at random moments, each going on with what the one before left.
Every store that gets done is left in FOLDER. Children are forked before any thread is started.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import dasksc
from dasksc import conversion
from dasksc.conversion import writing

STEPS = [(os, "replace"), (os, "rename"), (shutil, "rmtree"), (Path, "write_text")]


def in_child(work: Callable[[], Any]) -> int:
    """Start `work` in a child; return its process id."""
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
    """Wait for a child; return whether it got done, False if it was killed."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("a conversion failed")
    return True


def convert(source: str, target: Path) -> None:
    """Convert in many small tasks, by way of runs."""
    with (
        mock.patch.object(writing, "_CHUNK_VALUES", 512),
        mock.patch.object(conversion, "_SCAN_ROWS", 64),
    ):
        dasksc.convert(source, target, memory_limit="200kB", verify=True)


def killed_at(step: int, work: Callable[[], Any]) -> Callable[[], None]:
    """Do `work` until it takes step `step` in the file system: killed just before that, or just after."""
    taken = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            taken += 1
            is_last = taken == step
            if is_last and step % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def run() -> None:
        for owner, name in STEPS:
            setattr(owner, name, counted(getattr(owner, name)))
        work()

    return run


def at_steps(source: str, folder: Path) -> int:
    step = 0
    while True:
        step += 1
        target = folder / f"{step}.zarr"
        if finished(in_child(killed_at(step, lambda target=target: convert(source, target)))):
            return step - 1
        if target.exists() and not (target / "zarr.json").exists():
            raise SystemExit(f"half a store after step {step}")
        assert finished(in_child(lambda target=target: convert(source, target)))


def at_random(source: str, folder: Path, n_kills: int) -> int:
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
        if finished(pid) or target.exists() and not Path(f"{target}.partial").exists():
            number += 1
        else:
            killed += 1
    if Path(f"{folder / str(number)}.zarr.partial").exists():
        assert finished(in_child(lambda: convert(source, folder / f"{number}.zarr")))
    return killed


if __name__ == "__main__":
    source, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    n = at_steps(source, folder) if how == "steps" else at_random(source, folder, int(how))
    print(json.dumps({"n_kills": n}))

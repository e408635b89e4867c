"""Contenders in processes of their own, measured in turns.

A contender is a child process that builds one loader, reports what its cold start took, and then
measures whenever it is told to. All stay alive for the whole run and only one works at a time, so every
round sees the same machine, the same page cache and compiled code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# How long a contender works unmeasured when its turn comes, at most.
_SETTLE_S = 1.0


# --- In the child ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Rows handed to the loop in some time, ending with a whole fetch or epoch."""

    n_rows: int
    elapsed_s: float
    cpu_s: float
    checksum: float

    @property
    def rows_per_s(self) -> float:
        return self.n_rows / self.elapsed_s


def measure(
    epoch: Callable[[], Iterator[Any]],
    *,
    seconds: float,
    fetch_rows: int,
    consume: Callable[[Any], float] | None,
    one_epoch: bool = False,
    whole_epochs: bool = False,
) -> Measurement:
    """Iterate until `seconds` have passed, counting whole fetches only.

    Parameters
    ----------
    epoch
        Starts an epoch of tensors.
    seconds
        When to stop, at the next end of a fetch or of an epoch; 0 measures exactly one epoch.
    fetch_rows
        Rows of a fetch. The clock runs from before the first fetch to after the last row of the last
        counted one, so what a loader reads ahead beyond it counts against it.
    consume
        Reads a batch and returns a number; None only takes it.
    one_epoch
        Stop at the end of an epoch in any case, so that no row is read twice.
    whole_epochs
        Stop at the end of an epoch only.
    """
    n_rows, checksum = 0, 0.0
    cpu_start, start = time.process_time(), time.perf_counter()
    finished = False
    while not finished:
        batches = epoch()
        next_check = n_rows + fetch_rows
        for batch in batches:
            n_rows += batch.shape[0]
            if consume is not None:
                checksum += consume(batch)
            if seconds and not whole_epochs and n_rows >= next_check:
                next_check = n_rows + fetch_rows
                if time.perf_counter() - start >= seconds:
                    break
        elapsed_s = time.perf_counter() - start
        finished = one_epoch or elapsed_s >= seconds
        close = getattr(batches, "close", None)
        if close is not None:
            close()
    return Measurement(n_rows=n_rows, elapsed_s=elapsed_s, cpu_s=time.process_time() - cpu_start, checksum=checksum)


def begin(epoch: Callable[[], Iterator[Any]], spec: dict[str, Any]) -> dict[str, Any]:
    """Take the first batch of a loader, or its first epoch where whole epochs are measured; return what it took."""
    start = time.perf_counter()
    batches = epoch()
    first = next(batches)
    answer = {
        "first_batch_s": time.perf_counter() - start,
        "shape": list(first.shape),
        "dtype": str(first.dtype),
        "fetch": spec["fetch"],
    }
    n_rows = first.shape[0]
    del first
    if spec.get("whole_epochs"):
        n_rows += sum(batch.shape[0] for batch in batches)
        answer["first_epoch_rows_per_s"] = n_rows / (time.perf_counter() - start)
    getattr(batches, "close", lambda: None)()
    return answer


def serve(build: Callable[[dict[str, Any]], Callable[[], Iterator[Any]]], spec: dict[str, Any]) -> None:
    """Build the loader, report the cold start, and measure on demand, one line of JSON each.

    Parameters
    ----------
    build
        Imports what it needs and returns a function that starts an epoch.
    spec
        What `Contender` was given. A loader that chooses its fetch size sets it.
    """
    # What libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    start = time.perf_counter()
    epoch = build(spec)
    answer = {"build_s": time.perf_counter() - start} | begin(epoch, spec)
    print(json.dumps(answer), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("anew"):
            # What is mapped cannot be dropped from the page cache: let go of it, and open it again.
            del epoch
            gc.collect()
            epoch = build(spec)
            print(json.dumps({}), file=answers)
            continue
        before = _read_bytes()
        result = measure(
            epoch,
            # A fetch chosen by the memory limit may be half an epoch: whole epochs are measured then.
            seconds=0 if "memory_limit" in spec else order["seconds"],
            fetch_rows=spec["fetch"],
            consume=_total if order["consume"] else None,
            one_epoch=spec.get("cold", False),
            whole_epochs=spec.get("whole_epochs", False),
        )
        answer = {
            "n_rows": result.n_rows,
            "rows_per_s": result.rows_per_s,
            "cores": result.cpu_s / result.elapsed_s,
            "checksum": result.checksum,
            "read_bytes": _read_bytes() - before,
        }
        print(json.dumps(answer), file=answers)


def _read_bytes() -> int:
    """Return what this process has read from disks, in bytes; 0 where the system does not tell."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["read_bytes"])


def _total(batch: Any) -> float:
    """Read every value of a tensor, dense or sparse CSR, on one thread.

    NumPy adds up rather than torch, whose threads would fight the loader's for the cores: what takes
    batches in earnest is a copy to a GPU, by one thread.
    """
    return float((batch.values() if batch.is_sparse_csr else batch).numpy().sum())


# --- In the parent -----------------------------------------------------------------------------------


class ContenderError(RuntimeError):
    """A contender's process that ended, with the end of what it printed."""


class Contender:
    """The parent's end of a contender's process."""

    def __init__(
        self,
        name: str,
        *,
        python: str,
        script: Path,
        spec: dict[str, Any],
        log: Path,
        label: str | None = None,
        drop: Callable[[], dict[str, Any]] | None = None,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """Start the loader `name`.

        Before each measurement `drop` is called, to empty the page cache; what it returns becomes part of
        the answer. `enter` is called in the new process before anything else, to move it into a control group.
        """
        self.name = label or name
        self._log = log
        self._drop = drop
        with log.open("w") as stderr:
            started = time.perf_counter()
            self._process = subprocess.Popen(
                [python, str(script), name, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": str(HERE.parent)},
                preexec_fn=enter,
            )
        self.cold_start = self._read()
        self.cold_start["total_s"] = time.perf_counter() - started

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def work(self, *, seconds: float) -> None:
        """Let it work unmeasured."""
        self._order({"seconds": seconds, "consume": True})

    def run(self, *, seconds: float, consume: bool) -> dict[str, Any]:
        """Let it measure once, while everything else waits."""
        dropped = {}
        if self._drop is not None:
            self._order({"anew": True})
            dropped = self._drop()
        return self._order({"seconds": seconds, "consume": consume}) | dropped

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        # A process that has ended is noticed when it does not answer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ContenderError(f"{self.name} ended:\n{self._log.read_text()[-3000:]}")
        return json.loads(line)


# What the answers of ranks are added up by.
_ADDED = ("rows_per_s", "cores", "n_rows", "read_bytes")


class Together:
    """Contenders that measure at the same moment, as the ranks of one job; their rates are added."""

    def __init__(self, name: str, starts: Sequence[Callable[[], Contender]]) -> None:
        self.name = name
        self._contenders: list[Contender] = []
        try:
            for start in starts:
                self._contenders.append(start())
        except ContenderError:
            self.close()
            raise
        self.cold_start = self._contenders[0].cold_start

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for contender in self._contenders:
            contender.close()

    def work(self, *, seconds: float) -> None:
        """Let them work unmeasured."""
        self._each(lambda one: one.work(seconds=seconds))

    def run(self, *, seconds: float, consume: bool) -> dict[str, Any]:
        """Let them measure once, at the same moment."""
        answers = self._each(lambda one: one.run(seconds=seconds, consume=consume))
        return {key: sum(answer[key] for answer in answers) for key in _ADDED if key in answers[0]}

    def _each(self, do: Callable[[Contender], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self._contenders)) as threads:
            return list(threads.map(do, self._contenders))


@dataclass(slots=True, kw_only=True)
class Result:
    """What a contender showed over all rounds; rates in cells per second, one a round."""

    name: str
    cold_start: dict[str, Any]
    produced: list[float] = field(default_factory=list)
    consumed: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    cached_share: list[float] = field(default_factory=list)


def compete(
    contenders: Sequence[Callable[[], Contender | Together]],
    *,
    rounds: int,
    seconds: float,
    warm_up_s: float,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Measure every contender once a round, in an order that turns from round to round.

    While others work, the memory that a process has freed may go back to the machine's host, and is slow
    to get again. So each turn starts with a while that is not measured, and which of the two rates is
    measured first changes as well. A contender that cannot start, or fails, is left out with a line that
    says why.
    """
    results: dict[str, Result] = {}
    with contextlib.ExitStack() as stack:
        running: dict[str, Contender | Together] = {}
        for start in contenders:
            try:
                contender = stack.enter_context(start())
                contender.work(seconds=warm_up_s)
            except ContenderError as error:
                say(str(error))
                continue
            running[contender.name] = contender
            results[contender.name] = Result(name=contender.name, cold_start=contender.cold_start)
        for i in range(rounds):
            names = list(running)
            turn = i % max(len(names), 1)
            for name in names[turn:] + names[:turn]:
                try:
                    running[name].work(seconds=min(seconds, _SETTLE_S))
                    measured = {
                        kind: running[name].run(seconds=seconds, consume=kind == "consumed")
                        for kind in (("produced", "consumed") if i % 2 == 0 else ("consumed", "produced"))
                    }
                except ContenderError as error:
                    say(str(error))
                    del running[name], results[name]
                    continue
                result = results[name]
                result.produced.append(measured["produced"]["rows_per_s"])
                result.consumed.append(measured["consumed"]["rows_per_s"])
                result.cores.append(measured["produced"]["cores"])
                for one in measured.values():
                    if "dropped" in one:
                        result.dropped.append(one["dropped"])
                        result.cached_share.append(one["cached_share"])
                say(
                    f"round {i + 1}/{rounds}  {name:28s} produced {result.produced[-1]:10,.0f}  "
                    f"consumed {result.consumed[-1]:10,.0f} cells/s"
                )
    return list(results.values())


def median_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Return the median, and half the range as a share of it."""
    values = list(values)
    median = statistics.median(values)
    return median, (max(values) - min(values)) / 2 / median

"""Loaders in separate processes, measured alternately.

A contender is a child process that builds one loader, reports the time of its cold start, and then
measures on request. All contenders live for the whole run and only one works at a time. Every round
therefore uses the same machine, the same page cache and the same compiled code.
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

# Maximum duration of the unmeasured work at the start of a turn.
_SETTLE_S = 1.0


# --- Child process -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Number of rows delivered to the loop up to the end of a fetch or an epoch, with times and a checksum."""

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
    """Measure the rate of a loader over at least `seconds`, rounded up to whole fetches.

    Parameters
    ----------
    epoch
        Function that starts an epoch of tensors.
    seconds
        Minimum duration. The measurement stops at the next end of a fetch or an epoch; 0 measures exactly one epoch.
    fetch_rows
        Number of rows in a fetch. The clock starts before the first fetch and stops after the last row of
        the last counted fetch. Time spent on reading beyond that fetch therefore lowers the rate.
    consume
        Function that reads a batch and returns a number. With None, batches are discarded unread.
    one_epoch
        If True, stop at the end of the epoch even before `seconds`, so that no row is read twice.
    whole_epochs
        If True, stop only at the end of an epoch.
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
    """Time the first batch of a loader, and its first epoch if whole epochs are measured."""
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
    """Build the loader, report the cold start, and measure on request, with one line of JSON for each answer.

    Parameters
    ----------
    build
        Function that contains its imports and returns a function that starts an epoch.
    spec
        Spec given to `Contender`. A loader that chooses its fetch size stores it under ``"fetch"``.
    """
    # Output of libraries must not appear between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    start = time.perf_counter()
    epoch = build(spec)
    answer = {"build_s": time.perf_counter() - start} | begin(epoch, spec)
    print(json.dumps(answer), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("anew"):
            # Mapped pages cannot be dropped from the page cache: the file is closed and opened again.
            del epoch
            gc.collect()
            epoch = build(spec)
            print(json.dumps({}), file=answers)
            continue
        before = _read_bytes()
        result = measure(
            epoch,
            # A fetch size derived from the memory limit may be half an epoch, so whole epochs are measured.
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
    """Return the number of bytes that this process has read from disks, or 0 where the system does not report it."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["read_bytes"])


def _total(batch: Any) -> float:
    """Return the sum of a dense or sparse CSR tensor, NumPy array or SciPy matrix, computed on one thread.

    NumPy computes the sum, because the threads of torch would compete with the loader for the cores. In
    training, one thread copies batches to a GPU.
    """
    if hasattr(batch, "numpy"):
        batch = (batch.values() if batch.is_sparse_csr else batch).numpy()
    return float(batch.sum())


# --- Parent process ----------------------------------------------------------------------------------


class ContenderError(RuntimeError):
    """Error raised when the process of a contender ends early, with the end of its output."""


class Contender:
    """Handle of the child process that runs a loader."""

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

        `drop` is called before each measurement to empty the page cache, and its result becomes part of the
        answer. `enter` is called first in the new process, to move it into a control group.
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
        """Run the loader without measuring."""
        self._order({"seconds": seconds, "consume": True})

    def run(self, *, seconds: float, consume: bool) -> dict[str, Any]:
        """Measure once while the other contenders wait."""
        dropped = {}
        if self._drop is not None:
            self._order({"anew": True})
            dropped = self._drop()
        return self._order({"seconds": seconds, "consume": consume}) | dropped

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        # The missing answer reveals a process that has ended.
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


# Keys of the answers that are summed over ranks.
_ADDED = ("rows_per_s", "cores", "n_rows", "read_bytes")


class Together:
    """Contenders that measure simultaneously, like the ranks of one job; their rates are summed."""

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
        """Run the loaders without measuring."""
        self._each(lambda one: one.work(seconds=seconds))

    def run(self, *, seconds: float, consume: bool) -> dict[str, Any]:
        """Measure all loaders once, simultaneously."""
        answers = self._each(lambda one: one.run(seconds=seconds, consume=consume))
        return {key: sum(answer[key] for answer in answers) for key in _ADDED if key in answers[0]}

    def _each(self, do: Callable[[Contender], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self._contenders)) as threads:
            return list(threads.map(do, self._contenders))


@dataclass(slots=True, kw_only=True)
class Result:
    """Measurements of a contender over all rounds: one rate per round, in cells per second."""

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
    """Measure every contender once per round, in an order that rotates from round to round.

    While a process waits for its turn, the host of a virtual machine may reclaim memory that the process has
    freed, and allocating it again is slow. Each turn therefore starts with unmeasured work, and the order
    of the produced and the consumed rate alternates from round to round. A contender that fails
    is dropped, and its error is printed.
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
    """Return the median and half the range, the latter as a share of the median."""
    values = list(values)
    median = statistics.median(values)
    return median, (max(values) - min(values)) / 2 / median

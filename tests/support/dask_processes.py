"""Dask clusters for tests: scheduler and worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_S = 180.0


class DaskProcesses:
    """Scheduler and worker processes that end with this context and write their logs to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "scheduler.json"
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.scheduler: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_scheduler(self) -> None:
        """Start the scheduler, always at the same address."""
        self.file.unlink(missing_ok=True)
        self.scheduler = self._start("scheduler", "--port", str(self.port), "--no-dashboard")
        deadline = time.monotonic() + START_S
        while not self.file.exists() or not self.file.read_text():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)
        assert json.loads(self.file.read_text())["address"] == self.address

    def start_worker(self, *options: str) -> subprocess.Popen[bytes]:
        worker = self._start("worker", "--nthreads", "1", "--no-dashboard", "--no-nanny", *options)
        self.workers.append(worker)
        return worker

    def _start(self, kind: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "dask", kind, "--scheduler-file", str(self.file)),
                    *("--host", "127.0.0.1", *options),
                ],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> DaskProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.workers, self.scheduler]:
            if process is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(timeout=30)

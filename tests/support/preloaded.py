"""Python programs in processes that have already imported the dependencies of dasksc, since the imports take seconds.

``python -m tests.support.preloaded SOCKET`` is a server that imports the dependencies once. For each request, it forks
a process that forks again: the second becomes the program, with the arguments, environment, folder and output files of
the request, and the first waits for it. The program imports dasksc itself. Ranks of torchrun are forks, too.

Tests of the following need new interpreters: warnings and side effects of imports, variables that the dependencies read
when they are imported, hash seeds that differ between processes, and the finalization of the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.process
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

ADDRESS = "DASKSC_TEST_PRELOADED"  # environment variable with the path of the server's socket
DEPENDENCIES = ("anndata", "dask.array", "distributed", "numba", "torch.distributed.run", "zarr")
PROGRAMS = ("dasksc", "python", "torchrun")


def can_run(command: str) -> bool:
    """Return True if a shell command calls one of `PROGRAMS` and has none of the special characters below."""
    return command.startswith(PROGRAMS) and not set(command) & set("|&;<>$*?[]{}()~`!#")


def serve_on(path: Path) -> subprocess.Popen[bytes]:
    """Start a server, and return its process once it accepts requests."""
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, str(path)],
        cwd=Path(__file__).parents[2],
        # Libraries read the number of threads when they are imported. torchrun also sets one thread for each rank.
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


def ended(
    command: Sequence[object], *, cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run one of `PROGRAMS` to completion, and capture its output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = (out.fileno(), err.fileno())
        status = call(command, cwd=cwd, environment=environment, files=files, timeout_s=timeout_s)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), err.read())


def call(
    command: Sequence[object],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    files: tuple[int, int] = (1, 2),
    timeout_s: float | None = None,
) -> int:
    """Run one of `PROGRAMS` to completion with `files` as its standard output and error; return its exit status."""
    words = [*map(str, command)]
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("r") as replies:
        connection.connect(environment[ADDRESS])
        socket.send_fds(connection, [b"\0"], files)
        connection.sendall(json.dumps({"command": words, "cwd": str(cwd), "environment": dict(environment)}).encode())
        connection.shutdown(socket.SHUT_WR)
        pid = int(replies.readline())
        connection.settimeout(timeout_s)
        try:
            return int(replies.readline())
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if isinstance(error, TimeoutError):
                raise subprocess.TimeoutExpired(words, timeout_s or 0) from None
            raise


def main() -> None:
    """Import the dependencies, and serve requests until the process that started the server ends."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the programs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in DEPENDENCIES:
        __import__(name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        listening.settimeout(1)
        print("ready", flush=True)
        while os.getppid() == parent:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                try:
                    listening.close()
                    _answer(connection)
                finally:
                    os._exit(1)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """Run the program of a request; reply with its pid and, after its end, with its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 2)
    with connection.makefile("rb") as requests:
        request = json.loads(requests.read())
    if (pid := os.fork()) == 0:
        connection.close()
        _become(files=files, **request)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(command: Sequence[str], cwd: str, environment: Mapping[str, str], files: Sequence[int]) -> NoReturn:
    """Run a program in this process, and end the process as the program would end."""
    status = 1
    try:
        _prepare(cwd, environment, files)
        _execute(command)
        status = 0
    except SystemExit as exited:
        status = exited.code if isinstance(exited.code, int) else int(exited.code is not None)
        if not isinstance(exited.code, int | None):
            print(exited.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _prepare(cwd: str, environment: Mapping[str, str], files: Sequence[int]) -> None:
    """Set the state with which a new interpreter would start: output files, folder, environment and so on."""
    import dask
    import numba
    import numpy as np

    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    np.random.seed()  # noqa: NPY002
    dask.config.refresh()
    numba.core.config.reload_config()


def _execute(command: Sequence[str]) -> None:
    """Run one of `PROGRAMS`. For Python, only the options -c, -m, -u and -W are supported."""
    program, arguments = Path(command[0]).name, [*command[1:]]
    if not program.startswith("python"):
        arguments = [shutil.which(command[0]) or command[0], *arguments]
    elif arguments[:2] == ["-m", "torch.distributed.run"]:
        program, arguments = "torchrun", ["torchrun", *arguments[2:]]
    if program == "torchrun":
        _torchrun(arguments)
        return
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    if arguments[0] == "-c":
        sys.argv, module = ["-c", *arguments[2:]], types.ModuleType("__main__")
        sys.path.insert(0, "")
        sys.modules["__main__"] = module
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _Rank  # type: ignore[misc]
    sys.argv = arguments
    run.main()


class _Rank(subprocess.Popen[bytes]):
    """Process of a rank: a fork of torchrun instead of a new interpreter."""

    # Ranks begin when all of them exist, at the end of this pipe: a rank that connects to the store of torchrun lets a
    # thread of it take a lock of the C library, and a rank forked at that moment would wait for the lock for ever.
    _gate: ClassVar[tuple[int, int]]

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        if args[0] != sys.executable:
            return super()._execute_child(args, *given)  # type: ignore[misc]
        environment, out, err = given[5], given[12], given[14]  # env, c2pwrite and errwrite in Python 3.11 to 3.13
        if environment["LOCAL_RANK"] == "0":
            _Rank._gate = os.pipe()
        wait, begin = _Rank._gate
        if (pid := os.fork()) == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.close(begin)
            os.read(wait, 1)
            os.close(wait)
            files = [os.dup(1 if out < 0 else out), os.dup(2 if err < 0 else err)]
            _become(args, os.getcwd(), environment, files)
        self.pid, self._child_created = pid, True
        if int(environment["LOCAL_RANK"]) == int(environment["LOCAL_WORLD_SIZE"]) - 1:
            os.close(wait)
            os.close(begin)
        return None


if __name__ == "__main__":
    from tests.support import preloaded  # under its own name, not as __main__, because programs import it

    preloaded.main()

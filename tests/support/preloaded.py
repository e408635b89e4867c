"""Python programs in processes that have already imported the dependencies of dasksc, since the imports take seconds.

``python -m tests.support.preloaded SOCKET`` is a server that imports the dependencies once. For each request, it forks
a process that forks again: the second becomes the program, with the arguments, environment, folder and output files of
the request, and the first waits for it. The program imports dasksc itself. Ranks of torchrun are forks, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
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
from typing import IO, NoReturn

ADDRESS = "DASKSC_TEST_PRELOADED"  # environment variable with the path of the server's socket
DEPENDENCIES = ("anndata", "dask.array", "distributed", "numba", "torch.distributed.run", "zarr")
PROGRAMS = ("dasksc", "python", "torchrun")


def can_run(command: str) -> bool:
    """Return True if a shell command calls one of `PROGRAMS` and has none of the special characters below."""
    return command.startswith(PROGRAMS) and not set(command) & set("|&;<>$*~`")


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
        code = call(command, cwd=cwd, environment=environment, files=(out, err), timeout_s=timeout_s)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def call(
    command: Sequence[object],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    files: tuple[IO[str], IO[str]] = (sys.stdout, sys.stderr),
    timeout_s: float | None = None,
) -> int:
    """Run one of `PROGRAMS` to completion with `files` as its standard output and error; return its exit status."""
    request = json.dumps({"command": [*map(str, command)], "cwd": str(cwd), "environment": dict(environment)}).encode()
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("r") as replies:
        connection.connect(environment[ADDRESS])
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [file.fileno() for file in files])
        connection.sendall(request)
        pid = int(replies.readline())
        connection.settimeout(timeout_s)
        try:
            return int(replies.readline())
        except TimeoutError:
            raise subprocess.TimeoutExpired([*map(str, command)], timeout_s or 0) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Import the dependencies, and serve requests until the process that started the server ends."""
    for name in DEPENDENCIES:
        __import__(name)
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for the programs
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        listening.settimeout(1)
        print("ready", flush=True)
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                connection, _ = listening.accept()
                if os.fork() == 0:
                    listening.close()
                    connection.setblocking(True)
                    _answer(connection)
                connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """Run the program of a request; reply with its pid and, after its end, with its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection.makefile("rb") as requests:
        size, files, _, _ = socket.recv_fds(connection, 8, 2)
        request = json.loads(requests.read(int.from_bytes(size, "big")))
    if (pid := os.fork()) == 0:
        connection.close()
        _become(files=files, **request)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
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
        if isinstance(exited.code, str):
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
    """Set what a new interpreter takes from its surroundings."""
    import dask
    import numba

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    installed = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    dask.config.refresh()
    numba.core.config.reload_config()


def _execute(command: Sequence[str]) -> None:
    """Run one of `PROGRAMS`. For Python, only the options -c, -m, -u and -W are supported."""
    program, arguments = command[0], [*command[1:]]
    name = Path(program).name
    while name.startswith("python") and arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    if name == "torchrun" or arguments[:2] == ["-m", "torch.distributed.run"]:
        _torchrun(arguments[2 * (name != "torchrun") :])
    elif not name.startswith("python"):
        sys.argv = [shutil.which(program) or program, *arguments]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif arguments[0] == "-c":
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
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _torchrun(arguments: Sequence[str]) -> None:
    """Run torchrun, which starts each rank as a fork of this process and runs the program in it."""
    from torch.distributed import run

    sys.argv = ["torchrun", *arguments]
    options = run.parse_args(arguments)
    if not options.module and not options.no_python:
        options.run_path, options.start_method = True, "fork"
        options.training_script = str(Path(options.training_script).resolve())
        sys.path.insert(0, str(Path(options.training_script).parent))
    run.run(options)


if __name__ == "__main__":
    from tests.support import preloaded  # under its own name, not as __main__, because programs import it

    preloaded.main()

"""Windows of fetches while the interpreter is interrupted or ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.programs


def run_script(script: str, *, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import os, sys, threading, time\n"
        "from dasksc.executor.window import Window\n"
        "def cluster(protocol):\n"
        "    import distributed\n"
        "    return distributed.Client(n_workers=1, threads_per_worker=2, processes=False,\n"
        '                              protocol=protocol, dashboard_address=":0")\n'
        "def slow(k):\n"
        "    time.sleep(0.05)\n"
        "    return k\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prelude + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        if interrupt:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize("scheduler", ["'threads'", "'synchronous'", "cluster('inproc')"])
def test_ctrl_c_stops_everything_and_a_new_window_works(scheduler: str) -> None:
    done = run_script(
        f"""
if __name__ == "__main__":
    scheduler = {scheduler}
    before = set(threading.enumerate())
    stuck = threading.Event()
    def wait(k):
        if k < 3:
            return k
        if k == 3:
            print("ready", flush=True)
        stuck.wait(1.0)
        return k
    try:
        for _ in Window(wait, range(50), name="w", depth=4, scheduler=scheduler):
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("dasksc")]
    print(len(left), len(list(Window(slow, range(5), name="w", depth=4, scheduler=scheduler))))
    if not isinstance(scheduler, str):
        scheduler.close()  # at exit, a cluster may end before its open Client, which then logs an error
""",
        interrupt=True,
    )
    if "cluster" not in scheduler:  # Dask may log that it has cancelled a fetch
        assert done.stderr == ""
    assert done.stdout == "interrupted\n0 5\n"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("scheduler", "keep"),
    [
        ("'threads'", "window"),
        ("'threads'", "iterator in a generator"),
        ("cluster('inproc')", "window"),
        ("cluster('tcp')", "iterator in a generator"),
    ],
)
def test_the_interpreter_can_exit_in_the_middle_of_an_epoch(scheduler: str, keep: str) -> None:
    done = run_script(
        f"""
def loop(window):
    with window:
        yield from window
if __name__ == "__main__":
    scheduler = {scheduler}
    window = Window(slow, range(1000), name="w", depth=6, scheduler=scheduler)
    if {keep != "window"}:
        window = loop(window)
    print(next(window), next(window))
"""
    )
    if "cluster" not in scheduler:  # Dask may log that it has cancelled a fetch
        assert done.stderr == ""
    assert done.stdout == "(0, 0) (1, 1)\n"
    assert done.returncode == 0


@pytest.mark.parametrize("scheduler", ["'threads'", "cluster('inproc')"])
def test_a_thread_that_outlives_the_main_thread_gets_all_or_an_error(scheduler: str) -> None:
    # The executors of Python, and of an in-process Dask scheduler, end with the main thread.
    done = run_script(
        f"""
def consume():
    try:
        print(len(list(window)))
    except Exception as error:
        print(type(error).__name__)
if __name__ == "__main__":
    window = Window(slow, range(20), name="w", depth=2, scheduler={scheduler})
    threading.Thread(target=consume).start()
"""
    )
    assert done.stdout in ("20\n", "FetchError\n")
    assert done.returncode == 0

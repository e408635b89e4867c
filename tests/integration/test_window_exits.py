"""Windows of fetches while the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.programs import ended

pytestmark = pytest.mark.programs


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    prelude = (
        "import threading, time\n"
        "from dasksc.executor.window import Window\n"
        "def cluster(protocol):\n"
        "    import distributed\n"
        "    return distributed.Client(n_workers=1, threads_per_worker=2, processes=False,\n"
        '                              protocol=protocol, dashboard_address=":0")\n'
        "def slow(k):\n"
        "    time.sleep(0.05)\n"
        "    return k\n"
    )
    return ended([sys.executable, "-W", "error", "-c", prelude + script])


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

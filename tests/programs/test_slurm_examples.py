"""Batch scripts of examples/slurm: their options, and the syntax of their commands."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.programs

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
# Long options in the manual of sbatch that a job of several nodes may need.
OPTIONS = {
    *("account", "array", "chdir", "constraint", "cpus-per-gpu", "cpus-per-task", "dependency", "error", "exclude"),
    *("exclusive", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "mail-type", "mail-user"),
    *("mem", "mem-per-cpu", "mem-per-gpu", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("partition", "qos", "requeue", "reservation", "signal", "time", "tmp"),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_batch_script_has_known_options_before_its_first_command(script):
    options, body = re.fullmatch(r"#!/bin/bash\n((?:#.*\n)+)([\s\S]*)", script.read_text()).groups()
    named = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", options, re.MULTILINE)
    assert set(named) <= OPTIONS
    assert len(named) == script.read_text().count("#SBATCH")
    assert body.startswith("set -euo pipefail")
    subprocess.run(["bash", "-n", script], check=True)

"""Commands in docs/reference/cli.md, and their output as shown on the page."""

from __future__ import annotations

import contextlib
import shlex
import sys

import pytest

from tests.support.commands import run_command
from tests.support.guides import comparable
from tests.support.programs import ROOT, blocks, run

pytestmark = pytest.mark.programs

PAGE = ROOT / "docs" / "reference" / "cli.md"
# Sizes, rates and losses depend on the machine.
MEASURED = {"suggest", "train", "embed"}


def printed_by(*arguments: str) -> str:
    if arguments[0] == "check":  # reports the memory of its process
        return run([sys.executable, "-m", "dasksc", *arguments], is_preloaded=True)
    return run_command(*arguments).stdout


def test_commands_print_what_the_page_shows(tmp_path):
    (tmp_path / "classifier.yaml").write_text(blocks(PAGE, "yaml")[0][2])
    differing, names = [], []
    with contextlib.chdir(tmp_path):
        for block in blocks(PAGE, "console"):
            line, _, documented = block[2].partition("\n")
            name, *arguments = shlex.split(line.removeprefix("$ dasksc "))
            printed = printed_by(name, *arguments).replace(str(tmp_path), "/data")
            if name not in MEASURED and comparable(printed) != comparable(documented):
                differing.append(f"{line}\n{printed}")
            names.append(name)
    assert len(names) == 7
    assert not differing, "\n".join(differing)

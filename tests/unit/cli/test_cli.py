"""The `dasksc` command as a whole; its subcommands have tests of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pytest
from anndata import AnnData
from click.testing import CliRunner

from dasksc import InputError, cli

pytestmark = pytest.mark.core


def test_help_lists_every_subcommand_and_each_has_examples() -> None:
    runner = CliRunner()
    shown = runner.invoke(cli.group, ["--help"])
    assert shown.exit_code == 0
    commands = cli.group.list_commands(click.Context(cli.group))
    for name in commands:
        assert name in shown.output
        assert_examples_are_on_lines_of_their_own(runner, name)
    assert_examples_are_on_lines_of_their_own(runner)


def assert_examples_are_on_lines_of_their_own(runner: CliRunner, *command: str) -> None:
    page = runner.invoke(cli.group, [*command, "--help"])
    assert page.exit_code == 0
    names = cli.group.list_commands(click.Context(cli.group))
    _, _, after = page.output.partition("Examples:\n")
    examples = after.splitlines()
    assert len(examples) >= 2, page.output
    for line in examples:
        assert line.startswith("  "), line
        # What is rewrapped has several commands in a line, or a line without one.
        words = line.split()
        following = [after for before, after in pairwise(words) if before == "dasksc"]
        assert sum(word in names for word in following) == 1, line
    assert "\\b" not in page.output


def test_an_unknown_subcommand_is_told_with_exit_code_2() -> None:
    shown = CliRunner().invoke(cli.group, ["sing"])
    assert shown.exit_code == 2
    assert "sing" in shown.output


def test_errors_of_dasksc_are_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    @click.command()
    def fails() -> None:
        raise InputError("rows=-1 is negative. Give at least 0.")

    monkeypatch.setattr(cli.group, "get_command", lambda ctx, name: fails)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fails"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "dasksc: rows=-1 is negative. Give at least 0.\n"


def test_it_runs_as_a_module_and_ctrl_c_is_exit_code_130(tmp_path: Path) -> None:
    path = tmp_path / "atlas.h5ad"
    AnnData(np.ones((50, 3), dtype=np.float32)).write_h5ad(path)
    # It would take a day, and says when it has begun.
    arguments = ["bench", str(path), "--seconds", "86400"]
    with subprocess.Popen(
        [sys.executable, "-m", "dasksc", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stderr is not None
        try:
            assert run.stderr.readline().startswith("round 1")
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
            _, told = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 130
    assert told.splitlines()[-1] == "dasksc: stopped by Ctrl-C."


def test_it_tells_its_version() -> None:
    shown = CliRunner().invoke(cli.group, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith("dasksc, version ")

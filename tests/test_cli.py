"""The `dasksc` command as a whole; its subcommands have tests of their own."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from dasksc import InputError, cli


def test_help_lists_every_subcommand_and_each_has_examples() -> None:
    runner = CliRunner()
    shown = runner.invoke(cli.group, ["--help"])
    assert shown.exit_code == 0
    commands = cli.group.list_commands(click.Context(cli.group))
    for name in commands:
        assert name in shown.output
        page = runner.invoke(cli.group, [name, "--help"])
        assert page.exit_code == 0
        assert "Examples" in page.output, f"dasksc {name} --help shows no example"


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


def test_it_runs_as_a_module_too() -> None:
    run = subprocess.run([sys.executable, "-m", "dasksc", "--version"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("dasksc, version ")

"""Command `dasksc` as a whole; separate modules test its subcommands."""

from __future__ import annotations

from itertools import pairwise

import click
import pytest
from click.testing import CliRunner

from dasksc import InputError, cli

pytestmark = pytest.mark.core


def test_help_lists_every_subcommand_and_each_has_examples() -> None:
    runner = CliRunner()
    result = runner.invoke(cli.group, ["--help"])
    assert result.exit_code == 0
    commands = cli.group.list_commands(click.Context(cli.group))
    for name in commands:
        assert name in result.output
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
        # If the examples were rewrapped, a line could contain several commands or none.
        words = line.split()
        following = [after for before, after in pairwise(words) if before == "dasksc"]
        assert sum(word in names for word in following) == 1, line
    assert "\\b" not in page.output


def test_an_unknown_subcommand_is_told_with_exit_code_2() -> None:
    result = CliRunner().invoke(cli.group, ["sing"])
    assert result.exit_code == 2
    assert "sing" in result.output


def test_errors_of_dasksc_are_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    @click.command()
    def fails() -> None:
        raise InputError("rows=-1 is negative. Give at least 0.")

    monkeypatch.setattr(cli.group, "get_command", lambda ctx, name: fails)
    with pytest.raises(SystemExit) as ended:
        cli.main(["fails"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "dasksc: rows=-1 is negative. Give at least 0.\n"


def test_the_command_prints_its_version() -> None:
    result = CliRunner().invoke(cli.group, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("dasksc, version ")

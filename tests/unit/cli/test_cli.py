"""Command `dasksc` as a whole; separate modules test its subcommands."""

from __future__ import annotations

import logging
from itertools import pairwise

import click
import pytest
from click.testing import CliRunner

from dasksc import InputError, cli
from dasksc.cli._messages import as_options, collected_warnings, folded

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


@click.command()
@click.argument("paths", nargs=-1)
@click.option("--fetch-factor", type=int)
@click.option("--filter", "expression")
@click.option("--drop-last", is_flag=True)
@click.option("--storage-option", "storage_options", multiple=True)
def reads(**given: object) -> None:
    """Log warnings about four files and about one other problem."""
    with collected_warnings():
        logger = logging.getLogger("dasksc.storage")
        for i in range(4):
            logger.warning("p%d.h5ad is slow. Store it by rows once: dasksc convert p%d.h5ad NEW.zarr", i, i)
        logger.warning("raise fetch_factor")


def test_reports_are_folded_at_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    title = "a title that is longer than the terminal is wide"
    assert folded(f"{title}\n  rows     one two three four five six\n  short  1") == (
        f"{title}\n  rows     one two three four\n           five six\n  short  1"
    )
    assert folded("dasksc: one two three four five six", indent=2) == "dasksc: one two three four\n  five six"


def test_advice_about_an_option_that_the_command_lacks_is_left_out() -> None:
    message = "none of the genes is in var. Use symbols in both, or match a column of var with genes_key="
    with click.Context(reads):
        assert as_options(message) == "none of the genes is in var. Use symbols in both"

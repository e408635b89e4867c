"""Command `dasksc` as a whole; separate modules test its subcommands."""

from __future__ import annotations

import pytest

from dasksc import InputError, cli
from dasksc.cli import COMMANDS
from tests.support.commands import run_command

pytestmark = pytest.mark.core


def test_help_lists_every_subcommand_and_each_has_examples():
    overview = run_command("--help").stdout
    for name in COMMANDS:
        assert name in overview
        _, _, after = run_command(name, "--help").stdout.partition("For example:\n")
        examples = after.splitlines()
        assert len(examples) >= 2, name
        assert all(line.startswith("  ") and f"dasksc {name} " in line for line in examples), name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sugest"], "suggest"),
        (["info"], "paths"),
        (["info", "a.h5ad", "--secnds", "0"], "--seconds"),
        (["info", "a.h5ad", "--seconds", "long"], "--seconds: expected NUMBER; got 'long'"),
        (["check", "a.h5ad", "--layout", "dens"], "did you mean dense?"),
        (["convert", "a.h5ad", "b.zarr", "--storage-option", "region"], "--storage-option"),
    ],
)
def test_mistakes_on_the_command_line_are_told_with_exit_code_2(arguments, told):
    told_on = run_command(*arguments, exit_code=2).stderr
    assert told in told_on
    assert told_on.startswith("dasksc")


def test_errors_of_dasksc_are_one_line_and_exit_code_1_and_ctrl_c_is_130(monkeypatch):
    def failing(error):
        def run(options):
            raise error

        return lambda parser: run

    monkeypatch.setitem(COMMANDS, "info", failing(InputError("rows=-1 is negative. Give at least 0.")))
    assert run_command("info", exit_code=1).stderr == "dasksc: rows=-1 is negative. Give at least 0.\n"
    monkeypatch.setitem(COMMANDS, "info", failing(KeyboardInterrupt()))
    assert "Ctrl-C" in run_command("info", exit_code=130).stderr


def test_options_of_several_atlases_are_on_every_command_that_reads_atlases():
    for name in set(COMMANDS) - {"demo-data", "train"}:
        flags = {flag for action in cli.prepared(name)[0]._actions for flag in action.option_strings}
        assert flags >= {"--join", "--label", "--keys", "--index-unique", "--merge", "--fill-value", "--genome"}, name
        assert flags >= {"--feature-types", "--storage-option", "--cache", "--json"}, name

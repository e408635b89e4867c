"""Command `dasksc` as a whole; separate modules test its subcommands."""

from __future__ import annotations

import logging
import os
import re
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
from dasksc.cli._messages import as_options, collected_warnings, folded
from dasksc.datasets import demo_data

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


def test_it_runs_as_a_module_and_ctrl_c_is_exit_code_130(tmp_path: Path) -> None:
    path = tmp_path / "atlas.h5ad"
    AnnData(np.ones((50, 3), dtype=np.float32)).write_h5ad(path)
    # The benchmark would run for a day; it prints a line when it begins.
    arguments = ["bench", str(path), "--seconds", "86400"]
    with subprocess.Popen(
        [sys.executable, "-m", "dasksc", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stderr is not None
        try:
            assert run.stderr.readline().startswith("round 1")
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
            _, stderr = run.communicate(timeout=600)
        finally:
            run.kill()
    assert run.returncode == 130
    assert stderr.splitlines()[-1] == "dasksc: stopped by Ctrl-C."


def test_the_command_prints_its_version() -> None:
    result = CliRunner().invoke(cli.group, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("dasksc, version ")


def every_command() -> list[tuple[str, click.Command]]:
    context = click.Context(cli.group)
    names = cli.group.list_commands(context)
    return [("", cli.group), *((name, cli.group.get_command(context, name)) for name in names)]


@pytest.mark.parametrize(("name", "command"), every_command())
def test_every_help_is_whole_and_on_one_line_of_80_columns(name: str, command: click.Command) -> None:
    page = CliRunner(env={"COLUMNS": "80"}).invoke(cli.group, [*name.split(), "--help"]).output
    assert "..." not in page.replace("[ARGS]...", "").replace("PATH...", "").replace("IN...", "").replace(",...", "")
    assert [line for line in page.splitlines() if len(line) > 80] == []
    words = " ".join(page.split())
    for option in command.params:
        if isinstance(option, click.Option):
            with click.Context(command) as context:
                (_, text), *_ = [option.get_help_record(context)]
            assert " ".join(text.split()) in words
            assert any(text in line for line in page.splitlines()), f"{name} {option.opts[0]}: {text} is folded"


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


def test_one_warning_stands_for_all_files_in_terms_of_the_command_line() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(reads, ["plates", "a b.h5ad"])
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "dasksc: warning: p0.h5ad is slow. Store it by rows once: dasksc convert plates 'a b.h5ad' NEW.zarr "
        "(and 3 more like it)",
        "dasksc: warning: raise --fetch-factor",
    ]


@pytest.mark.parametrize(
    ("python", "options"),
    [
        ("fetch_factor=4 exceeds 2. Lower fetch_factor", "--fetch-factor 4 exceeds 2. Lower --fetch-factor"),
        ("Lower batch_size, or use drop_last=False", "Lower batch_size, or leave out --drop-last"),
        ("and drop_last=True.", "and --drop-last."),
        ("filter='n > 3' leaves no row to filter", "--filter 'n > 3' leaves no row to filter"),
        ("filter= is for rows", "--filter is for rows"),
        ("Leave cells out with filter=, or without.", "Leave cells out with --filter, or without."),
        ("set storage_options={'skip_signature': True}", "set --storage-option skip_signature=true"),
        ("see storage_options", "see --storage-option"),
        ("Lower fetch_factor, batch_size or prefetch, or raise", "Lower --fetch-factor or batch_size, or raise"),
        ("--fetch-factor stays", "--fetch-factor stays"),
    ],
)
def test_arguments_in_messages_are_options_of_the_command(python: str, options: str) -> None:
    with click.Context(reads):
        assert as_options(python) == options


def test_reports_are_folded_at_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    title = "a title that is longer than the terminal is wide"
    assert folded(f"{title}\n  rows     one two three four five six\n  short  1") == (
        f"{title}\n  rows     one two three four\n           five six\n  short  1"
    )
    assert folded("dasksc: one two three four five six", indent=2) == "dasksc: one two three four\n  five six"


def calls_with_errors(folder: Path) -> list[tuple[list[str], str]]:
    """Return erroneous calls of the command, and a part of the message of each."""
    demo, out = folder / "demo", str(folder / "out.zarr")
    atlas, plates = str(demo / "atlas.h5ad"), [str(demo / "plates" / f"{i}.h5ad") for i in (1, 2)]
    model = folder / "run" / "model.pt"
    model.parent.mkdir()
    model.touch()
    embed = ["embed", atlas, "--out", out, "--model"]
    return [
        (["demo-data", str(demo)], "Give another folder, or --overwrite."),
        (["demo-data", "/dev/null/x"], "the folder /dev/null/x cannot be created: Not a directory"),
        (["embed", atlas, "--model", "os:getcwd", "--out", str(model)], "give --in-place; otherwise"),
        ([*embed, "os:getcwd", "--device", "nodevice:1"], "is not available on this machine; give one of: cpu"),
        ([*embed, "torch:no_gradd"], "has no attribute 'no_gradd'; did you mean 'torch:no_grad'?"),
        ([*embed, "no_such_module:f"], "--model 'no_such_module:f' cannot be imported"),
        ([*embed, str(model.parent)], f"did you mean {model}?"),
        (["convert", atlas, str(folder / "o.h5ad")], f"OUT.zarr '{folder / 'o.h5ad'}' is named like a file"),
        (["convert", *plates, out, "--keys", "a"], "--keys a must be a list of 2 names"),
        (["convert", str(demo / "cite.h5mu"), out], "contains several modalities. Store one of them as an .h5ad"),
        (["convert", atlas, out, "--label", "plate"], "is a single atlas. Omit --label, or give several"),
        (["info", atlas, "--genome", "X"], "is not one. Leave it out"),
    ]


def test_errors_are_in_terms_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_data(tmp_path / "demo")
    for args, expected in calls_with_errors(tmp_path):
        with pytest.raises(SystemExit) as stopped:
            cli.main(args)
        message = capsys.readouterr().err
        assert stopped.value.code == 1, message
        assert expected in message
        assert not re.search(r"(?<!-)\b\w+=", message), message
        assert not re.search(r"(--[\w-]+) \(\1\)", message), message


def test_advice_about_an_option_that_the_command_lacks_is_left_out() -> None:
    message = "none of the genes is in var. Use symbols in both, or match a column of var with genes_key="
    with click.Context(reads):
        assert as_options(message) == "none of the genes is in var. Use symbols in both"

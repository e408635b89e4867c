"""Sphinx directive that shows the usage and the options of a subcommand of `dasksc`, from its click command.

A page has an empty block: ``{command}`` with the name of the subcommand as its argument.
"""

from __future__ import annotations

import re
from typing import Any

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from dasksc.cli import group

__all__ = ["CommandHelp", "help_of"]


def help_of(name: str) -> str:
    """Return usage, description and options of a subcommand in Markdown."""
    context = click.Context(group, info_name="dasksc", **group.context_settings)
    command = group.get_command(context, name)
    if command is None:
        raise ValueError(f"dasksc has no command {name!r}; it has {', '.join(group.list_commands(context))}")
    own = click.Context(command, info_name=name, parent=context)
    usage = " ".join(command.collect_usage_pieces(own))
    lines = ["```console", f"$ dasksc {name} {usage}", "```", "", _text(command.help or ""), ""]
    lines += ["| option | meaning |", "| --- | --- |"]
    for parameter in command.get_params(own):
        record = parameter.get_help_record(own)
        if record is not None and record[1]:  # arguments have no help of their own
            options = ", ".join(f"`{one}`" for one in record[0].replace("|", "\\|").split(", "))
            lines.append(f"| {options} | {_text(record[1])} |")
    return "\n".join(lines)


def _text(text: str) -> str:
    """Return help text in Markdown: without click's marks, and with literals where Markdown would read markup."""
    for mark, replacement in (("\b\n", ""), ("|", "\\|"), ("<", "&lt;"), ("[", "\\["), ("*", "\\*")):
        text = text.replace(mark, replacement)
    text = re.sub(r"(?<![\w`-])--[a-z][\w-]*", lambda option: f"`{option[0]}`", text)  # no dashes
    return "\n".join(line.strip() for line in text.splitlines())


class CommandHelp(SphinxDirective):
    """Usage and options of a subcommand."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the parsed help of the subcommand."""
        return self.parse_text_to_nodes(help_of(self.arguments[0]))


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command", CommandHelp)
    return {"parallel_read_safe": True}

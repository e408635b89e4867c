"""Sphinx directive that shows the usage and the options of a subcommand of `dasksc`, from its parser.

A page has an empty block: ``{command}`` with the name of the subcommand as its argument.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from dasksc.cli import prepared

__all__ = ["CommandHelp", "help_of"]


def help_of(name: str) -> str:
    """Return usage, description and options of a subcommand in Markdown."""
    parser, _ = prepared(name)
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    lines = ["```console", f"$ {usage}", "```", "", _text((parser.description or "").rstrip()), ""]
    lines += ["| option | meaning |", "| --- | --- |"]
    for action in parser._actions:
        value = f" {action.metavar}" if action.metavar else ""
        flags = ", ".join(f"`{flag}{value}`".replace("|", "\\|") for flag in action.option_strings)
        if flags:
            lines.append(f"| {flags} | {_text((action.help or '').replace('%%', '%'))} |")
    return "\n".join(lines)


def _text(text: str) -> str:
    """Return text in Markdown, with literals where Markdown would read markup."""
    for mark, replacement in (("|", "\\|"), ("<", "&lt;"), ("[", "\\["), ("*", "\\*")):
        text = text.replace(mark, replacement)
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*(?=[\s,.;)]|$)", lambda option: f"`{option[0]}`", text)  # no dashes


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

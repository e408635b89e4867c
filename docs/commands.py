"""Sphinx directives that show the options of `dasksc`: of a subcommand, and of a section of a training configuration.

A page has an empty block: ``{command}`` with the name of the subcommand as its argument, or ``{keys}`` with the name of
the function or class whose parameters are the keys of the section.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from dasksc.cli import prepared
from dasksc.options import REQUIRED
from dasksc.train.config import keys_of

__all__ = ["CommandHelp", "SectionKeys", "help_of", "table_of"]


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


def table_of(name: str) -> str:
    """Return the keys of a section of a configuration, with their defaults and meanings, in Markdown."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for one in keys_of(name).values():
        default = "required" if one.default is REQUIRED else f"`{yaml.safe_dump(one.default).splitlines()[0]}`"
        rows.append(f"| `{one.name}` | {default} | {_text(one.help)} |")
    return "\n".join(rows)


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


class SectionKeys(SphinxDirective):
    """Keys of a section of a training configuration."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the parsed table."""
        return self.parse_text_to_nodes(table_of(self.arguments[0]))


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command", CommandHelp)
    app.add_directive("keys", SectionKeys)
    return {"parallel_read_safe": True}

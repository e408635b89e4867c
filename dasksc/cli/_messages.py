"""Messages in terms of the command line: options instead of Python arguments, and one warning instead of several."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import click

from dasksc.errors import DaskscError

__all__ = ["as_options", "collected_warnings", "errors_as_options", "folded", "print_warnings"]

# Value that error messages recommend, and the equivalent option.
_SKIP_SIGNATURE = ("storage_options={'skip_signature': True}", "--storage-option skip_signature=true")
# Advice that names an argument, and the same advice for commands that have no option for this argument.
_WITHOUT_OPTION = {
    "prefetch": ("fetch_factor, batch_size or prefetch,", "fetch_factor or batch_size,"),
    "genes_key": (", or match a column of var with genes_key=", ""),
}
# Advice about objects in Python, and the equivalent for a command.
_PYTHON_ADVICE = {
    re.compile(r"Select genes of the result: adata\[:, adata\.var\[.+?\]\.isin\(\[.*?\]\)\]"): "Leave it out",
    re.compile(r"Open it with dasksc\.Modalities\(\.\.\.\), which .+ scDataset"): (
        "Store one of them as an .h5ad file: mudata.read(path)[NAME].write_h5ad('NAME.h5ad')"
    ),
}
# A name without this character may also be a common word, so it is replaced only if "=" follows.
_IS_ARGUMENT = "_"
# Maximum width, in terminal columns, of the name that begins a report line, including the spaces after it.
_NAMED = 24
_QUOTED = re.compile("'([^']*)'")
_CONVERT = re.compile(r"(Store it by rows once: )?dasksc convert .+? NEW\.zarr")


def as_options(text: str) -> str:
    """Return a message with the Python arguments replaced by the options of the current command.

    Arguments in `_WITHOUT_OPTION` are left out of the advice if the command has no option for them. Other arguments
    without an option stay as they are.
    """
    context = click.get_current_context(silent=True)
    text = text.replace(*_SKIP_SIGNATURE)
    if context is None:
        return text
    for advice, instead in _PYTHON_ADVICE.items():
        text = advice.sub(instead, text)
    names = {option.name for option in context.command.params}
    for name, (before, after) in _WITHOUT_OPTION.items():
        if name not in names:
            text = text.replace(before, after)
    for option in context.command.params:
        if isinstance(option, click.Option):
            flag = option.opts[0]
            for name in dict.fromkeys((option.name or flag, flag.lstrip("-").replace("-", "_"))):
                text = _with_flag(text, name, flag, is_flag=option.is_flag)
        elif option.metavar and option.name:
            text = re.sub(rf"(?<![-\w]){option.name}=(?=['\"])", f"{option.metavar} ", text)
    # Some messages name both the argument and the option, as in "overwrite=True (--overwrite)".
    return re.sub(r"(--[\w-]+) \(\1\)", r"\1", text)


@contextmanager
def errors_as_options() -> Iterator[None]:
    """Express errors of dasksc in the ``with`` block in terms of the command line."""
    try:
        yield
    except DaskscError as error:
        text = as_options(str(error))
        if text == str(error):
            raise
        raise type(error)(text) from error


def _with_flag(text: str, name: str, flag: str, *, is_flag: bool) -> str:
    if is_flag:
        text = re.sub(rf"\buse {name}=False\b", f"leave out {flag}", text)
        return re.sub(rf"\b{name}=True\b", flag, text)
    text = re.sub(
        rf"(?<![-\w]){name}=\[('[^\]]*')\]", lambda found: f"{flag} {','.join(re.findall(_QUOTED, found[1]))}", text
    )
    text = re.sub(rf"(?<![-\w]){name}=(?=[\w'\"])", f"{flag} ", text)
    text = re.sub(rf"(?<![-\w]){name}=(?=[\s,;.)]|$)", flag, text)
    return re.sub(rf"(?<![-\w]){name}\b", flag, text) if _IS_ARGUMENT in name else text


class _Collector(logging.Handler):
    """Handler that collects warnings, grouped by message template."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.groups: dict[str, list[logging.LogRecord]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.groups.setdefault(str(record.msg), []).append(record)

    def print(self) -> None:
        """Print each group's first warning on stderr, with the number of further distinct warnings in the group."""
        for line in self._lines():
            click.echo(folded(f"dasksc: {line}", indent=2), err=True)
        self.groups.clear()

    def _lines(self) -> Iterator[str]:
        for records in self.groups.values():
            texts = list(dict.fromkeys(record.getMessage() for record in records))
            others = f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else ""
            yield f"warning: {_with_paths_of_command(as_options(texts[0]))}{others}"


def _with_paths_of_command(text: str) -> str:
    """Insert the paths of the command line into a warning that recommends a conversion."""
    context = click.get_current_context(silent=True)
    if context is None:
        return text
    if context.info_name == "convert":
        return _CONVERT.sub("The new store holds it by rows", text)
    paths = context.params.get("paths", ())
    return _CONVERT.sub(lambda found: f"{found[1] or ''}dasksc convert {shlex.join(map(str, paths))} NEW.zarr", text)


_collectors: list[_Collector] = []


@contextmanager
def collected_warnings() -> Iterator[None]:
    """Collect the warnings of dasksc in the ``with`` block, and print one per problem when the block ends."""
    collector, logger = _Collector(), logging.getLogger("dasksc")
    logger.addHandler(collector)
    _collectors.append(collector)
    try:
        yield
    finally:
        _collectors.remove(collector)
        logger.removeHandler(collector)
        collector.print()


def print_warnings() -> None:
    """Print the warnings collected so far, before a command begins to read."""
    for collector in _collectors:
        collector.print()


def folded(text: str, *, indent: int | None = None) -> str:
    """Fold the indented lines of a report at the width of the terminal.

    Parameters
    ----------
    text
        Lines of the report. Lines without indentation, such as its title, stay as they are.
    indent
        Indentation of continuation lines; if given, lines without indentation are folded too. Default: the column at
        which ``text`` begins in a line such as ``"  name     text"``.
    """
    width = shutil.get_terminal_size().columns - 1
    return "\n".join(_folded_line(line, width, indent) for line in text.splitlines())


def _folded_line(line: str, width: int, indent: int | None) -> str:
    if len(line) <= width or (indent is None and not line.startswith(" ")):
        return line
    body = line.lstrip(" ")
    lead = len(line) - len(body)
    if indent is None:
        named = re.search(r"\S {2,}(?=\S)", line[:_NAMED])
        indent = named.end() if named else max(lead, 4)
    return textwrap.fill(
        # textwrap would join the spaces that align columns.
        body.replace("  ", "\0\0"),
        width,
        initial_indent=" " * lead,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")

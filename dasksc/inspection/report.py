"""Report of facts, shown as text or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from dask.utils import format_bytes

_N_SHOWN = 12  # rows of a table
_WIDTH = 96


class Report(dict[str, Any]):
    """Facts by name, which are also attributes; ``print(report)`` shows them.

    A fact is a value, such as a number or a shape, or a section of several: a nested report, a list of texts, or a
    table, that is, a list of reports with the same names. Values that are None and empty sections are not shown, nor
    are the rows of a table after the first 12.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the report has no {name!r}, only {', '.join(self)}") from None

    def to_json(self) -> str:
        """Return all facts as one line of JSON."""
        return json.dumps(self, default=lambda value: value.item() if hasattr(value, "item") else str(value))

    def __str__(self) -> str:
        return "\n".join(line for title, rows in self._sections() for line in _lines(title, rows))

    __repr__ = __str__

    def _sections(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield the title and the rows of each section: first the values, without a title."""
        values = {name: fact for name, fact in self.items() if not isinstance(fact, dict | list) and fact is not None}
        if values:
            yield "", [[name, _text(name, value)] for name, value in values.items()]
        for name, fact in self.items():
            if isinstance(fact, Report) and fact:
                yield name, [row for _, rows in fact._sections() for row in rows]
            elif isinstance(fact, list) and fact and isinstance(fact[0], Report):
                columns = [column for column in fact[0] if any(row[column] is not None for row in fact)]
                rows = [[_text(column, row[column]) for column in columns] for row in fact[:_N_SHOWN]]
                more = [[f"and {len(fact) - _N_SHOWN:,} more"]] if len(fact) > _N_SHOWN else []
                yield name, [columns, *rows, *more]
            elif isinstance(fact, list) and fact:
                yield name, [[str(text)] for text in fact]


def _lines(title: str, rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a section; a row of one cell is a paragraph."""
    if title:
        yield title
    cells = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in rows:
        if len(row) == 1:
            yield textwrap.fill(row[0], _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        else:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield ("  " * bool(title) + line).rstrip()


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " x ".join(f"{size:,}" for size in value)
    if name.endswith("bytes"):
        return str(format_bytes(value))
    if name.endswith("_per_s"):
        return f"{value:,.0f} {name.removesuffix('_per_s')}/s"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

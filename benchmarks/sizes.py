"""Table of the sizes of dasksc and other loaders in docs/benchmarks.md.

``python benchmarks/sizes.py`` counts the sources of this repository and of the newest wheels of the other loaders,
which pip downloads, and writes the table.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from email import message_from_bytes
from pathlib import Path
from token import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, STRING
from tokenize import generate_tokens

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
TABLE = re.compile(r"(?<=<!-- sizes -->\n).*?(?=<!-- end -->)", re.DOTALL)
PEERS = ("scDataset", "annbatch", "cell-load", "tiledbsoma-ml", "turboloader")
HEAD = "| package | lines of Python | without docstrings, comments, blanks | modules | required dependencies |\n"


def code_lines(source: str) -> int:
    """Return the number of lines with code; tokens, since `ast` refuses the syntax of newer versions of Python."""
    lines: set[int] = set()
    previous = NEWLINE
    for token in generate_tokens(io.StringIO(source).readline):
        if token.type in (COMMENT, NL, INDENT, DEDENT, ENDMARKER):
            continue
        is_docstring = token.type == STRING and previous == NEWLINE
        if token.type != NEWLINE and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        previous = token.type
    return len(lines)


def row(name: str, sources: Mapping[str, str], dependencies: list[str]) -> str:
    """Return a row of the table."""
    n_lines = sum(len(source.splitlines()) for source in sources.values())
    n_code = sum(map(code_lines, sources.values()))
    n_required = sum("extra ==" not in line for line in dependencies)
    return f"| {name} | {n_lines:,} | {n_code:,} | {len(sources)} | {n_required} |\n"


def own_row() -> str:
    """Return the row of this repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = {str(path): path.read_text() for path in (ROOT / "dasksc").rglob("*.py")}
    return row(project["name"], sources, project["dependencies"])


def peer_row(name: str, folder: Path) -> str:
    """Download the wheel of a peer, and return its row."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--dest"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, folder / name, name], check=True)
    (path,) = (folder / name).iterdir()
    with zipfile.ZipFile(path) as wheel:
        sources = {one: wheel.read(one).decode() for one in wheel.namelist() if one.endswith(".py")}
        (metadata,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        about = message_from_bytes(wheel.read(metadata))
    return row(f"{name} {about['Version']}", sources, about.get_all("Requires-Dist") or [])


def main() -> None:
    """Write the table."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [own_row(), *(peer_row(name, Path(folder)) for name in PEERS)]
    table = HEAD + "| --- | ---: | ---: | ---: | ---: |\n" + "".join(rows)
    PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()

"""``dasksc demo-data``: files that the guides of the documentation read."""

from __future__ import annotations

import click

from dasksc.cli._messages import errors_as_options
from dasksc.cli._shared import aligned

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc demo-data demo
  dasksc demo-data . --overwrite
"""


@click.command(epilog=_EXAMPLES)
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def command(folder: str, overwrite: bool) -> None:
    """Write the example files of the guides to FOLDER.

    The files are small atlases of raw counts, about 5 MB in total, the same on every call. The guides are pages of the
    documentation.
    """
    from dasksc.datasets import demo_data

    with errors_as_options():
        contents = demo_data(folder, overwrite=overwrite)
    click.echo(aligned([(name, what) for name, what in contents.items()]))

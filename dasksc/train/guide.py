"""The layout of the published distributed-training guide, translated into ours.

Most of its keys are ours too. The others, and what they become:

.. code-block:: text

    data.source                    nothing: paths say what they are
    data.paths                     data.path
    data.gene_vocab                tokenizer.vocabulary
    data.max_genes                 tokenizer.max_genes
    data.streaming                 nothing: atlases are always streamed
    data.streaming_shuffle_buffer  data.fetch_factor: the rows of a fetch, which are shuffled together
    data.streaming_chunk_size      the same, where it is the larger one
    model.architecture             model.name
    training.batch_size            data.batch_size
"""

from __future__ import annotations

import logging
from typing import Any

from dasksc import InputError

__all__ = ["translated"]

logger = logging.getLogger(__name__)

_SOURCES = ("local", "file", "files", "h5ad", "anndata", "zarr")

# Section and key there, section and key here.
_MOVED = (
    ("data", "paths", "data", "path"),
    ("data", "gene_vocab", "tokenizer", "vocabulary"),
    ("data", "max_genes", "tokenizer", "max_genes"),
    ("model", "architecture", "model", "name"),
    ("training", "batch_size", "data", "batch_size"),
)


def translated(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose keys are ours.

    Parameters
    ----------
    tree
        Of either layout, or of both mixed. Not changed.

    Raises
    ------
    InputError
        If a key of theirs and the one of ours that it becomes have different values.
    """
    result = {name: dict(section) if isinstance(section, dict) else section for name, section in tree.items()}
    for section, key, new_section, new_key in _MOVED:
        if key in _section(result, section):
            value = result[section].pop(key)
            _put(result.setdefault(new_section, {}), new_key, value, f"{section}.{key}", f"{new_section}.{new_key}")
    data = _section(result, "data")
    if "source" in data:
        source = data.pop("source")
        if source not in _SOURCES:
            raise InputError(f"data.source={source!r} is not read; give files or stores ({', '.join(_SOURCES)})")
    if data.pop("streaming", True) is False:
        logger.info("data.streaming=false: rows are streamed all the same; the batches do not differ")
    rows = [data.pop(key) for key in ("streaming_chunk_size", "streaming_shuffle_buffer") if key in data]
    if any(not isinstance(n, int) or n < 1 for n in rows):
        raise InputError(f"data.streaming_chunk_size and streaming_shuffle_buffer must be numbers of rows; got {rows}")
    if rows:
        batch_size = data.get("batch_size", 64)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size={batch_size!r} must be a number of rows, of 1 or more and without quotes")
        factor = max(1, max(rows) // batch_size)
        _put(data, "fetch_factor", factor, "data.streaming_shuffle_buffer", "data.fetch_factor")
    return result


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _put(section: Any, key: str, value: Any, theirs: str, ours: str) -> None:
    if not isinstance(section, dict):
        raise InputError(f"{theirs} belongs to {ours}, whose section is {section!r}; make it a section of keys")
    if section.setdefault(key, value) != value:
        raise InputError(f"{theirs}={value!r} and {ours}={section[key]!r} are one setting; give one of them")

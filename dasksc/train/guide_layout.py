"""Translation of the alternative configuration layout, in which the section ``data`` has ``paths``.

Most keys are the same in both layouts. The others are translated as follows:

.. code-block:: text

    data.source                    removed: the type of an atlas follows from its path
    data.paths                     data.path
    data.gene_vocab                tokenizer.vocabulary; if the value is not a path, it is ignored, and tokens are the
                                   column numbers of genes in the atlas
    data.max_genes                 tokenizer.max_genes
    data.streaming                 removed: atlases are always streamed
    data.streaming_shuffle_buffer  data.fetch_factor: the size of the buffer in rows, divided by the batch size; the
                                   rows of a fetch are shuffled together
    data.streaming_chunk_size      data.fetch_factor in the same way, if the chunk size is larger than the shuffle
                                   buffer
    model.architecture             model.name
    training.batch_size            data.batch_size

Some keys have another meaning or default in files that have ``data.paths``:

.. code-block:: text

    tokenizer.max_genes            includes the cell token; 2048 by default
    tokenizer.prepend_cls          true by default
    tokenizer.masking              15% of the genes by default; of these, 10% are replaced at random and 10% are left
                                   unchanged
    training.fsdp                  takes precedence over training.strategy if that is ddp
"""

from __future__ import annotations

import logging
import os
from typing import Any

from dasksc import InputError
from dasksc.checks import is_whole

__all__ = ["translated"]

logger = logging.getLogger("dasksc.train.guide")

_SOURCES = ("local", "file", "files", "h5ad", "anndata", "zarr")

# Section and key in the alternative layout, and section and key in that of `Config`.
_MOVED = (
    ("data", "paths", "data", "path"),
    ("data", "gene_vocab", "tokenizer", "vocabulary"),
    ("tokenizer", "gene_vocab", "tokenizer", "vocabulary"),
    ("data", "max_genes", "tokenizer", "max_genes"),
    ("model", "architecture", "model", "name"),
    ("training", "batch_size", "data", "batch_size"),
)
_MASKING = {"mask_ratio": 0.15, "random_replace_ratio": 0.1, "keep_ratio": 0.1}


def translated(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in the layout of `Config`.

    Parameters
    ----------
    tree
        Configuration in either layout, or a mixture of both. It is not modified.

    Raises
    ------
    InputError
        If a key of the alternative layout and its translation have different values.
    """
    result = {name: dict(section) if isinstance(section, dict) else section for name, section in tree.items()}
    is_alternative = "paths" in _section(result, "data")
    for section, key, new_section, new_key in _MOVED:
        if key in _section(result, section):
            value = result[section].pop(key)
            if key == "gene_vocab" and _is_name(value):
                logger.info(
                    "%s.gene_vocab=%r is not a file, so tokens are the column numbers of genes in the atlas",
                    section,
                    value,
                )
                continue
            _put(result.setdefault(new_section, {}), new_key, value, f"{section}.{key}", f"{new_section}.{new_key}")
    data = _section(result, "data")
    if "source" in data:
        source = data.pop("source")
        if source not in _SOURCES:
            raise InputError(f"data.source={source!r} is not supported; give files or stores ({', '.join(_SOURCES)})")
    streaming = data.pop("streaming", True)
    if not isinstance(streaming, bool):
        raise InputError(f"data.streaming={streaming!r} must be true or false")
    if not streaming:
        logger.info("data.streaming=false has no effect: rows are always streamed; the batches are the same")
    rows = [data.pop(key) for key in ("streaming_chunk_size", "streaming_shuffle_buffer") if key in data]
    if not all(map(_is_number_of_rows, rows)):
        raise InputError(f"data.streaming_chunk_size and streaming_shuffle_buffer must be numbers of rows; got {rows}")
    if rows:
        batch_size = data.get("batch_size", 64)
        if not _is_number_of_rows(batch_size):
            raise InputError(f"batch_size={batch_size!r} must be a whole number of at least 1, without quotes")
        factor = max(1, int(max(rows)) // int(batch_size))
        _put(data, "fetch_factor", factor, "data.streaming_shuffle_buffer", "data.fetch_factor")
    if is_alternative:
        _apply_conventions(_section(result, "tokenizer"), _section(result, "training"))
    return result


def _apply_conventions(tokenizer: dict[str, Any], training: dict[str, Any]) -> None:
    """Apply the meanings and defaults of the alternative layout in place."""
    if tokenizer:
        tokenizer.setdefault("prepend_cls", True)
        tokenizer.setdefault("max_genes", 2048)
        masking = tokenizer.get("masking")
        if masking is None or isinstance(masking, dict):
            tokenizer["masking"] = _MASKING | (masking or {})
        # Other types are left to the schema, which refuses them.
        if tokenizer["prepend_cls"] is True and type(tokenizer["max_genes"]) is int:
            if tokenizer["max_genes"] < 2:
                raise InputError(
                    f"tokenizer.max_genes={tokenizer['max_genes']} leaves no room for genes beside the cell token"
                )
            tokenizer["max_genes"] -= 1
    if isinstance(training.get("fsdp"), dict) and training.get("strategy") == "ddp":
        training["strategy"] = "fsdp"


def _is_name(vocabulary: Any) -> bool:
    """Return True if the value names a list of genes and is not a path."""
    if not isinstance(vocabulary, str) or os.path.exists(vocabulary):
        return False
    return not os.path.splitext(vocabulary)[1] and os.path.basename(vocabulary) == vocabulary


def _is_number_of_rows(value: Any) -> bool:
    # `read_yaml` parses 1e4 as a float.
    return (is_whole(value) or (isinstance(value, float) and value.is_integer())) and value >= 1


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _put(section: Any, key: str, value: Any, theirs: str, ours: str) -> None:
    if not isinstance(section, dict):
        raise InputError(
            f"{theirs} is translated to {ours}, but the section that should contain {ours} is {section!r}; make that "
            "section a mapping of keys to values"
        )
    if section.setdefault(key, value) != value:
        raise InputError(f"{theirs}={value!r} and {ours}={section[key]!r} are the same setting; give one of them")

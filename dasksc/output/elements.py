"""Groups and elements of AnnData in a Zarr store."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anndata
import google_crc32c
import numpy as np

__all__ = ["as_anndata_writes", "is_node", "shard_index", "write_group"]

# Index entry of a chunk that was not written.
_ABSENT = (2**64 - 1, 2**64 - 1)


@contextmanager
def as_anndata_writes() -> Iterator[None]:
    """Suppress the warnings that libraries raise per element, and allow AnnData to write nullable strings."""
    settings = anndata.settings
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Unless the setting has an explicit value, AnnData warns, once per array, that its default will change.
        stack.enter_context(settings.override(auto_shard_zarr_v3=bool(settings.auto_shard_zarr_v3)))
        if hasattr(settings, "allow_write_nullable_strings"):
            stack.enter_context(settings.override(allow_write_nullable_strings=True))
        yield


def is_node(path: Path) -> bool:
    """Return True if a folder is a Zarr group or array."""
    return any((path / marker).exists() for marker in ("zarr.json", ".zgroup", ".zarray"))


def shard_index(chunks: list[tuple[int, int]], n_chunks: int) -> bytes:
    """Return the end of a shard of `n_chunks` chunks: offset and size of those written, and a checksum."""
    index: bytes = np.array(chunks + [_ABSENT] * (n_chunks - len(chunks)), dtype="<u8").tobytes()
    checksum: int = google_crc32c.value(index)
    return index + checksum.to_bytes(4, "little")


def write_group(folder: Path, attributes: dict[str, Any]) -> None:
    """Make a folder a Zarr group."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (folder / "zarr.json").write_text(json.dumps(metadata, indent=2))

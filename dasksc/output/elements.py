"""Groups and elements of AnnData in a Zarr store."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anndata


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


def write_group(folder: Path, attributes: dict[str, Any]) -> None:
    """Make a folder a Zarr group."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    (folder / "zarr.json").write_text(json.dumps(metadata, indent=2))

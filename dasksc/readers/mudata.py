"""MuData: several modalities of the same cells in one file or store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from dasksc.readers.anndata import AnnDataStore
from dasksc.readers.arrays import is_group
from dasksc.readers.interface import Store, StoredMatrix
from dasksc.storage import RemoteLocation, is_url
from dasksc.storage.remote.urls import ZARR_MARKERS
from dasksc.storage.zarr.zipped import is_zip, members_of


class MuDataStore(AnnDataStore):
    """A MuData: its own obs and obsm, and its modalities."""

    @classmethod
    def holds(cls, root: Any) -> bool:
        """Return True if the root group of a file or store is that of a MuData."""
        return "mod" in root and is_group(root["mod"])

    @cached_property
    def _modalities(self) -> dict[str, AnnDataStore]:
        stored = self._root["mod"]
        order = [str(name) for name in stored.attrs.get("mod-order", sorted(stored))]
        return {name: AnnDataStore(self._path, self._file, stored[name], self._options, self._sizes) for name in order}

    def modalities(self) -> Mapping[str, Store]:
        return self._modalities

    def keys(self) -> list[str]:
        """Return obs and the entries of obsm."""
        # An entry of obsm with the name of a modality is a mask of the cells of that modality.
        masks = {f"obsm/{name}" for name in self._modalities}
        keys = super().keys()
        return [key for key in keys if key == "obs" or (key.startswith("obsm/") and key not in masks)]

    def description(self) -> Iterator[StoredMatrix]:
        for name, store in self._modalities.items():
            yield from (replace(one, key=f"{name}/{one.key}") for one in store.description())


def holds_modalities(path: str) -> bool:
    """Return True if a path is that of a MuData: an ``.h5mu`` file, or a local Zarr store with modalities."""
    # The store may be zipped. A URL is recognized by its suffix only; a store at a URL is checked when it is opened.
    location = RemoteLocation.of(path) if is_url(path) else None
    if location is not None and location.local is None:
        return location.key.endswith(".h5mu")
    local = path if location is None or location.local is None else location.local
    if is_zip(local):
        return any(one.filename.startswith("mod/") for one in members_of(local))
    return local.endswith(".h5mu") or (
        os.path.isdir(os.path.join(local, "mod")) and any(os.path.exists(os.path.join(local, m)) for m in ZARR_MARKERS)
    )

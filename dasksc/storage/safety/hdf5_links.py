"""Checks that links in HDF5 files lead only to files in the same folder.

A file from an untrusted source may refer to any path on this machine.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import h5py

from dasksc.errors import StorageError


def check_links(root: h5py.File, path: str, *, folder: str | None) -> None:
    """Raise an error if a file has links to files outside a folder."""

    def look(name: str, link: Any) -> tuple[str, str] | None:
        if isinstance(link, h5py.ExternalLink):
            return None if _is_inside(link.filename, folder) else (name, link.filename)
        if folder is None and not isinstance(link, h5py.SoftLink):
            item = root[name]
            other = next(iter(_sources_of(item) + _external_of(item)), None) if isinstance(item, h5py.Dataset) else None
            return None if other is None else (name, other)
        return None

    # An error raised in the callback would be lost in HDF5, so it is raised afterwards.
    found = root.visititems_links(look)
    if found is not None:
        _refuse(path, found[0], found[1], folder)


def check_item(item: h5py.Dataset | h5py.Group, path: str, *, folder: str) -> None:
    """Raise an error if `item` or any of its values are in a file outside a folder; see `check_links`."""
    found = item.file.filename
    if not os.path.samefile(found, path) and not _is_inside(found, folder):
        _refuse(path, item.name.strip("/"), found, folder)
    if not isinstance(item, h5py.Dataset):
        return
    parent = os.path.dirname(found)
    # HDF5 looks for virtual sources next to the file first, and for external storage in the working directory.
    for other in _sources_of(item):
        if not _is_inside(other, parent):
            _refuse(path, item.name.strip("/"), other, folder)
    for other in _external_of(item):
        if not _is_inside(os.path.abspath(other) if os.path.exists(other) else other, parent):
            _refuse(path, item.name.strip("/"), other, folder)


def _sources_of(dataset: h5py.Dataset) -> list[str]:
    if not dataset.is_virtual:
        return []
    return [source.file_name for source in dataset.virtual_sources() if source.file_name != "."]


def _external_of(dataset: h5py.Dataset) -> list[str]:
    return [name for name, _, _ in dataset.external or ()]


def _is_inside(other: str, folder: str | None) -> bool:
    if folder is None:
        return False
    real = os.path.realpath(folder)
    found = os.path.join(real, other)
    # If a file does not exist in this folder, HDF5 looks for it in the working directory.
    if not os.path.exists(found) and os.path.exists(other):
        found = os.path.abspath(other)
    return os.path.realpath(found).startswith(real.rstrip("/") + "/")


def _refuse(path: str, name: str, other: str, folder: str | None) -> NoReturn:
    raise StorageError(
        f"{path}: /{name} lies in another file, {other!r}, which is not read: "
        + (
            "links are followed only within the folder of the file."
            if folder
            else "a link in a remote file would be followed on this machine, to a local file."
        )
        + " Open that file itself, or write the atlas as one file."
    )

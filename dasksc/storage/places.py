"""Where an atlas is that is not a path of this machine: a URL, and what it takes to read from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dasksc.errors import InputError, MissingPathError
from dasksc.storage.client import Client, client_of, shown, split_url

__all__ = ["SCHEMES", "Place", "is_url"]

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file")
ZARR_MARKERS = ("zarr.json", ".zgroup", ".zmetadata")


def is_url(path: str) -> bool:
    """Return whether `path` is a URL rather than a path."""
    return "://" in path


@dataclass(frozen=True, kw_only=True)
class Place:
    """An atlas behind a URL. Pickles with its options; what it shows has no credentials.

    Parameters
    ----------
    root
        URL of the store.
    key
        Of the file, or what the keys of a Zarr store begin with.
    options
        For obstore: credentials, region, endpoint.
    """

    root: str = field(repr=False)
    key: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any] | None = None) -> Place:
        """Return the place that a URL names.

        Raises
        ------
        InputError
            If its scheme is not known, or it has no path.
        """
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES:
            raise InputError(f"{shown(url)!r} begins with {scheme}://; known are {', '.join(SCHEMES)}")
        root, key = split_url(url)
        if not key:
            raise InputError(f"{shown(url)!r} names a whole store; add the path of an atlas in it")
        if ".." in key.split("/"):
            raise InputError(f"{shown(url)!r} has '..' in its path; write where it leads")
        return cls(root=root, key=key, options=dict(options or {}))

    def __str__(self) -> str:
        return self.local or f"{shown(self.root).rstrip('/')}/{self.key}"

    def __fspath__(self) -> str:
        return str(self)

    @property
    def local(self) -> str | None:
        """The path of this machine that it is, if it is one."""
        return f"/{self.key}" if self.root == "file:///" else None

    @property
    def client(self) -> Client:
        """What reads from the store, in this process."""
        return client_of(self.root, self.options)

    def below(self, name: str) -> Place:
        """Return the place of what is below this one, by its name; parts that are '..' are refused."""
        parts = [part for part in name.split("/") if part]
        if ".." in parts or "." in parts:
            raise InputError(f"{self}: the name {name!r} leads elsewhere")
        return Place(root=self.root, key="/".join([self.key, *parts]), options=self.options)

    def is_zarr(self) -> bool:
        """Return whether there is a Zarr group; up to three requests."""
        if self.key.endswith((".h5ad", ".h5", ".hdf5")):
            return False
        for marker in ZARR_MARKERS:
            try:
                self.client.stat(f"{self.key}/{marker}")
            except MissingPathError:
                continue
            return True
        return False

    @classmethod
    def of_local(cls, path: str) -> Place:
        """Return a path of this machine as a place."""
        return cls(root="file:///", key=os.path.abspath(path).strip("/"))

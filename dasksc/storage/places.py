"""Where an atlas is that is not a path of this machine: a URL, and what it takes to read from there."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dasksc.errors import InputError, MissingPathError
from dasksc.storage.client import Client, client_of, shown, split_url, url_of

__all__ = ["HDF5_ENDINGS", "Place", "is_url"]

HDF5_ENDINGS = (".h5ad", ".h5", ".hdf5")
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
        root, key = split_url(url)
        if not key:
            raise InputError(f"{shown(url)!r} names a whole store; add the path of an atlas in it")
        if ".." in key.split("/"):
            raise InputError(f"{shown(url)!r} has '..' in its path; write where it leads")
        return cls(root=root, key=key, options=dict(options or {}))

    def __str__(self) -> str:
        return self.local or url_of(shown(self.root), self.key)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def local(self) -> str | None:
        """The path of this machine that it is, if it is one."""
        return f"/{self.key}" if self.root == "file:///" else None

    @property
    def is_on_web(self) -> bool:
        """Whether it is on a web server, which does not tell what it has."""
        return self.root.startswith("http")

    @property
    def url(self) -> str:
        """The URL that it is the place of, with what may be in it of credentials; not of web servers."""
        return url_of(self.root, self.key)

    @property
    def client(self) -> Client:
        """What reads from the store, in this process."""
        return client_of(self.root, self.options)

    def below(self, name: str) -> Place:
        """Return the place of what is below this one, by its name; parts that are '..' are refused."""
        parts = [part for part in name.split("/") if part]
        if ".." in parts or "." in parts:
            raise InputError(f"{self}: the name {name!r} leads elsewhere")
        return Place(root=self.root, key="/".join(filter(None, [self.key, *parts])), options=self.options)

    def exists(self) -> bool:
        """Return whether there is an object; one request."""
        try:
            self.client.stat(self.key)
        except MissingPathError:
            return False
        return True

    def children(self) -> list[Place]:
        """Return what is directly below this place, by name.

        Raises
        ------
        StorageError
            If it is on a web server, which does not tell.
        """
        return [self.below(name) for name in self.client.children(self.key)]

    def matching(self) -> list[Place]:
        """Return the places that fit this one as a pattern, as for `glob.glob`, by name; one listing a folder."""
        names = self.key.split("/")
        n_plain = next(number for number, name in enumerate(names) if glob.has_magic(name))
        found = [Place(root=self.root, key="/".join(names[:n_plain]), options=self.options)]
        for pattern in names[n_plain:]:
            found = [one for place in found for one in place.children() if _fits(one.name, pattern)]
        return sorted(found, key=lambda place: place.key)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.key.rpartition("/")[2]

    def is_zarr(self) -> bool:
        """Return whether there is a Zarr group; up to three requests."""
        if self.key.endswith(HDF5_ENDINGS):
            return False
        return any(self.below(marker).exists() for marker in ZARR_MARKERS)

    @classmethod
    def of_local(cls, path: str) -> Place:
        """Return a path of this machine as a place."""
        return cls(root="file:///", key=os.path.abspath(path).strip("/"))


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and (not name.startswith(".") or pattern.startswith("."))

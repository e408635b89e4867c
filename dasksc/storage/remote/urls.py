"""Locations of atlases behind URLs, and patterns of paths and URLs."""

from __future__ import annotations

import glob
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from dasksc import config
from dasksc.errors import InputError, MissingPathError, StorageError
from dasksc.storage.remote.client import SCHEMES, ObstoreClient, redact_url
from dasksc.storage.remote.fsspec_client import FsspecClient, split_fsspec_url

HDF5_ENDINGS = (".h5ad", ".h5mu", ".h5", ".hdf5")
ZARR_MARKERS = ("zarr.json", ".zgroup", ".zmetadata")
# Part of a pattern that matches folders at any depth.
_STARS = "**"

Client: TypeAlias = ObstoreClient | FsspecClient

# Clients, one per process and store, shared by all arrays, tasks and threads.
_clients: dict[tuple[Any, ...], Client] = {}


def client_of(root: str, options: Mapping[str, Any]) -> Client:
    """Return the client of this process for the store at `root`."""
    try:
        key = (os.getpid(), root, pickle.dumps(sorted(options.items())), config.get_seconds("retry-timeout"))
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"storage_options must be plain values that can be pickled: {error}") from error
    client = _clients.get(key)
    if client is None:
        kind = ObstoreClient if urlsplit(root).scheme in SCHEMES else FsspecClient
        # The threads of a client of obstore do not survive a fork: requests would wait for them forever.
        inherited = (client for (pid, *_), client in list(_clients.items()) if pid != os.getpid())
        if kind is ObstoreClient and any(isinstance(client, ObstoreClient) for client in inherited):
            raise StorageError(
                f"{redact_url(root)} cannot be read in a forked process (pid {os.getpid()}), since obstore does not "
                "work after a fork. Start DataLoader workers with multiprocessing_context='spawn' or 'forkserver', or "
                "use num_workers=0"
            )
        # If threads race, each makes a client, and the first one is kept.
        client = _clients.setdefault(key, kind(root, options))
    return client


def _split_url(url: str) -> tuple[str, str]:
    """Split a URL into the root of its store and the key in the store."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        return split_fsspec_url(url)
    if parts.scheme in ("http", "https"):
        # Every request includes the query, which may be a token.
        return urlunsplit((parts.scheme, parts.netloc, "/", parts.query, "")), unquote(parts.path).strip("/")
    bucket, _, key = url.partition("://")[2].partition("/")
    if parts.scheme == "file":
        return "file:///", unquote(key).strip("/")
    # URLs of object stores contain the key as it is, without percent-encoding.
    return f"{parts.scheme}://{bucket}", key.strip("/")


def is_url(path: str) -> bool:
    """Return True if `path` is a URL rather than a local path."""
    return "://" in path


@dataclass(frozen=True, kw_only=True)
class RemoteLocation:
    """Location of an atlas behind a URL. Instances pickle with the options; the string form has no credentials."""

    root: str = field(repr=False)  # URL of the store
    key: str  # Key of the file, or the common prefix of the keys of a Zarr store
    # Options for obstore or fsspec, such as credentials, region and endpoint.
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any] | None = None) -> RemoteLocation:
        root, key = _split_url(url)
        if not key:
            raise InputError(f"{redact_url(url)!r} is the URL of a whole bucket or server; add the path of an atlas")
        if ".." in key.split("/"):
            raise InputError(f"{redact_url(url)!r} has '..' in its path; write the resolved path")
        return cls(root=root, key=key, options=dict(options or {}))

    def __str__(self) -> str:
        return self.local or _joined(redact_url(self.root), self.key)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def local(self) -> str | None:
        """Local path of a ``file:`` URL, otherwise None."""
        return f"/{self.key}" if self.root == "file:///" else None

    @property
    def is_on_web(self) -> bool:
        """True if the location is on a web server, which cannot list its files."""
        return self.root.startswith("http")

    @property
    def url(self) -> str:
        """URL of the location, including any credentials and query in it."""
        # `of` converts this URL back to the location.
        if self.is_on_web or self.root == "file:///":  # `of` decodes the percent signs of such a URL
            return urlunsplit(urlsplit(self.root)._replace(path=f"/{quote(self.key)}"))
        return _joined(self.root, self.key)

    @property
    def client(self) -> Client:
        """Client of the store in this process."""
        return client_of(self.root, self.options)

    def below(self, name: str) -> RemoteLocation:
        """Return the location `name` below this one; raise `InputError` if a component of `name` is '.' or '..'."""
        parts = [part for part in name.split("/") if part]
        if ".." in parts or "." in parts:
            raise InputError(f"{self}: the name {name!r} has a part '.' or '..' and may point outside this location")
        return RemoteLocation(root=self.root, key="/".join(filter(None, [self.key, *parts])), options=self.options)

    def exists(self) -> bool:
        """Return True if an object exists at the location; takes one request."""
        try:
            self.client.stat(self.key)
        except MissingPathError:
            return False
        return True

    def require_listing(self) -> None:
        """Raise `StorageError` for a location on a web server, which does not list its files."""
        if self.is_on_web:
            raise StorageError(
                f"{self} is on a web server, which does not list its files. Give the URLs of several atlases as a "
                "list. A Zarr store needs consolidated metadata: run zarr.consolidate_metadata(path) before uploading "
                "it."
            )

    def children(self) -> list[RemoteLocation]:
        """Return the locations directly below this one, sorted by name."""
        self.require_listing()
        return [self.below(name) for name in self.client.children(self.key)]

    def matching(self) -> list[RemoteLocation]:
        """Return the locations that match a pattern, sorted by name."""
        # The pattern is the key of this location. Patterns are those of the function `matching` of this module. The
        # call takes one listing per folder. Stores do not distinguish files from folders, so ``**`` also takes a
        # listing for each file that is not an atlas.
        names = _parts(self.key)
        n_plain = next(number for number, name in enumerate(names) if glob.has_magic(name))
        found = [RemoteLocation(root=self.root, key="/".join(names[:n_plain]), options=self.options)]
        listed: dict[str, list[RemoteLocation]] = {}

        def children(location: RemoteLocation) -> list[RemoteLocation]:
            if location.key not in listed:
                listed[location.key] = location.children()
            return listed[location.key]

        def folders(location: RemoteLocation) -> Iterator[RemoteLocation]:
            inside = [] if location.name.endswith((".zarr", *HDF5_ENDINGS)) else children(location)
            if not inside or any(one.name in ZARR_MARKERS for one in inside):
                return
            yield location
            for one in inside:
                if not one.name.startswith("."):
                    yield from folders(one)

        for pattern in names[n_plain:]:
            if pattern == _STARS:
                found = [folder for location in found for folder in folders(location)]
            else:
                inside = [one for location in found for one in children(location)]
                # A folder may have the name run[3].
                same = [one for one in inside if one.name == pattern]
                found = same or [one for one in inside if _fits(one.name, pattern)]
        return sorted({location.key: location for location in found}.values(), key=lambda location: location.key)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def is_zarr(self) -> bool:
        """Return True if the location is a Zarr group; takes up to three requests."""
        if self.key.endswith(HDF5_ENDINGS):
            return False
        try:
            return any(self.below(marker).exists() for marker in ZARR_MARKERS)
        except StorageError:
            # A presigned URL allows one object, and denies names below it.
            if not (self.is_on_web and self.exists()):
                raise
            return False

    @classmethod
    def of_local(cls, path: str) -> RemoteLocation:
        """Return the location of a local path."""
        return cls(root="file:///", key=os.path.abspath(path).strip("/"))


def _joined(root: str, key: str) -> str:
    return f"{root}{'' if root.endswith('/') else '/'}{key}"


def is_recursive(pattern: str) -> bool:
    """Return True if a pattern descends into folders at any depth."""
    return _STARS in pattern.split("/")


def matching(pattern: str) -> list[str]:
    """Return the local paths that match a pattern of `glob.glob`, sorted by name."""
    # ``**`` matches folders at any depth; at the end of a pattern, it matches their contents. It skips hidden folders,
    # symbolic links and the contents of Zarr stores.
    names = _parts(pattern)
    if _STARS not in names:
        return sorted(glob.glob(pattern))
    at = names.index(_STARS)
    before, rest = "/".join(names[:at]) or ("/" if pattern.startswith("/") else ""), "/".join(names[at + 1 :])
    found = set()
    for top in [before] if not glob.has_magic(before) else glob.glob(before):
        for folder in _folders(top):
            found.update(matching(os.path.join(glob.escape(folder), rest)))
    return sorted(found)


def _parts(pattern: str) -> list[str]:
    """Split a pattern at slashes, merge repeated ``**``, and add ``*`` after a final ``**``."""
    names = pattern.split("/")
    names = [name for number, name in enumerate(names) if name != _STARS or names[number - 1 : number] != [_STARS]]
    return [*names, "*"] if names[-1] == _STARS else names


def _folders(folder: str) -> Iterator[str]:
    """Yield a local folder and all folders below it that ``**`` matches."""
    if not os.path.isdir(folder or "."):
        return
    try:
        with os.scandir(folder or ".") as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise StorageError(f"{folder} cannot be listed: {error}. Give a pattern that excludes it.") from error
    if folder.rstrip("/").endswith(".zarr") or any(entry.name in ZARR_MARKERS for entry in inside):
        return
    yield folder
    for entry in inside:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _folders(os.path.join(folder, entry.name))


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and (not name.startswith(".") or pattern.startswith("."))

"""The seam for file formats: a `Reader` recognises a path, and opens a `Store` of tables and matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import pandas as pd

from dasksc.errors import MissingKeyError
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.names import names_in_pieces
from dasksc.readers.options import OpenOptions
from dasksc.storage import RemoteLocation

_DESCRIBED = ("X", "layers/", "obsm/", "raw/X")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """Storage of one matrix, as `dasksc.describe` reports it.

    Parameters
    ----------
    key
        Key of the matrix, such as ``"layers/counts"``.
    encoding
        ``"dense"``, ``"csr"`` or ``"csc"``.
    dtype, indices_dtype
        Data types of the values and of the column numbers; the latter is None if the matrix is dense.
    chunks, shards
        Shapes of the units of decoding and of the stored objects; None if there are none.
    codec
        Names of filters and compressors; None if there are none.
    nbytes, stored_bytes
        Size of the arrays, and of what is stored of them, in bytes; None if that is not known.
    """

    key: str
    encoding: str
    dtype: str
    indices_dtype: str | None = None
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    codec: str | None = None
    nbytes: int
    stored_bytes: int | None = None


class Store(Protocol):
    """An open file or store that holds one atlas.

    A store of another format subclasses `Store` and defines `keys`, `table` and `matrix`. Everything else has a default
    that uses these three.

    Attributes
    ----------
    attributes
        Metadata of the whole atlas, by name.
    selects_features
        True if the store honors the options ``feature_types`` and ``genome`` of `dasksc.open`. Otherwise, these options
        are refused.
    """

    attributes: Mapping[str, Any] = MappingProxyType({})
    selects_features: bool = False

    def __init__(self) -> None:  # otherwise, a Protocol shows a constructor of any arguments
        return

    @abstractmethod
    def keys(self) -> Collection[str]:
        """Return the keys of the elements, named as in AnnData.

        Returns
        -------
        Collection
            ``"obs"`` and ``"var"``; and what else the store has of ``"X"``, ``"layers/NAME"``, ``"obsm/NAME"``,
            ``"obsp/NAME"``, ``"raw/X"`` and ``"raw/var"`` (both or none), and of the keys that `value` describes.
        """

    @abstractmethod
    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read a table.

        Parameters
        ----------
        name
            ``"obs"``, ``"var"`` or ``"raw/var"``.
        columns
            Columns that the caller needs, all of which exist; None for all. Other columns are ignored.

        Returns
        -------
        DataFrame
            The table. The index holds the names of the rows. For obs, it may be a `pandas.RangeIndex` if the cells have
            no names, or if ``has_names`` of the options is False.
        """

    @abstractmethod
    def matrix(self, key: str) -> Any:
        """Open a matrix, without reading its values if possible.

        Parameters
        ----------
        key
            Key of X, of raw/X, or of an entry of layers, obsm or obsp.

        Returns
        -------
        object
            Matrix of cells by columns: an `h5py.Dataset`, a `zarr.Array`, or an HDF5 or Zarr group of a sparse matrix
            in AnnData's encoding, which dasksc reads row by row; a Dask array, read by chunks; a NumPy array or SciPy
            matrix, which workers receive as a whole. An entry of obsm may be anything that AnnData accepts.
        """

    def columns(self, name: str) -> Sequence[str]:
        """Return the columns of a table; override if `table` is slow.

        Parameters
        ----------
        name
            Name of the table, as for `table`.

        Returns
        -------
        Sequence
            Names of the columns, in order.
        """
        return list(self.table(name).columns)

    def value(self, key: str) -> Any:
        """Read another element into memory; override if `keys` has such elements.

        Parameters
        ----------
        key
            ``"uns"`` (a dict), ``"varm/NAME"``, ``"varp/NAME"`` or ``"raw/varm/NAME"``.

        Returns
        -------
        object
            The element.
        """
        raise MissingKeyError(f"this store has no {key!r}")

    def names(self) -> Iterator[Sequence[str]]:
        """Read the names of the cells; override to read large atlases in pieces.

        Yields
        ------
        Sequence
            The next names, in the order of the cells.
        """
        yield from names_in_pieces(self.table("obs", []).index)

    def names_type(self) -> tuple[str | None, Any] | None:
        """Return the type of the index of obs; override if `names` reads in pieces.

        Returns
        -------
        tuple or None
            Name and data type of the index; None if the names can only be read as a whole.
        """
        return None

    def description(self) -> Iterator[StoredMatrix]:
        """Describe the storage of the matrices; override to report chunks and codecs.

        Yields
        ------
        StoredMatrix
            X, an entry of layers or obsm, or raw/X.
        """
        for key in self.keys():
            lazy = lazily(self.matrix(key), key, OpenOptions()) if key.startswith(_DESCRIBED) else None
            if isinstance(lazy, Lazy):
                one = lazy.matrix
                nbytes = int(one.cost.row * one.shape[0])
                yield StoredMatrix(key=key, encoding=one.layout, dtype=str(one.stored_dtype), nbytes=nbytes)

    def modalities(self) -> Mapping[str, Store]:
        """Return the modalities of the cells, such as RNA and proteins.

        Returns
        -------
        Mapping
            A store for each modality, by name; empty if the store holds a single atlas.
        """
        return {}

    def close(self) -> None:
        """Release what the store holds; matrices that it opened remain usable."""
        return


class Reader(Protocol):
    """A file format.

    Attributes
    ----------
    suffixes
        Endings of the names of files of this format, such as ``(".npz",)``.
    listed_suffixes
        Endings of the names that stand for atlases where a folder or pattern is opened. Default: `suffixes`.
    options
        Names of the `reader_options` of `dasksc.open` that the reader accepts; others are refused.
    """

    suffixes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __init__(self) -> None:  # as for `Store`
        return

    @property
    def listed_suffixes(self) -> tuple[str, ...]:
        """Endings of the names that stand for atlases in folders."""
        return self.suffixes

    def matches(self, path: str | RemoteLocation) -> bool:
        """Return True if a path has this format.

        Parameters
        ----------
        path
            Absolute path of a file or folder that exists. For a URL, a location, whose text (``str(path)``) is the URL.

        Returns
        -------
        bool
            By default, whether the name ends with one of `suffixes`.
        """
        return str(path).endswith(self.suffixes)

    @abstractmethod
    def open(self, path: str | RemoteLocation, options: OpenOptions) -> Store:
        """Open a file or store.

        Parameters
        ----------
        path
            Path for which `matches` returned True.
        options
            Options of `dasksc.open`.

        Returns
        -------
        Store
            The open store.
        """

    def parts(self, path: str | RemoteLocation) -> list[str]:
        """Return the paths of the atlases that are to be opened in place of `path`.

        Parameters
        ----------
        path
            Path for which `matches` returned True.

        Returns
        -------
        list
            Paths or URLs, in order; empty if the path is one atlas itself.
        """
        return []

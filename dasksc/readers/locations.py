"""Paths and URLs as readers receive them, and errors that name them."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from anndata import OldFormatWarning

from dasksc.errors import InputError, MissingPathError, StorageError
from dasksc.readers.options import OpenOptions
from dasksc.storage import SCHEMES, RemoteLocation, caused_by_data, is_url, redact_url
from dasksc.storage.zarr.zipped import is_zip

# Scheme and remainder of a URL that lost a slash: "s3:/bucket/atlas.zarr".
_URL_WITH_ONE_SLASH = re.compile(rf"(?:^|/)((?:{'|'.join(SCHEMES)}):)/(.+)")


def where_of(path: str | os.PathLike[str], options: OpenOptions) -> str | RemoteLocation:
    """Return the absolute path of a local file; a `RemoteLocation` for a URL or a path read through a cache."""
    path = os.fspath(path)
    location = RemoteLocation.of(path, options.storage_options) if is_url(path) else None
    # The path is absolute, since tasks may run in processes with another working directory.
    local = os.path.abspath(path) if location is None else location.local
    if local is None:
        assert location is not None
        return location
    if not os.path.exists(local):
        raise MissingPathError(_nothing_at(local))
    # Byte ranges of an archive are read from the file itself, without the cache.
    return local if options.cache is None or is_zip(local) else RemoteLocation.of_local(local)


def _nothing_at(path: str) -> str:
    """Return the message for a path that does not exist, with similar names."""
    if url := _URL_WITH_ONE_SLASH.search(path):
        suggested_url = redact_url(f"{url[1]}//{url[2]}")
        return f"there is nothing at {suggested_url.replace('//', '/', 1)}; did you mean {suggested_url}?"
    folder, name = os.path.split(path)
    if not os.path.isdir(folder or "."):
        return f"there is nothing at {path}: {folder} is not a directory"
    near = difflib.get_close_matches(name, os.listdir(folder or "."), n=3)
    return f"there is nothing at {path}" + (f"; similar names: {', '.join(near)}" if near else "")


@contextmanager
def naming_errors(path: str | RemoteLocation) -> Iterator[None]:
    """Convert errors of the libraries to errors that name the file, and suppress warnings about old formats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OldFormatWarning)
        warnings.filterwarnings("ignore", message="Moving element from", category=FutureWarning)
        # AnnData 0.13 uses an option that pandas 3 deprecates.
        warnings.filterwarnings("ignore", message="The 'future.infer_string' option")
        try:
            yield
        except (StorageError, InputError):
            raise
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        # The libraries may raise any error for damaged metadata.
        except Exception as error:
            if not caused_by_data(error):
                error.add_note(f"The error occurred while {path} was opened.")
                raise
            raise StorageError(f"{path} cannot be read as AnnData: {error}") from error

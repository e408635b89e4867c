"""Publishing of predictions: agreement of the ranks, checks of existing stores, and completion of stores.

Ranks that predict together finish together, or all of them raise an error. A reader sees a key with all its rows or not
at all. In a new store, all keys appear at once. In an existing store, each key appears by the rename of its folder; the
metadata that lists the keys is replaced afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import zarr
from anndata.io import write_elem

from dasksc.atlas.elements import NAMES_ATTRIBUTE, names_digest_of
from dasksc.errors import InputError, StorageError
from dasksc.output.work_folder import WorkFolder, atomic_path, is_node
from dasksc.plan.ranks import World, shared_store
from dasksc.readers.names import digest_names
from dasksc.readers.options import OpenOptions
from dasksc.readers.registry import opened
from dasksc.storage import is_url

_POLL_S = 0.05
# Number of calls of `predict` that this process has begun, by rank and group, which tells records of calls apart.
_ordinals: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)


class Ranks:
    """Records of this call in the process group's key-value store: collectives would hang if a rank fails."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._store: Any = None
        if world.world_size > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            number = next(_ordinals[world.rank, world.group])
            self._store = shared_store(f"dasksc/predict/{attempt}/{world.group}/{number}")

    @property
    def can_agree(self) -> bool:
        return self.world.world_size == 1 or self._store is not None

    @property
    def is_first(self) -> bool:
        """True for the rank that acts for all ranks of the process group; without one, each rank acts for itself."""
        return self.world.rank == 0 or self._store is None

    def gather(self, name: str, value: str) -> list[str]:
        """Return the values of all ranks, none of which is empty; without a process group, only that of this rank."""
        if self._store is None:
            return [value]
        self._store.compare_set(f"{name} {self.world.rank}", "", value)
        keys = [f"{name} {rank}" for rank in range(self.world.world_size)]
        while not self._store.check(keys):
            self.check()
            time.sleep(_POLL_S)
        return [self._store.get(key).decode() for key in keys]

    def check(self) -> None:
        """Raise an error if another rank has failed."""
        if self._store is not None and self._store.check(["failed"]):
            raise StorageError(
                f"{self._store.get('failed').decode()}. Run the same command again to resume, on any number of ranks"
            )

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Make the other ranks fail if the body raises an error."""
        try:
            yield
        except BaseException as error:
            if self._store is not None:
                with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited
                    note = f"rank {self.world.rank} failed: {type(error).__name__}: {error}"
                    self._store.compare_set("failed", "", note)
            raise


Names = Callable[[], Iterable[Sequence[str]] | None]
"""Function that returns the names of the cells in pieces; None if the cells have no names."""

_DICT = {"encoding-type": "dict", "encoding-version": "0.1.0"}
_N_TOGETHER = 2**16


def target_path(out: Any) -> Path:
    """Return the absolute path of a store that can be created or extended."""
    if not isinstance(out, str | os.PathLike) or is_url(os.fspath(out)):
        raise InputError(f"out={out!r} is not a local path; give the path of a Zarr store: 'emb.zarr'")
    path = Path(os.path.abspath(out))
    around = next((folder for folder in path.parents if is_node(folder) or folder.is_file()), None)
    if around is not None:
        raise InputError(
            f"out={str(path)!r} lies inside {around}, which is a Zarr store or a file. Give the path of the store "
            "itself, with key=, or a path in a folder"
        )
    if path.suffix in (".h5ad", ".h5") or path.is_file():
        raise InputError(
            f"{path} is an h5ad file, or named like one, and predictions are written to a Zarr store. Give "
            "out='emb.zarr', and attach the store when you open the atlas: attach={'obsm/X_emb': 'emb.zarr'}"
        )
    if not is_node(path):
        if os.path.lexists(path):
            raise InputError(f"{path} exists and is not a Zarr store; give another path")
    elif not (path / "zarr.json").exists():
        raise InputError(f"{path} is a Zarr v2 store, to which nothing can be added; write another store: 'emb.zarr'")
    elif not (path / "obs").exists():
        raise InputError(f"{path} is not an AnnData store: it has no obs; give another out=")
    return path


def metadata_of(folder: Path) -> dict[str, Any]:
    """Return the metadata of a Zarr node; empty if there are none."""
    try:
        metadata: dict[str, Any] = json.loads((folder / "zarr.json").read_text())
    except (OSError, ValueError):
        return {}
    return metadata


def require_same_cells(store: Path, n_obs: int, names: Names) -> None:
    """Refuse an existing store whose cells differ in number from those of the atlas, or in their names."""
    with opened(str(store), OpenOptions(has_names=False)) as found:
        n_stored = len(found.table("obs", []))
        if n_stored != n_obs:
            raise InputError(f"{store} has {n_stored} cells, but the atlas has {n_obs}; give another out=")
        pieces, digest = names(), names_digest_of(found)
    if pieces is not None and digest is not None and digest_names(pieces) != digest:
        raise InputError(
            f"{store} has as many cells as the atlas, but their names or their order differ. To predict the cells of "
            f"{store}, give it as the atlas; otherwise, give another out="
        )


def complete_store(store: Path, n_obs: int, names: Names, columns: list[str]) -> None:
    """Add the other elements of AnnData to a folder with arrays in obsm and columns in obs."""
    # A process that was killed may have consolidated the metadata already.
    root = zarr.open_group(store, mode="a", zarr_format=3, use_consolidated=False)
    obs = root.require_group("obs")
    table = {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index", "column-order": columns}
    obs.update_attributes(table)
    digest = _write_names(obs, n_obs, names())
    root.require_group("obsm").update_attributes(_DICT)
    write_elem(root, "var", pd.DataFrame(index=pd.Index([], dtype=str)))
    root.update_attributes({"encoding-type": "anndata", "encoding-version": "0.1.0", NAMES_ATTRIBUTE: digest})
    zarr.consolidate_metadata(store)


def _write_names(obs: zarr.Group, n_obs: int, pieces: Iterable[Sequence[str]] | None) -> str | None:
    """Write the names of the cells, or their numbers; return the digest of the names, None if there are none."""
    starts = range(0, n_obs, _N_TOGETHER)
    numbers = ([str(row) for row in range(start, min(start + _N_TOGETHER, n_obs))] for start in starts)
    if "_index" in obs:  # written by a process that was killed
        del obs["_index"]
    index = obs.create_array("_index", shape=(n_obs,), chunks=(min(n_obs, _N_TOGETHER),), dtype=str)
    index.update_attributes({"encoding-type": "string-array", "encoding-version": "0.2.0"})

    def written() -> Iterator[Sequence[str]]:
        start = 0
        for piece in numbers if pieces is None else pieces:
            index[start : start + len(piece)] = np.array(piece, dtype=object)
            start += len(piece)
            yield piece
        if start != n_obs:
            raise StorageError(f"the atlas has {n_obs} cells and {start} names; it changed while it was read")

    digest = digest_names(written())
    return None if pieces is None else digest


def extend_store(store: Path, source: Path, keys: Iterable[str], columns: list[str]) -> None:
    """Move elements from the folder `source` to an existing store, each by a rename, and list columns of obs."""
    # Calls with other keys have other work folders, but change the same metadata.
    publishing = store.with_name(f"{store.name}.publishing")
    with WorkFolder(store, publishing, what="prediction").locked(wait=True):
        metadata = metadata_of(store)
        is_consolidated = metadata.pop("consolidated_metadata", None) is not None
        if is_consolidated:  # after a kill, it would describe elements that others have replaced
            with atomic_path(store / "zarr.json") as path:
                path.write_text(json.dumps(metadata))
        root: Any = zarr.open_group(store, mode="r+", use_consolidated=False)
        root.require_group("obsm").update_attributes(_DICT)
        for key in keys:
            if os.path.lexists(store / key):
                replaced = source / "replaced"
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(store / key, replaced)
            os.rename(source / key, store / key)
        order = list(root["obs"].attrs["column-order"])
        root["obs"].attrs["column-order"] = [*order, *(name for name in columns if name not in order)]
        if is_consolidated:
            zarr.consolidate_metadata(store)

"""Predictions as elements of AnnData in a Zarr store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from anndata.io import write_elem

from dasksc.atlas.cell_names import digest_names
from dasksc.errors import StorageError
from dasksc.inference.outputs import Output
from dasksc.inference.work import NanRows, Work
from dasksc.output.elements import write_group
from dasksc.output.work_folder import atomic_path

__all__ = [
    *(
        "ARRAY",
        "ATTRIBUTE",
        "CATEGORICAL",
        "NAN",
        "PublishedArray",
        "Nan",
        "found_in_store",
        "metadata_in",
        "remove_partial",
    ),
    *("replace_json", "write_metadata", "write_obs"),
]

Nan = Mapping[str, NanRows]

# Attributes of each key: the digest of the plan, and the rows with NaN.
ATTRIBUTE, NAN = "dasksc-predicted", "dasksc-nan"
ARRAY = {"encoding-type": "array", "encoding-version": "0.2.0"}
CATEGORICAL = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}


class PublishedArray(NamedTuple):
    """Published predictions: shape and type of the array, and the rows with NaN."""

    shape: tuple[int, ...]
    dtype: str
    nan: NanRows


def write_metadata(work: Work, one: Output, nan: Nan) -> None:
    """Write the metadata with which anndata reads the shards of an output as one element."""
    path = work.store / one.key
    own = {ATTRIBUTE: work.digest, NAN: list(nan.get(one.name, NanRows()))}
    if one.labels is None:
        work.array(one).write_metadata(path, {**ARRAY, **own})
        return
    write_group(path, {**CATEGORICAL, **own})
    work.array(one).write_metadata(path / "codes", ARRAY)
    write_elem(zarr.open_group(path, mode="a"), "categories", np.array(one.labels))


def write_obs(store: Path, n_obs: int, pieces: Iterable[Sequence[str]] | None, columns: list[str]) -> str | None:
    """Write the cell names and metadata of an obs table whose columns are already stored; return the names' digest."""
    has_names = pieces is not None
    given = _numbers(n_obs) if pieces is None else iter(pieces)
    group = zarr.open_group(store / "obs", mode="a", zarr_format=3)
    if "_index" in group:
        del group["_index"]
    index = group.create_array("_index", shape=(n_obs,), chunks=(min(n_obs, 2**16),), dtype=str)
    index.attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
    group.attrs.update(
        {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index", "column-order": columns}
    )

    def written() -> Iterator[Sequence[str]]:
        start = 0
        for piece in given:
            index[start : start + len(piece)] = np.array(piece, dtype=object)
            start += len(piece)
            yield piece
        if start != n_obs:
            raise StorageError(f"the atlas has {n_obs} cells and {start} names; the atlas changed while it was read")

    digest = digest_names(written())
    return digest if has_names else None


def _numbers(n_obs: int) -> Iterator[list[str]]:
    for start in range(0, n_obs, 2**16):
        yield [str(row) for row in range(start, min(start + 2**16, n_obs))]


def found_in_store(path: Path, digest: str) -> dict[str, PublishedArray]:
    found = {}
    for file in (file for group in ("obsm", "obs") for file in (path / group).glob("*/zarr.json")):
        attributes = metadata_in(file).get("attributes", {})
        if is_of(attributes.get(ATTRIBUTE, ""), digest):
            codes = file.parent / "codes" / "zarr.json"
            array = metadata_in(codes if codes.exists() else file)
            key = f"{file.parent.parent.name}/{file.parent.name}"
            found[key] = PublishedArray(tuple(array["shape"]), array["data_type"], NanRows(*attributes[NAN]))
    return found


def is_of(recorded: str, digest: str) -> bool:
    """Return True if a key with a recorded digest belongs to the plan with the given digest, of any run if it has none.

    See `dasksc.inference.work.Work`.
    """
    return digest in (recorded, recorded.partition("-")[0])


def metadata_in(file: Path) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return metadata


def replace_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2))


def remove_partial(store: Path) -> None:
    """Remove the partial files of killed processes."""
    for leftover in store.rglob(".*.partial"):
        leftover.unlink()

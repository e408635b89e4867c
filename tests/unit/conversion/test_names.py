"""Names of cells that a conversion reads and writes in pieces, compared with names in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import dasksc
from dasksc.conversion import tables
from dasksc.conversion.tables import StagedNames
from dasksc.errors import CorruptDataError
from dasksc.output.work_folder import as_anndata_writes
from dasksc.readers import names as cell_names
from dasksc.readers.options import OpenOptions
from tests.support.conversions import contents

pytestmark = pytest.mark.core


def written(path: Path, names: list[str], *, dtype: Any = object, index_name: str | None = "barcode") -> Path:
    index = pd.Index(names, dtype=dtype, name=index_name)
    obs = pd.DataFrame({"n": np.arange(len(names)), "kind": pd.Categorical(["a", "b"] * (len(names) // 2))}, index)
    table = pd.DataFrame({"x": np.arange(float(len(names)))}, index)
    X = sp.eye(len(names), 3, format="csr", dtype=np.float32)
    with as_anndata_writes():
        adata = ad.AnnData(X, obs, obsm={"table": table})
        adata.write_h5ad(path) if path.suffix == ".h5ad" else adata.write_zarr(path)
    return path


@settings(max_examples=settings.default.max_examples // 10)  # each takes long
@given(
    ends=st.lists(st.sampled_from(["", "é", "-1", "細胞"]), min_size=4, max_size=40),
    form=st.sampled_from(["h5ad", "zarr"]),
    dtype=st.sampled_from([object, "string"]),
    index_name=st.sampled_from(["barcode", None]),
    n_atlases=st.integers(1, 2),
    piece=st.sampled_from([3, 2**20]),
    how=st.fixed_dictionaries(
        {},
        optional={
            "filter": st.just("n % 3 != 1"),
            "genes": st.just(["2", "0"]),
            "group_by": st.just("kind"),
            "order": st.sampled_from(["keep", "shuffle"]),
            "verify": st.booleans(),
        },
    ),
)
def test_names_written_in_pieces_are_those_written_at_once(
    ends, form, dtype, index_name, n_atlases, piece, how, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("names")
    names = [f"{i}{end}" for i, end in enumerate(ends[: len(ends) // 2 * 2])]
    path = written(folder / f"atlas.{form}", names, dtype=dtype, index_name=index_name)
    data = path if n_atlases == 1 else [path] * n_atlases
    with mock.patch.object(tables, "_PIECE_ROWS", piece), mock.patch.object(cell_names, "_PIECE", piece):
        with mock.patch.object(StagedNames, "of", return_value=None):
            dasksc.convert(data, folder / "at once.zarr", **how)
        # Fail if cell names are read together with the obs table.
        with mock.patch("dasksc.readers.tables.read_names", side_effect=_of_genes):
            dasksc.convert(data, folder / "in pieces.zarr", **how)
    assert contents(folder / "in pieces.zarr") == contents(folder / "at once.zarr")


_read_names = cell_names.read_names


def _of_genes(stored: Any, *rest: Any, **options: Any) -> Any:
    assert not stored.name.startswith("/obs")
    return _read_names(stored, *rest, **options)


def test_names_with_keys_or_of_several_types_are_written_as_before(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    path = written(tmp_path / "atlas.h5ad", names)
    other = written(tmp_path / "other.zarr", names, dtype="string")
    assert StagedNames.of([path, other], OpenOptions(), tmp_path) is None
    dasksc.convert([path, path], tmp_path / "keys.zarr", order="keep", index_unique="-", keys=["x", "y"])
    dasksc.convert([path, other], tmp_path / "types.zarr", order="keep", join="inner")
    assert list(dasksc.open(tmp_path / "keys.zarr").obs_names) == [f"{n}-{key}" for key in "xy" for n in names]
    assert list(dasksc.open(tmp_path / "types.zarr").obs_names) == 2 * names


def test_verifying_finds_names_that_went_wrong_in_the_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "atlas.h5ad", ["a", "b", "c", "d"])
    write = StagedNames.write

    def damaged(names: StagedNames, n: int) -> bool:
        repeat = write(names, n)
        text = names.folder / "text"
        text.write_bytes(text.read_bytes().replace(b"c", b"x"))
        return repeat

    monkeypatch.setattr(StagedNames, "write", damaged)
    with pytest.raises(CorruptDataError, match="differs from the input in the names of the cells"):
        dasksc.convert(path, tmp_path / "out.zarr", verify=True)

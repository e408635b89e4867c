"""Several atlases opened as one, compared with `anndata.concat` in memory."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from anndata import AnnData
from hypothesis import given, settings
from hypothesis import strategies as st

import dasksc
from dasksc.errors import InputError, MissingKeyError, MissingPathError, StorageError
from dasksc.storage import files
from dasksc.storage.arrays import logical_dtype
from tests.support.data import arrays_of, dense, same, write_store

GENES = np.array([f"gene{i}" for i in range(40)])
PARTS = ["layers/twice", "obsm/pca", "obsm/table", "raw"]
pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings(
        "ignore:(Observation|Variable) names are not unique",
        "ignore:.*has (several )?data types?.* and becomes",
        "ignore:The behavior of DataFrame concatenation with empty",  # issued by pandas when AnnData joins
        "ignore:Only some AnnData objects have `.raw`",  # issued by AnnData for the expected result
    ),
]


def atlas(
    seed: int,
    n_obs: int,
    genes: np.ndarray | None = None,
    *,
    dtype: str = "float32",
    layout: str = "csr",
    has: Collection[str] = ("layers/twice", "obsm/pca"),
) -> AnnData:
    rng = np.random.default_rng(seed)
    genes = rng.permutation(GENES)[: rng.integers(20, 35)] if genes is None else genes
    values = np.where(rng.random((n_obs, len(genes))) < 0.3, rng.integers(1, 90, (n_obs, len(genes))), 0).astype(dtype)
    kinds = rng.permutation(list("ABCDE"))[:3]
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(rng.choice(kinds, n_obs), categories=kinds),
            "n": rng.integers(0, 9, n_obs),
            "note": rng.choice(["x", "y"], n_obs),
        },
        index=[f"cell{seed}-{i}" for i in range(n_obs)],
    )
    x = values if layout == "dense" else sp.csr_matrix(values)
    var = pd.DataFrame({"length": rng.integers(1, 99, len(genes))}, index=genes)
    adata = AnnData(X=x, obs=obs, var=var)
    if "layers/twice" in has:
        adata.layers["twice"] = x * 2
    if "obsm/pca" in has:
        adata.obsm["pca"] = rng.random((n_obs, 3 + seed % 3), dtype=np.float32)
    if "obsm/table" in has:
        columns_of_table = ["a", "b", "c"][seed % 2 :]
        adata.obsm["table"] = pd.DataFrame(
            rng.integers(0, 9, (n_obs, len(columns_of_table))), index=adata.obs_names, columns=columns_of_table
        )
    if "raw" in has:
        of_raw = rng.permutation(GENES)[:36]
        counts = rng.integers(0, 3, (n_obs, len(of_raw))).astype(np.int16)
        adata.raw = AnnData(
            X=counts if layout == "dense" else sp.csr_matrix(counts),
            obs=adata.obs,
            var=pd.DataFrame({"length": rng.integers(1, 99, len(of_raw))}, index=of_raw),
        )
    return adata


def write(adata: AnnData, path: Path, kind: str) -> Path:
    written = write_store(adata, path.parent, "zarr3" if kind == "zarr" else "h5ad", path.name)
    if kind == "gzip":
        adata.write_h5ad(written, compression="gzip")
    return written.rename(path.with_suffix(".zarr" if kind == "zarr" else ".h5ad"))


def assert_same(got: AnnData, expected: AnnData, *, same_types: bool = True) -> None:
    if expected.n_obs == 0:
        del got.raw  # AnnData drops raw on construction if it has no cells.
    same(got, expected)
    ours = arrays_of(got)
    for name, eager in arrays_of(expected).items():
        if isinstance(eager, pd.DataFrame):
            continue
        lazy = ours[name]
        # AnnData 0.13 may return float64 for parts without rows and for obsm arrays of different widths.
        is_float = name.startswith("obsm/") and lazy.dtype.kind == eager.dtype.kind == "f"
        # Integers in files are converted to a floating type; arrays in memory keep their type. AnnData widens integers
        # to float64 where it fills in NaN; raw's int16 in files is converted to float32, which represents NaN.
        types = {eager.dtype, logical_dtype(eager.dtype)} | (
            {logical_dtype(np.dtype(np.int16))} if name == "raw/X" else set()
        )
        assert lazy.dtype in types or not same_types or is_float, name
        assert sp.issparse(lazy._meta) == sp.issparse(eager), name


@settings(max_examples=settings.default.max_examples * 3 // 10)  # each takes long
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=3, unique=True),
    sizes=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    kinds=st.lists(st.sampled_from(["plain", "gzip", "zarr", "memory"]), min_size=3, max_size=3),
    dtypes=st.lists(st.sampled_from(["float32", "int32"]), min_size=3, max_size=3),
    layouts=st.sampled_from([["csr"] * 3, ["dense"] * 3, ["csr", "dense", "csr"]]),
    genes=st.one_of(st.none(), st.lists(st.sets(st.integers(0, 39), min_size=1), min_size=3, max_size=3)),
    has_common=st.booleans(),
    join=st.sampled_from(["inner", "outer"]),
    fill_value=st.sampled_from([None, 0, -1, 0.5]),
    label=st.sampled_from([None, "source"]),
    has=st.one_of(st.just([PARTS] * 3), st.lists(st.sets(st.sampled_from(PARTS)), min_size=3, max_size=3)),
)
def test_several_atlases_equal_those_joined_by_anndata(
    tmp_path_factory: pytest.TempPathFactory,
    seeds,
    sizes,
    kinds,
    dtypes,
    layouts,
    genes,
    has_common,
    join,
    fill_value,
    label,
    has,
) -> None:
    folder = tmp_path_factory.mktemp("several")
    # Each atlas has some or all of the genes, in random order; one gene may be common to all atlases.
    chosen = [set(range(30))] * 3 if genes is None else [one | {7} if has_common else one for one in genes]
    adatas = [
        atlas(
            seed,
            n,
            np.random.default_rng(seed).permutation(GENES[sorted(one)]) if genes else GENES[:30],
            dtype=dtype,
            layout=layout,
            has=held,
        )
        for seed, n, dtype, layout, held, one in zip(seeds, sizes, dtypes, layouts, has, chosen, strict=False)
    ]
    parts = [
        adata if kind == "memory" else write(adata, folder / f"part{i}", kind)
        for i, (adata, kind) in enumerate(zip(adatas, kinds, strict=False))
    ]
    keys = [f"key{i}" for i in range(len(parts))]
    options = {"join": join, "label": label, "keys": keys, "index_unique": "-"}
    if join == "outer" and fill_value is not None:
        options["fill_value"] = 0 if "csr" in layouts[: len(parts)] else fill_value
    if join == "inner" and not set.intersection(*chosen[: len(parts)]):
        with pytest.raises(InputError, match="no variable in common"):
            dasksc.open(parts, **options)
        return
    expected = anndata.concat(adatas, **options)
    got = dasksc.open(parts, **options)
    # dasksc widens a data type only if it cannot represent the fill value. AnnData also widens it if a part lacks the
    # whole matrix.
    assert_same(got, expected, same_types=0 not in sizes and "fill_value" not in options)

    # The rows of batches equal those of the concatenated matrix, with all variables as well as with some of them.
    n_obs = expected.n_obs
    if n_obs == 0:
        return
    one_common = [name for name in expected.var_names if all(name in adata.var_names for adata in adatas)][:1]
    for some in (None, expected.var_names[::-3], one_common or expected.var_names[:1]):
        dataset = dasksc.scDataset(
            got, dasksc.BlockShuffling(4), batch_size=7, fetch_factor=3, genes=some, obs=["n"], seed=1
        )
        values = dense(expected.X if some is None else expected[:, some].X)
        seen = []
        for batch in dataset:
            np.testing.assert_array_equal(batch.X.numpy(), values[batch.index.numpy()].astype(batch.X.numpy().dtype))
            np.testing.assert_array_equal(batch.obs["n"], expected.obs["n"].to_numpy()[batch.index.numpy()])
            seen.append(batch.index)
        assert sorted(torch.cat(seen).tolist()) == list(range(n_obs))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("three")
    return [write(atlas(i, 30 + i), folder / f"part{i}", kind) for i, kind in enumerate(["plain", "gzip", "zarr"])]


def test_a_directory_a_pattern_a_dict_and_a_list_are_the_same(three: list[Path]) -> None:
    expected = dasksc.open([three[0], three[1], three[2]], join="outer", label="source")
    folder = three[0].parent
    for one in (folder, {path.stem: path for path in three}):
        assert_same(dasksc.open(one, join="outer", label="source"), expected.to_memory())
    assert list(expected.obs["source"].cat.categories) == ["part0", "part1", "part2"]
    some = dasksc.open(str(folder / "part*.h5ad"))
    assert some.n_obs == 61


def test_a_store_of_groups_as_annbatch_writes_it_opens_as_one(tmp_path: Path) -> None:
    import zarr

    parts = {i: atlas(i, 20, GENES, has=[]) for i in (0, 2, 10)}  # sorted as text, part 10 would precede part 2
    zarr.open_group(tmp_path / "store", mode="w", zarr_format=3)
    for i, part in parts.items():
        write(part, tmp_path / f"part{i}", "zarr").rename(tmp_path / "store" / f"dataset_{i}")
    got = dasksc.open(tmp_path / "store")
    assert_same(got, anndata.concat(list(parts.values())))


def test_columns_of_obs_that_some_lack_are_missing_there(tmp_path: Path) -> None:
    parts = [atlas(0, 10), atlas(1, 12), atlas(2, 8)]
    del parts[1].obs["n"], parts[1].obs["note"], parts[2].obs["cell_type"]
    paths = [write(part, tmp_path / f"part{i}", "plain") for i, part in enumerate(parts)]
    assert_same(dasksc.open(paths, join="outer"), anndata.concat(parts, join="outer"))
    assert list(dasksc.open(paths, join="outer", obs=["note"]).obs.columns) == ["note"]
    both = dasksc.open(paths, join="outer")
    dataset = dasksc.scDataset(both, dasksc.Streaming(), batch_size=30, obs=["cell_type", "n"])
    (batch,) = dataset
    assert (batch.obs["cell_type"] == -1).nonzero().flatten().tolist() == list(range(22, 30))
    assert dataset.categories["cell_type"] == both.obs["cell_type"].cat.categories.tolist()
    assert batch.obs["n"].isnan().nonzero().flatten().tolist() == list(range(10, 22))
    with pytest.raises(MissingKeyError, match="no column 'note'"):
        dasksc.open(paths, obs=["note"])


def test_atlases_without_a_common_variable_are_refused_with_both_kinds_of_names(tmp_path: Path) -> None:
    ensembl = np.array([f"ENSG{i}" for i in range(40)])
    of_symbols = [write(atlas(i, 5, GENES), tmp_path / f"symbols{i}", "plain") for i in range(2)]
    other = write(atlas(1, 4, ensembl), tmp_path / "ensembl", "plain")
    with pytest.raises(InputError, match="'symbols0'.*'gene0'.*'ensembl'"):
        dasksc.open([*of_symbols, other])
    assert dasksc.open([of_symbols[0], other], join="outer").shape == (9, 80)


def test_orders_of_categories_that_differ_are_lost(tmp_path: Path) -> None:
    for i, order in enumerate((["lo", "hi"], ["hi", "lo"])):
        obs = pd.DataFrame({"size": pd.Categorical(["lo", "hi"], order, ordered=True)}, index=[f"{i}a", f"{i}b"])
        AnnData(np.ones((2, 1), "f4"), obs=obs).write_h5ad(tmp_path / f"{i}.h5ad")
    with pytest.warns(UserWarning, match="size"):
        assert dasksc.open(tmp_path / "*.h5ad").obs["size"].tolist() == ["lo", "hi"] * 2


@pytest.mark.parametrize(
    ("dtype", "fill_value", "wider"),
    [("uint8", 0, None), ("uint8", -1, "int16"), ("int32", -1, None), ("int32", 0.5, "float64")],
)
def test_types_stay_as_narrow_as_their_fill_values_allow(dtype: str, fill_value: float, wider: str | None) -> None:
    parts = [atlas(i, 10, GENES[5 * i : 5 * i + 20], dtype=dtype, layout="dense", has=[]) for i in range(2)]
    parts[0].layers["twice"] = parts[0].X  # the other part lacks this layer
    with warnings.catch_warnings():
        if fill_value == 0:
            warnings.simplefilter("error", UserWarning)
        got = dasksc.open(parts, join="outer", index_unique="-", fill_value=fill_value)
    expected = anndata.concat(parts, join="outer", index_unique="-", fill_value=fill_value)
    assert got.X.dtype == got.layers["twice"].dtype == np.dtype(wider or dtype)
    np.testing.assert_array_equal(dense(got.X.compute()), dense(expected.X))
    np.testing.assert_array_equal(dense(got.layers["twice"].compute()), dense(expected.layers["twice"]))
    # NumPy has this type, and kernels lack it.
    for batch in dasksc.scDataset(got, "stream", got.n_obs, dtype="float16"):
        np.testing.assert_array_equal(batch.numpy(), dense(expected.X).astype("float16"))
    refused = dasksc.scDataset(got, dasksc.Streaming(), 4, dtype="uint8", rank=0, world_size=1)
    if fill_value:
        with pytest.raises(InputError, match=f"{fill_value}.*uint8"):
            next(iter(refused))
    else:
        assert next(iter(refused)).dtype == torch.uint8


def test_fetches_of_several_pickle_and_join(three: list[Path]) -> None:
    adata = dasksc.open(three, join="outer")
    matrix = dasksc.AnnDataView(adata)._matrix("X", adata.X)
    rows = np.arange(0, adata.n_obs, 2)
    fetched = matrix.fetch(rows)
    expected = dense(adata.X.compute())[rows]
    for one in (fetched, pickle.loads(pickle.dumps(fetched)), pickle.loads(pickle.dumps(matrix)).fetch(rows)):
        out = np.full(one.shape, 7, np.float32)
        one.gather(np.arange(len(rows)), out=out)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("data", "options", "error", "match"),
    [
        ([], {}, InputError, "contains no atlas; give at least one path"),
        ("none*.h5ad", {}, MissingPathError, "no file matches the pattern"),
        ([3], {}, InputError, "builtins.int"),
        ([atlas(0, 3)], {"join": "left"}, InputError, "'inner'.*'outer'"),
        ([atlas(0, 3)], {"merge": "all"}, InputError, "merge.*'same'.*'unique'.*'all'"),
        ([atlas(0, 3), atlas(1, 3)], {"keys": ["a"]}, InputError, "must be a list of 2 names"),
        ({"a": atlas(0, 3)}, {"keys": ["a"]}, InputError, "whose keys are already the names"),
        ([atlas(0, 3), atlas(1, 3)], {"fill_value": 0}, InputError, "join='outer'.*fill_value"),
        ([atlas(0, 3)], {"join": "outer", "fill_value": "0"}, InputError, "fill_value='0'"),
        ([atlas(0, 3), atlas(1, 3)], {"join": "outer", "fill_value": 1}, InputError, "fill_value=0"),
        (atlas(0, 3), {"join": "outer", "fill_value": 0}, InputError, "fill_value="),
    ],
    ids=str,
)
def test_incompatible_atlases_and_options_are_refused(
    data: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        dasksc.open(data, **options)


def test_variables_that_repeat_are_refused() -> None:
    with pytest.raises(InputError, match=r"\['gene0'\]"):
        dasksc.open([atlas(0, 3), atlas(1, 3, GENES[[0, 0, 1]])])


def test_many_files_are_opened_and_read_without_keeping_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_OPEN", 10)
    paths = [write(atlas(i, 8, GENES), tmp_path / f"{i}", "plain") for i in range(24)]

    def n_handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    # Let the libraries open their own files before handles are counted.
    for _ in dasksc.scDataset(paths[:2], dasksc.Streaming(), 8, seed=0):
        pass
    before = n_handles()
    opened = dasksc.open(paths, mmap=False)
    assert n_handles() <= before + 2
    most, n_rows = 0, 0
    for batch in dasksc.scDataset(opened, dasksc.BlockShuffling(2), 48, 4, seed=0):
        most, n_rows = max(most, n_handles()), n_rows + len(batch)
    assert n_rows == 192
    # At most ten files stay open, and each thread may be opening another.
    assert most <= before + 10 + 4


def test_files_keep_a_limited_number_of_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_MAPPED", 10)
    paths = [write(atlas(i, 8, GENES), tmp_path / f"{i}", "plain") for i in range(24)]
    data = dasksc.scDataset(dasksc.open(paths, mmap=True), dasksc.Streaming(), 8, seed=0)
    assert sum(len(batch) for _ in range(2) for batch in data) == 384
    mapped = Path("/proc/self/maps").read_text()
    assert 0 < sum(str(path) in mapped for path in paths) <= 10


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Atlases at three depths, a hidden atlas, and a Zarr store that contains a file named like an atlas."""
    tmp_path = tmp_path_factory.mktemp("tree")
    for name in ("A", "sub/C", "sub/deep/D", ".hidden/E"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(atlas(0, 3, GENES), tmp_path / name, "plain")
    write(atlas(0, 3, GENES), tmp_path / "sub" / "Z", "zarr")
    write(atlas(0, 3, GENES), tmp_path / "sub" / "Z.zarr" / "within", "plain")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**/*.h5ad", ["A", "C", "D"]),
        ("**/**/*.h5ad", ["A", "C", "D"]),
        ("**", ["A", "C", "Z", "D"]),
        ("**/deep/*.h5ad", ["D"]),
        ("s*/**/[CD].h5ad", ["C", "D"]),
        ("*/*.h5ad", ["C"]),
        ("[As]*", ["A", "C", "Z"]),
    ],
)
def test_two_stars_stand_for_folders_of_any_depth_and_folders_that_fit_open(
    tree: Path, pattern: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    given = f"{tree}/{pattern}" if pattern.startswith("*") else pattern
    opened = dasksc.open([given], label="part")
    assert opened.obs["part"].cat.categories.tolist() == found


def test_matches_of_a_pattern_that_are_not_atlases_are_named(tree: Path) -> None:
    with pytest.raises(StorageError, match="/empty"):
        dasksc.open(f"{tree}/*")
    with pytest.raises(MissingPathError, match="no file matches the pattern"):
        dasksc.open(f"{tree}/empty/**")


@pytest.mark.parametrize("what", ["*.h5ad", ""])
def test_the_only_match_of_a_pattern_or_folder_opens_like_its_path(tmp_path: Path, what: str) -> None:
    adata = atlas(0, 6, GENES, has=PARTS)
    adata.uns["about"] = "it"
    path = write(adata, tmp_path / "part", "plain")
    alone, found = dasksc.open(path), dasksc.open(f"{tmp_path}/{what}")
    assert_same(found, alone.to_memory())
    assert found.uns["about"] == "it"
    labelled = dasksc.open(f"{tmp_path}/{what}", label="batch", keys=["k"], index_unique="-")
    assert labelled.obs["batch"].tolist() == ["k"] * 6
    assert labelled.obs_names.tolist() == [f"{name}-k" for name in alone.obs_names]
    assert labelled.raw.obs_names.equals(labelled.obs_names)


def labelled(folder: Path, *columns: Any) -> list[Path]:
    """Write an atlas of two cells for each of the columns `kind`."""
    paths = []
    for i, column in enumerate(columns):
        obs = pd.DataFrame({"kind": column, "n": [1, 2]}, index=[f"{i}-{j}" for j in range(2)])
        paths.append(folder / f"{i}.h5ad")
        AnnData(np.ones((2, 1), np.float32), obs=obs, var=pd.DataFrame(index=["g"])).write_h5ad(paths[-1])
    return paths


def test_categories_of_several_types_are_no_labels(tmp_path: Path) -> None:
    columns = [0, 1], ["0", "1"]
    adata = dasksc.open(labelled(tmp_path, *map(pd.Categorical, columns)))
    for use in (
        lambda: dasksc.scDataset(adata, obs=["kind"], seed=0),
        lambda: len(dasksc.scDataset(adata, dasksc.ClassBalancedSampling(label_key="kind"), seed=0)),
        lambda: dasksc.statistics(adata, by="kind"),
        lambda: dasksc.split(adata, by="kind"),
        lambda: dasksc.ClassBalancedSampling(np.array([*columns[0], *columns[1]], dtype=object)).get_len(adata),
    ):
        with pytest.raises(InputError, match="kind|labels"):
            use()
    assert len(dasksc.scDataset(adata, batch_size=1, obs=["n"], seed=0)) == 4


def test_equal_numbers_are_one_label_and_orders_of_categories_are_united(tmp_path: Path) -> None:
    numbers = dasksc.open(labelled(tmp_path, pd.Categorical([0, 1]), pd.Categorical([1.0, 0.0])))
    assert dasksc.scDataset(numbers, obs=["kind"], seed=0).categories == {"kind": [0, 1]}
    united = dasksc.open(labelled(tmp_path, pd.Categorical(["a", "b"]), pd.Categorical(["b", "a"], ["b", "a"])))
    assert sorted(dasksc.scDataset(united, obs=["kind"], seed=0).categories["kind"]) == ["a", "b"]


@pytest.mark.parametrize("n", [1, 2])
def test_label_replaces_no_column(tmp_path: Path, n: int) -> None:
    paths = labelled(tmp_path, *[["a", "b"]] * n)
    given = paths if n > 1 else str(tmp_path)
    for use in (dasksc.open, lambda paths, label: dasksc.convert(paths, tmp_path / "out.zarr", label=label)):
        with pytest.raises(InputError, match="label=.*'0'"):
            use(given, label="kind")

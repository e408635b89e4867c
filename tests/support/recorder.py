"""Digests of the package's output for each case, identical on every machine.

A refactoring must leave them unchanged. The atlas is generated with integer arithmetic. Most cases copy or double its
values, and square roots are rounded correctly by every library. Record the digests with
``python -m tests.support.recorder``; the diff of the recorded file shows which cases changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

import dasksc
from dasksc import BlockShuffling, BlockWeightedSampling, CellSets, ClassBalancedSampling, SamplingStrategy, Streaming
from dasksc.transforms import Downsample, MaskGenes
from dasksc.transforms.tokens import RankTokens, ValueBins
from tests.support.data import write_store
from tests.support.interface import interface

RECORDED = Path(__file__).parents[1] / "recorded"
N_OBS, N_VARS = 103, 17
SEED = 20_240_229


def scattered(n_rows: int, n_columns: int, salt: int, *, most: int = 1000) -> NDArray[np.int64]:
    """Return numbers up to `most` in a third of the positions and zeros elsewhere, by splitmix64 of the position."""
    mixed = (np.arange(n_rows * n_columns, dtype=np.uint64) + np.uint64(salt << 32)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    values = np.where(mixed % np.uint64(3) == 0, 1 + mixed // np.uint64(3) % np.uint64(most), 0)
    return values.astype(np.int64).reshape(n_rows, n_columns)


ROWS = np.arange(N_OBS)
KINDS = np.repeat([0, 1, 2], [60, 30, 13])[ROWS * 41 % N_OBS]
WEIGHTS = ROWS % 7
# The rows are unordered, and some repeat.
UNORDERED = np.concatenate([ROWS * 29 % N_OBS, [5, 77]])[10:]


def make_adata(layout: str) -> ad.AnnData:
    """Return a small atlas with a layer and an obsm, and X in one of two layouts."""
    as_stored: Callable[[Any], Any] = sp.csr_matrix if layout == "csr" else np.asarray
    kinds = pd.Categorical.from_codes(KINDS, categories=["T cell", "B cell", "NK cell", "never seen"])
    obs = pd.DataFrame(
        {
            "kind": kinds,
            "some": pd.Categorical(pd.Series(kinds.astype(str)).mask(ROWS % 5 == 0)),
            "donor": np.array([f"donor{i}" for i in ROWS * 13 % 8], dtype=object),
            "n": ROWS * 37 % 101,
            "score": (ROWS * 53 % 64 / 8).astype(np.float32),
        },
        index=[f"cell{i}" for i in ROWS],
    )
    adata = ad.AnnData(
        X=as_stored(scattered(N_OBS, N_VARS, 1).astype(np.float32)),
        obs=obs,
        var=pd.DataFrame(index=[f"gene{i}" for i in range(N_VARS)]),
        layers={"counts": sp.csr_matrix(scattered(N_OBS, N_VARS, 2).astype(np.int32))},
        obsm={"X_pca": scattered(N_OBS, 5, 3).astype(np.float64)},
    )
    adata.raw = ad.AnnData(X=sp.csr_matrix(scattered(N_OBS, N_VARS + 3, 4).astype(np.float32)), obs=obs[[]])
    return adata


class Backwards(SamplingStrategy):
    """Strategy defined by a user."""

    def get_len(self, data_collection: Any) -> int:
        return N_OBS

    def get_indices(self, data_collection: Any, seed: Any = None, rng: Any = None) -> NDArray[np.int64]:
        return np.roll(np.arange(N_OBS)[::-1], int(seed) % N_OBS)


STRATEGIES: dict[str, SamplingStrategy] = {
    "streaming": Streaming(),
    "streaming shuffled": Streaming(shuffle=True),
    "streaming a mask": Streaming(ROWS % 3 != 1),
    "blocks": BlockShuffling(8),
    "blocks of rows": BlockShuffling(1),
    "blocks, drop_last": BlockShuffling(5, drop_last=True),
    "blocks larger than all": BlockShuffling(512),
    "blocks of a slice": BlockShuffling(4, indices=slice(3, 99, 2)),
    "blocks of indices": BlockShuffling(4, indices=UNORDERED),
    "blocks of a filter": BlockShuffling(4, indices=slice(0, 90)),
    "weighted": BlockWeightedSampling(4, weights=WEIGHTS),
    "weighted rows": BlockWeightedSampling(1, weights=WEIGHTS, total_size=50),
    "weighted entries": BlockWeightedSampling(4, indices=UNORDERED, weights=np.arange(len(UNORDERED)) % 5),
    "weighted once": BlockWeightedSampling(4, weights=WEIGHTS, total_size=60, replace=False),
    "weighted rounds": BlockWeightedSampling(4, weights=WEIGHTS, total_size=90, replace=False, sampling_size=20),
    "balanced": ClassBalancedSampling(KINDS, 4),
    "balanced by a column": ClassBalancedSampling(label_key="kind", block_size=2),
    "balanced, smoothed": ClassBalancedSampling(KINDS, 2, smoothing=0.5, class_weights={1: 2.0}),
    "balanced once": ClassBalancedSampling(KINDS, 4, replace=False),
    "balanced rounds": ClassBalancedSampling(KINDS, 4, total_size=60, replace=False, sampling_size=12),
    "a user's": Backwards(),
}
FILTER = "n > 20 and kind != 'NK cell'"

# Cell sets require a batch size that is a multiple of the set size, and only atlases have controls.
_MATCHED: dict[str, Any] = {"by": ["kind", "donor"], "set_size": 2, "control": {"donor": ["donor0", "donor3"]}}
UNITS: dict[str, SamplingStrategy] = {
    "sets": CellSets("kind", 2, block_size=2),
    "sets of a number": CellSets(["kind", "donor"], 2, n_sets=40, weights="groups", indices=UNORDERED),
    "sets with controls": CellSets(**_MATCHED, n_controls=2),
    "sets with controls of any kind": CellSets(**_MATCHED, match=[], include_control=True, weights="groups"),
    "sets with controls by row": CellSets("kind", 2, control="n < 30", match="donor"),
    "sets once": CellSets(["kind", "donor"], 2, replace=False),
    "sets once with controls": CellSets(**_MATCHED, replace=False, incomplete="drop"),
    "balanced by temperature": ClassBalancedSampling(KINDS, 4, temperature=3.0),
    "shares": ClassBalancedSampling(label_key="kind", block_size=4, per_batch=True),
    "shares by temperature": ClassBalancedSampling(KINDS, 2, temperature=2.0, per_batch=True, total_size=48),
    "shares once": ClassBalancedSampling(KINDS, 4, smoothing=1.0, per_batch=True, replace=False),
}
UNIT_WAYS = ("h5ad", "zarr 3", "converted", "memory", "joined")
LAYOUTS = ("csr", "dense")

# Options of a data set: the data read in addition to X, the dtype, and the genes.
ASKED: dict[str, dict[str, Any]] = {
    "X": {},
    "obs": {"obs": ["kind", "some", "donor", "n", "score"]},
    "everything": {"obs": ["kind", "n"], "layers": ["counts"], "obsm": ["X_pca"], "dtype": None},
    "genes": {"obs": ["score"], "genes": ["gene11", "gene2", "gene5"], "dtype": "int64"},
}
# Values of drop_last and equal_ranks, and of batch_size and fetch_factor.
ENDS = {"padded": (False, True), "dropped": (True, True), "exact": (False, False)}
SIZES = {"8x2": (8, 2), "5x3": (5, 3)}
STARTS = ("first epoch", "second epoch", "epoch 7", "resumed", "resumed elsewhere")


@dataclass(frozen=True)
class Way:
    """Source of a data set: the object passed to `scDataset`, and the options that this object supports."""

    data: Callable[[Atlas, str], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    takes: frozenset[str] = frozenset({"obs", "layers", "obsm", "genes", "dtype", "layout"})
    has_columns: bool = True


def _opened(name: str, **options: Any) -> Callable[[Atlas, str], Any]:
    return lambda atlas, layout: dasksc.open(atlas.path(layout, name), **options)


def _path(name: str) -> Callable[[Atlas, str], Any]:
    return lambda atlas, layout: atlas.path(layout, name)


def _joined(join: str) -> Callable[[Atlas, str], Any]:
    def opened(atlas: Atlas, layout: str) -> Any:
        parts = {name: atlas.path(layout, name) for name in ("first.h5ad", "second.h5ad")}
        return dasksc.open(parts, join=join, label="part", fill_value=0 if join == "outer" else None)

    return opened


def _computed(function: Callable[[Any], Any]) -> Callable[[Atlas, str], Any]:
    def opened(atlas: Atlas, layout: str) -> Any:
        adata = dasksc.open(atlas.path(layout, "atlas.h5ad"))
        adata.X = function(adata.X)
        return adata

    return opened


def _modalities(atlas: Atlas, layout: str) -> Any:
    return dasksc.Modalities({"rna": atlas.path(layout, "atlas.h5ad"), "prot": atlas.path(layout, "zarr3.zarr")})


def _as_dict(adata: ad.AnnData) -> dict[str, Any]:
    return {"X": adata.X, "kind": adata.obs["kind"].cat.codes.to_numpy(), "n": adata.obs["n"].to_numpy()}


GENES = [f"gene{i}" for i in range(N_VARS)]
_X = frozenset({"dtype", "layout"})
_NONE: frozenset[str] = frozenset()
WAYS: dict[str, Way] = {
    "h5ad": Way(_path("atlas.h5ad")),
    "h5ad, opened": Way(_opened("atlas.h5ad")),
    "h5ad, unmapped": Way(_path("atlas.h5ad"), {"mmap": False}),
    "h5ad, gzip": Way(_opened("gzip.h5ad")),
    "zarr 2": Way(_opened("zarr2.zarr")),
    "zarr 3": Way(_opened("zarr3.zarr")),
    "converted": Way(_path("converted.zarr")),
    "memory": Way(lambda atlas, layout: atlas.adata[layout]),
    "backed": Way(lambda atlas, layout: atlas.backed(layout)),
    "joined": Way(_joined("inner")),
    "joined, outer": Way(_joined("outer")),
    "rows": Way(lambda atlas, layout: dasksc.open(atlas.path(layout, "zarr3.zarr"))[ROWS * 17 % N_OBS]),
    "doubled": Way(_computed(lambda x: x * 2)),
    "square roots": Way(_computed(da.sqrt), takes=frozenset({"obs", "layout"})),
    "raw": Way(_opened("atlas.h5ad", raw=True), takes=frozenset({"obs", "obsm", "layout"})),
    "modalities": Way(_modalities, {"obs": ["rna:kind", "prot:n"], "layers": ["rna:counts"]}, _X, False),
    "a Dask array": Way(lambda atlas, layout: dasksc.open(atlas.path(layout, "atlas.h5ad")).X, {}, _X, False),
    "indexing": Way(lambda atlas, layout: atlas.adata[layout].X, {}, _NONE, False),
    "hooks": Way(_opened("atlas.h5ad"), {"batch_transform": _as_dict}, _NONE),
    "tokens": Way(
        _opened("atlas.h5ad"),
        {
            "transform": RankTokens(
                GENES, max_genes=5, prepend_cls=True, mask_ratio=0.4, random_replace_ratio=0.2, seed=3
            )
        },
        frozenset({"layout"}),
    ),
    "bins": Way(
        _opened("gzip.h5ad"), {"transform": ValueBins(GENES, n_bins=4, max_genes=4, seed=3)}, frozenset({"layout"})
    ),
    "thinned": Way(
        _opened("atlas.h5ad"), {"transform": [Downsample(0.3, seed=2), MaskGenes(0.2)]}, frozenset({"layout"})
    ),
    "sampled": Way(_opened("atlas.h5ad"), {"transform": Downsample(target_counts=200)}, frozenset({"layout"})),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Strategy, `Way`, and one value of each other factor."""

    strategy: str
    way: str
    world_size: int
    start: str
    stored: str
    yielded: str
    asked: str
    ends: str
    sizes: str
    scheduler: str


def cases() -> Iterator[Case]:
    """Yield cases in which all factors alternate, so that every strategy and every `Way` begins at every start."""
    for i, strategy in enumerate(STRATEGIES | UNITS):
        is_unit = strategy in UNITS
        ways = UNIT_WAYS if is_unit else tuple(WAYS)
        for j, start in enumerate(STARTS):
            yield Case(
                strategy=strategy,
                way=ways[(i + (1 if is_unit else 4) * j) % len(ways)],
                world_size=1 + (i + 2 * j) % 3,
                start=start,
                stored=LAYOUTS[(i + j) % 2],
                yielded=LAYOUTS[(i // 2 + j) % 2],
                asked="obs" if is_unit else tuple(ASKED)[(i + j) % len(ASKED)],
                ends=tuple(ENDS)[(i + j // 2) % len(ENDS)],
                sizes="8x2" if is_unit else tuple(SIZES)[(i // 3 + j) % len(SIZES)],
                scheduler=("synchronous", "threads")[(i // 4 + j) % 2],
            )


class Atlas:
    """Atlas in every store format; each store is written on first use, to a folder that the caller removes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data: dict[tuple[str, str], Any] = {}

    @cached_property
    def adata(self) -> dict[str, ad.AnnData]:
        return {layout: make_adata(layout) for layout in LAYOUTS}

    def close(self) -> None:
        for data in self._data.values():
            if isinstance(data, ad.AnnData) and data.isbacked:
                data.file.close()

    def data(self, way: str, layout: str) -> Any:
        """Return the data object of a `Way`, shared by all cases."""
        if (way, layout) not in self._data:
            self._data[way, layout] = WAYS[way].data(self, layout)
        return self._data[way, layout]

    def path(self, layout: str, name: str) -> Path:
        """Return the path of a store: ``atlas.h5ad``, ``gzip.h5ad``, ``zarr2.zarr``, ``second.h5ad`` and so on."""
        path = self.folder / layout / name
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        adata, stem = self.adata[layout], path.stem
        if stem in ("zarr2", "zarr3"):
            return write_store(adata, path.parent, stem, name="made").rename(path)
        if stem == "converted":
            dasksc.convert(self.path(layout, "atlas.h5ad"), path, seed=SEED)
            return path
        if stem == "first":
            adata = adata[:60, 2:].copy()
        elif stem == "second":
            adata = adata[60:, ::-1][:, 3:].copy()
        adata.write_h5ad(path, compression="gzip" if stem == "gzip" else None)
        return path

    def backed(self, layout: str) -> ad.AnnData:
        return ad.read_h5ad(self.path(layout, "atlas.h5ad"), backed="r")


def digest_of(value: Any, *, n_bytes: int = 6) -> str:
    """Return a digest of names, types, shapes and values, in order."""
    state = hashlib.blake2b(digest_size=n_bytes)
    for part in _parts(value):
        state.update(part + b"|")
    return state.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        yield b"%d names" % len(value)
        for name, part in value.items():
            yield str(name).encode()
            yield from _parts(part)
    elif isinstance(value, (list, tuple)):
        yield b"%d parts" % len(value)
        for part in value:
            yield from _parts(part)
    elif isinstance(value, torch.Tensor) and value.layout == torch.sparse_csr:
        yield f"csr {tuple(value.shape)}".encode()
        for part in (value.crow_indices(), value.col_indices(), value.values()):
            yield from _parts(part)
    elif isinstance(value, torch.Tensor):
        yield from _parts(value.numpy())
    elif sp.issparse(value):
        yield f"{value.format} {value.shape}".encode()
        matrix = value.tocsr()
        yield from _parts([matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data])
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype.name} {value.shape}".encode()
        if value.dtype.kind == "f":
            value = np.where(np.isnan(value), value.dtype.type(np.nan), value)  # NaN and 0 have several bit patterns
            value = value + value.dtype.type(0)
        yield np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"))).tobytes()
    else:
        yield repr(value).encode()


_COUNTS = ("epoch", "rank", "world_size", "n_batches", "n_batches_before", "n_batches_left", "n_rows")
_COUNTS = (*_COUNTS, "n_rank_batches", "n_rank_padded", "n_rank_dropped", "n_padded", "n_dropped")


def _ranks(case: Case, atlas: Atlas, world_size: int, state: Any = None, **changed: Any) -> list[dasksc.scDataset]:
    way = WAYS[case.way]
    strategy: SamplingStrategy = (STRATEGIES | UNITS)[case.strategy]
    drop_last, equal_ranks = ENDS[case.ends]
    batch_size, fetch_factor = SIZES[case.sizes]
    wanted = {**ASKED[case.asked], "layout": case.yielded}
    options = {name: value for name, value in wanted.items() if name in way.takes} | way.options
    if not way.has_columns and getattr(strategy, "label_key", None):
        strategy = dataclasses.replace(strategy, label_key=None, labels=KINDS)  # type: ignore[type-var]
    if way.has_columns and case.strategy == "blocks of a filter":
        options["filter"] = FILTER
    if case.way == "joined" and "genes" in options:
        options["genes"] = options["genes"][:2]  # not all atlases have the third gene
    sizes = {"batch_size": batch_size, "fetch_factor": fetch_factor} | changed
    ends = {"drop_last": drop_last, "equal_ranks": equal_ranks}
    ranks = []
    for rank in range(world_size):
        one = dasksc.scDataset(
            atlas.data(case.way, case.stored),
            strategy,
            seed=SEED,
            rank=rank,
            world_size=world_size,
            scheduler=case.scheduler,
            **sizes,
            **ends,
            **options,
        )
        if state is not None:
            one.load_state_dict(state)
        ranks.append(one)
    return ranks


def state_of(case: Case, atlas: Atlas, world_size: int, **changed: Any) -> dict[str, Any]:
    """Return the state of all ranks in the middle of an epoch, after a round trip through JSON."""
    ranks = _ranks(case, atlas, world_size, **changed)
    n_batches = min(3, min(map(len, ranks)) // 2)
    states = []
    for rank in ranks:
        with closing(iter(rank)) as iterator:
            assert len(list(islice(iterator, n_batches))) == n_batches
            states.append(json.loads(json.dumps(rank.state_dict())))
    assert states == states[:1] * world_size
    return states[0]


def batches_of(case: Case, atlas: Atlas) -> str:
    """Return two digests: one of the batches of all ranks, and one of the lengths and statistics of their data sets."""
    state = None
    if case.start == "resumed":
        state = state_of(case, atlas, case.world_size)
    elif case.start == "resumed elsewhere":
        # With per_batch=True, resuming requires the same batch size.
        is_per_batch = getattr(UNITS.get(case.strategy), "per_batch", False)
        sizes = {"fetch_factor": 3} if is_per_batch else {"batch_size": 6, "fetch_factor": 3}
        state = state_of(case, atlas, case.world_size % 3 + 1, **sizes)
    batches, counts = [], []
    for rank in _ranks(case, atlas, case.world_size, state):
        if case.start == "second epoch":
            list(rank)
        elif case.start == "epoch 7":
            rank.set_epoch(7)
        counts += [len(rank), rank.n_batches_left]
        batches.append(list(rank))
        figures = rank.stats()
        counts += [figures[name] for name in _COUNTS]
        counts += [dict(rank.categories), rank.state_dict()["epoch"]]
    return f"{digest_of(batches)} {digest_of(counts, n_bytes=3)}"


def other_results(atlas: Atlas) -> dict[str, str]:
    """Return digests of the results of functions and objects other than data sets."""
    adata = dasksc.open(atlas.path("csr", "atlas.h5ad"))
    suggested = dasksc.suggest_parameters(adata, 8, verbose=False)
    found: dict[str, Any] = {
        "split of rows": dasksc.split(adata, seed=SEED),
        "split by donor": dasksc.split(adata, by="donor", fractions=(0.75, 0.25), seed=SEED),
        "split of groups, stratified": dasksc.split(adata, groups="donor", stratify="kind", seed=SEED),
        "rows_where": dasksc.rows_where(adata, FILTER),
        "estimate_sample_size": suggested.system_info.estimated_sample_size_bytes,
    }
    for name, strategy in STRATEGIES.items():
        found[f"get_indices of {name}"] = (strategy.get_len(adata), strategy.get_indices(adata, seed=SEED))
    dataset = dasksc.scDataset(adata, STRATEGIES["blocks"], 8, 2, seed=SEED, rank=1, world_size=2)
    plan = dataset.plan(5)
    found["plan"] = [plan.batch_rows(i) for i in range(plan.n_batches)]
    diversity = dasksc.diversity(dataset, "kind")
    found["diversity"] = [round(diversity.mean * 1e6), round(diversity.ideal_mean * 1e6), diversity.n_batches]
    limited = dasksc.scDataset(adata, STRATEGIES["blocks"], 64, None, seed=SEED, memory_limit="1GiB")
    found["fetch_factor"] = limited.fetch_factor
    return {name: digest_of(value) for name, value in found.items()}


@cache
def recorded() -> dict[str, str]:
    return json.loads((RECORDED / "batches.json").read_text())


def digest_of_way(way: str, atlas: Atlas) -> str:
    """Return one digest of the batches of all cases of a `Way`."""
    return digest_of([batches_of(case, atlas) for case in cases() if case.way == way])


def record() -> None:
    """Write the digests and public names of the current version."""
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, closing(Atlas(Path(folder))) as atlas:
        found = {way: digest_of_way(way, atlas) for way in WAYS} | {"other results": digest_of(other_results(atlas))}
    (RECORDED / "batches.json").write_text(json.dumps(found, indent=1) + "\n")
    (RECORDED / "interface.txt").write_text(interface())


if __name__ == "__main__":
    record()

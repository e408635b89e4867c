"""Batches that a device makes dense, from blocks that are copied at once. Here the device is the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc import InputError, MultiIndexable
from dasksc.batches.batch import Batch
from dasksc.batches.placement import Placement
from dasksc.storage import buffers
from tests.support.sets import N, screened, sets

pytestmark = pytest.mark.core

TYPES = [None, "float32", "float64", "float16", "bfloat16", "uint8", "uint16", "int64", "bool"]


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    """Return counts with a dense layer, negative zeros, rows of unsorted columns, and repeated names of genes."""
    adata = screened()
    adata.X = sp.csr_matrix((np.ceil(adata.X.data * 200), adata.X.indices, adata.X.indptr), adata.X.shape)
    adata.X.data[::50] = -0.0
    for row in range(0, N, 7):
        start, stop = adata.X.indptr[row : row + 2]
        for part in (adata.X.data, adata.X.indices):
            part[start:stop] = part[start:stop][::-1].copy()
    adata.layers["counts"].data = np.ceil(adata.layers["counts"].data * 100)
    adata.layers["dense"] = adata.X.toarray()
    adata.obsm["X_pca"] = np.ceil(100 * adata.obsm["X_pca"])
    adata.var_names = [*(f"g{i}" for i in range(28)), "g3", "g9"]
    return adata


def parts_of(batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by their paths."""
    if isinstance(batch, dict):
        return {f"{key}/{name}": part for key, one in batch.items() for name, part in parts_of(one).items()}
    if batch.layout == torch.sparse_csr:
        return {"at": batch.crow_indices(), "columns": batch.col_indices(), "values": batch.values()}
    return {"": batch}


def assert_equal(batch: Any, expected: Any) -> None:
    parts, others = parts_of(batch), parts_of(expected)
    assert parts.keys() == others.keys()
    for name, part in parts.items():
        assert (part.dtype, part.shape) == (others[name].dtype, others[name].shape), name
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.itemsize]
        assert torch.equal(part.view(signed), others[name].view(signed)), name


GENES = {
    "all": {},
    "some": {"genes": [4, 2, 20]},
    "zero": {"genes": ["g5", "lacking", "g1"], "genes_missing": "zero"},
    "sum": {"genes": ["g9", "g0", "g3"], "genes_repeated": "sum"},
}
TRANSFORMS = {
    "none": None,
    "counts": [dasksc.transforms.Downsample(0.5, layer="counts"), dasksc.transforms.MaskGenes(0.3)],
    "ranks": dasksc.tokens.RankTokens([f"{i}" for i in range(30)], max_genes=5, mask_ratio=0.2),
    "bins": [dasksc.transforms.MaskGenes(0.3), dasksc.tokens.ValueBins([f"{i}" for i in range(30)], max_genes=5)],
}


@given(
    dtype=st.sampled_from(TYPES),
    layout=st.sampled_from(["dense", "csr"]),
    genes=st.sampled_from(list(GENES)),
    transform=st.sampled_from(list(TRANSFORMS)),
    in_sets=st.booleans(),
    batch_size=st.sampled_from([8, 64]),
)
def test_batches_of_a_device_equal_those_of_the_host(dtype, layout, genes, transform, in_sets, batch_size, adata):
    if transform in ("ranks", "bins") and genes != "all":
        return
    strategy = sets(n_controls=2) if in_sets else dasksc.BlockShuffling(4)
    options = {"obs": ["gene", "dose"], "layers": ["counts", "dense"], "obsm": ["X_pca"], "layout": layout}
    options |= {"dtype": dtype, "seed": 1, "fetch_factor": 4, "transform": TRANSFORMS[transform], **GENES[genes]}
    expected = iter(dasksc.scDataset(adata, strategy, batch_size, **options))
    options |= {"device": "cpu"} | ({"expand": "device"} if layout == "dense" else {})
    batches = iter(dasksc.scDataset(adata, strategy, batch_size, **options))
    for _ in range(6):
        assert_equal(next(batches), next(expected))
    batches.close()
    expected.close()


@pytest.mark.parametrize("options", [{"expand": "device"}, {"layout": "csr"}], ids=str)
def test_batches_that_are_kept_are_never_overwritten(options, adata):
    dataset = dasksc.scDataset(
        *(adata, dasksc.BlockShuffling(4), 16),
        **{"seed": 0, "fetch_factor": 2, "obs": ["gene"], "obsm": ["X_pca"], "device": "cpu", **options},
    )
    for _ in range(3):
        kept = list(dataset)
        assert sum(len(batch.index) for batch in kept) == N
        for batch in kept:
            rows = batch.index.numpy()
            np.testing.assert_array_equal(batch.X.to_dense().numpy(), adata.X[rows].toarray())
            np.testing.assert_array_equal(batch.obsm["X_pca"].numpy(), adata.obsm["X_pca"][rows])
            np.testing.assert_array_equal(batch.obs["gene"].numpy(), adata.obs["gene"].cat.codes.iloc[rows])


def test_memory_of_blocks_does_not_grow_with_the_epochs():
    adata = ad.AnnData(sp.random(2_000, 3_000, 0.05, format="csr", dtype=np.float32, random_state=0))
    options = {"batch_size": 100, "fetch_factor": 4, "seed": 0, "layout": "csr", "device": "cpu"}
    dataset = dasksc.scDataset(adata, **options)
    # The pool rounds the sizes of blocks up by at most an eighth.
    n_bytes = 1.125 * dataset.memory.n_placed * dataset.memory.block_bytes
    before = buffers.kept_bytes()
    for _ in range(6):
        for batch in dataset:
            del batch
        assert 0 < buffers.kept_bytes() - before <= n_bytes


def test_transforms_may_return_any_structure(adata):
    """CSR tensors in it become dense, and other tensors and objects are moved with it."""

    def transform(batch: Batch) -> Any:
        weight = torch.ones(2, requires_grad=True)
        big = torch.zeros(300, 100) + batch.index[:1]
        return {"X": (batch.X, [batch.layers["counts"]]), "slice": batch.index[1::2], "big": big, "loss": weight.sum()}

    options = {"layers": ["counts"], "seed": 0, "transform": transform}
    expected = list(dasksc.scDataset(adata, "shuffle", **options))
    batches = list(dasksc.scDataset(adata, "shuffle", **options, device="cpu", expand="device"))
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        assert_equal(batch["X"][0], other["X"][0])
        assert_equal(batch["X"][1][0], other["X"][1][0])
        assert_equal({name: batch[name] for name in ("slice", "big")}, {name: other[name] for name in ("slice", "big")})
        assert batch["loss"].requires_grad


@pytest.mark.parametrize("options", [{"device": "cpu", "expand": "device"}, {"device": "meta", "layout": "csr"}])
def test_row_numbers_that_a_loop_collects_keep_no_other_memory_alive(options, adata):
    for batch in dasksc.scDataset(adata, "shuffle", obs=["gene"], seed=0, **options):
        for part in (batch.index, batch.obs["gene"]):
            assert part.untyped_storage().nbytes() == part.nbytes


class FakeStream:  # records the order of calls, which a stream and its events receive
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def record_event(self) -> str:
        self.calls.append(f"{self.name} records")
        return "copied"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits until {event}")


def test_the_stream_of_the_loop_waits_for_the_copy_and_is_known_to_every_tensor(monkeypatch):
    calls: list[str] = []
    loop = FakeStream(calls, "loop")
    recorded: list[torch.Tensor] = []

    @contextlib.contextmanager
    def used(stream: Any) -> Any:
        calls.append(f"begin {stream.name}")
        yield
        calls.append(f"end {stream.name}")

    monkeypatch.setattr(torch.cuda, "stream", used)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: loop)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(calls, "own"))
    options = {"is_pinned": False, "is_staged": True, "expands": False, "block_bytes": 2**20}
    placement, of_next_epoch = (Placement(torch.device("cuda", 63), **options) for _ in range(2))
    assert placement._stream is of_next_epoch._stream
    placement._device = torch.device("cpu")  # no machine has that GPU
    block = placement.memory()
    X = torch.from_numpy(block.empty((3, 4), np.float32)).fill_(1).to_sparse_csr()
    batch = Batch(X=X, obs={"type": torch.arange(3)}, index=torch.arange(3))
    placed = placement.place(batch, block)
    assert calls == ["begin own", "end own", "begin own", "own records", "end own"]
    ready = placement.ready(*placed)
    assert calls[5:] == ["loop waits until copied"]
    assert_equal(ready, batch)
    used = {part.untyped_storage().data_ptr() for part in parts_of(ready).values()}
    assert used == {part.untyped_storage().data_ptr() for part in recorded}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": "gpu"}, "expand.*'device'"),
        ({"expand": "device"}, "device=None"),
        ({"expand": "device", "device": "cpu", "layout": "csr"}, "layout='csr'"),
        ({"expand": "device", "device": "cpu", "batch_transform": lambda batch: batch}, "expand=.*hooks"),
    ],
)
def test_combinations_that_expand_nothing_are_refused(options, message, adata):
    with pytest.raises(InputError, match=message):
        dasksc.scDataset(adata, seed=0, **options)


def test_pinned_memory_without_a_gpu_is_refused(adata, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(InputError, match="pin_memory"):
        next(iter(dasksc.scDataset(adata, seed=0, pin_memory=True)))


def test_dense_matrices_are_copied_as_they_are(adata):
    dense = ad.AnnData(adata.layers["dense"])
    with pytest.raises(InputError, match="expand='device'.*X"):
        dasksc.scDataset(dense, seed=0, device="cpu", expand="device")
    assert next(iter(dasksc.scDataset(dense, seed=0, device="meta"))).layout == torch.strided


def test_the_density_decides_unless_a_transform_needs_dense_batches():
    sparse, full = (sp.random(100, 200, share, format="csr", dtype=np.float32) for share in (0.05, 0.6))
    adata = ad.AnnData(sparse, layers={"full": full})

    def expanded(**options: Any) -> set[str]:
        return set(dasksc.scDataset(adata, layers=["full"], seed=0, **options).memory.expanded)

    assert expanded(device="cpu") == expanded(device="mps") == expanded(device="meta", expand="host") == set()
    assert expanded(device="meta") == {"X"}
    assert expanded(device="cpu", expand="device") == {"X", "layers/full"}
    masks = dasksc.transforms.MaskGenes(0.2)
    assert expanded(device="meta", transform=masks) == {"X"}
    assert expanded(device="meta", transform=[masks, lambda batch: batch]) == set()


def test_memory_of_the_device_is_counted_apart(adata):
    options = {"batch_size": 64, "seed": 0}
    host = dasksc.scDataset(adata, **options)
    here, there = (dasksc.scDataset(adata, **options, device=one, expand="device") for one in ("cpu", "meta"))
    assert (host.n_device_bytes, here.n_device_bytes) == (0, 0)
    n_bytes = 64 * adata.n_vars * 4
    assert there.n_device_bytes >= 5 * n_bytes
    assert here.projected_bytes - there.projected_bytes >= 5 * n_bytes


def test_objects_of_hooks_are_moved(adata):
    rows = MultiIndexable(X=torch.arange(20.0))
    (batch,) = dasksc.scDataset(rows, dasksc.Streaming(), batch_size=20, device="meta")
    assert batch["X"].device.type == "meta"

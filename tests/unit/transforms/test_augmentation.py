"""Thinned counts and masked genes in batches."""

from __future__ import annotations

import dataclasses
import re
from itertools import islice
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

import dasksc
from dasksc import Batch, InputError, WrongTypeError
from dasksc.plan.deal import ConsumedSegment
from dasksc.transforms import Downsample, MaskGenes

pytestmark = pytest.mark.core

N_OBS, N_VARS = 97, 70
KINDS = [Downsample(0.5), Downsample(target_counts=60), MaskGenes(0.4)]


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(0.4, 4.0, N_VARS), (N_OBS, N_VARS)).astype(np.float32)
    return ad.AnnData(sp.csr_matrix(counts), layers={"counts": sp.csr_matrix(counts * 2)})


def batch_of(values: Any, layout: str = "dense", dtype: torch.dtype = torch.float32, **more: Any) -> Batch:
    X = torch.as_tensor(values).to(dtype)
    return Batch(X=X.to_sparse_csr() if layout == "csr" else X, index=torch.arange(len(X)) + 1000, **more)


def dense(X: torch.Tensor) -> torch.Tensor:
    return X.to_dense() if X.layout == torch.sparse_csr else X


def epoch_of(adata: ad.AnnData, transform: Any, strategy: Any = None, **options: Any) -> dasksc.scDataset:
    options = {"batch_size": 8, "fetch_factor": 2, "seed": 3, "rank": 0, "world_size": 1, **options}
    return dasksc.scDataset(adata, strategy or dasksc.BlockShuffling(4), transform=transform, **options)


def listed(batches: Any) -> list[tuple[list[int], list[list[float]]]]:
    return [(batch.index.tolist(), dense(batch.X).tolist()) for batch in batches]


@pytest.mark.parametrize("transform", KINDS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_values_of_any_type_are_treated_alike_dense_and_csr(transform, dtype):
    values = torch.from_numpy(np.random.default_rng(1).poisson(2, (9, N_VARS)))
    expected = transform(batch_of(values)).X
    for layout in ("dense", "csr"):
        batch = batch_of(values, layout, dtype, obs={"label": torch.arange(9)})
        made = transform(batch)
        assert isinstance(made, Batch)
        assert (made.X.layout, made.X.dtype, made.X.shape) == (batch.X.layout, dtype, batch.X.shape)
        assert dense(made.X).double().equal(expected.double())
        assert torch.equal(dense(batch.X), values.to(dtype))  # the input is unchanged
        assert made.obs is batch.obs
        if layout == "csr":
            assert made.X.col_indices().equal(batch.X.col_indices())


@pytest.mark.parametrize("transform", KINDS, ids=repr)
def test_wide_rows_are_treated_alike_dense_and_csr(transform):
    rng = np.random.default_rng(1)
    values = rng.poisson(3, (30, 20_000)) * (rng.random((30, 20_000)) < 0.02)
    dense_made, csr_made = (transform(batch_of(values, layout)).X for layout in ("dense", "csr"))
    assert dense_made.equal(csr_made.to_dense())


def test_counts_stay_whole_and_no_more_are_kept_than_there_were():
    values = torch.from_numpy(np.random.default_rng(1).poisson(5, (50, N_VARS))).float()
    for transform in KINDS[:2]:
        made = transform(batch_of(values)).X
        assert made.equal(made.round())
        assert bool(((made >= 0) & (made <= values)).all())
    assert Downsample(0.5)(batch_of(values)).X.sum() / values.sum() == pytest.approx(0.5, abs=0.02)
    assert Downsample(1.0)(batch_of(values)).X.equal(values)
    assert Downsample(target_counts=60)(batch_of(values)).X.sum(dim=1).tolist() == [60.0] * 50
    assert Downsample(target_counts=10**6)(batch_of(values)).X.equal(values)
    masked = MaskGenes(0.4)(batch_of(values)).X
    assert bool(((masked == 0) | (masked == values)).all())
    assert (masked != 0).sum() / (values != 0).sum() == pytest.approx(0.6, abs=0.03)
    assert MaskGenes(0.0)(batch_of(values)).X.equal(values)


@pytest.mark.parametrize("transform", KINDS[:2], ids=repr)
@pytest.mark.parametrize(
    ("layout", "bad"), [("dense", 0.5), ("csr", -1.0), ("dense", float("nan")), ("csr", float("inf")), ("csr", 2.0**60)]
)
def test_the_first_value_that_is_no_count_is_named(transform, layout, bad):
    values = torch.zeros((4, N_VARS), dtype=torch.float64)
    values[2, 67], values[2, 3], values[3, 0] = bad, 4, bad
    with pytest.raises(InputError, match=re.escape(str(bad)) + ".*1002.*67"):
        transform(batch_of(values, layout, torch.float64))
    assert dense(MaskGenes(0.5)(batch_of(values, layout)).X).shape == values.shape


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("transform", [Downsample(0.5), Downsample(target_counts=10**15)], ids=repr)
def test_counts_that_the_type_of_the_batch_cannot_represent_are_refused(transform, layout):
    values = torch.zeros((2, 3), dtype=torch.float64)
    values[1] = torch.tensor([10.0**15, 2**25, 3])
    total = dense(transform(batch_of(values, layout, torch.float64)).X).sum(dim=1)[1]
    assert total == 10**15 if transform.target_counts else abs(total - 10**15 / 2) < 1e9
    with pytest.raises(InputError, match="1001.*dtype='float64'"):
        transform(batch_of(values, layout, torch.float32))


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 40_000), (torch.bfloat16, 2**14)])
def test_drawn_counts_that_a_half_type_cannot_represent_are_refused(dtype, count):
    values = torch.full((2, N_VARS), count)
    with pytest.raises(InputError, match=f"{dtype}".removeprefix("torch.")):
        Downsample(0.5)(batch_of(values, dtype=dtype))
    assert MaskGenes(0.5)(batch_of(values, dtype=dtype)).X.max() == count


def test_batches_without_rows_or_genes_stay_so():
    for transform in KINDS:
        for layout in ("dense", "csr"):
            assert transform(batch_of(np.zeros((0, 5)), layout)).X.shape == (0, 5)
            assert dense(transform(batch_of(np.zeros((3, 5)), layout)).X).tolist() == [[0.0] * 5] * 3


def test_controls_are_treated_by_other_keys():
    values = torch.full((6, N_VARS), 3.0)
    for transform in KINDS:
        made = transform(batch_of(values, control=batch_of(values, "csr")))
        assert made.X.equal(transform(batch_of(values)).X)
        control = dense(made.control.X)
        assert not control.equal(values)
        assert not control.equal(made.X)
        assert made.control.index.tolist() == list(range(1000, 1006))
        assert transform(batch_of(values, control=None))["control"] is None


def test_objects_other_than_batches_of_X_are_refused():
    for transform in KINDS:
        with pytest.raises(InputError, match="takes a Batch with X and index; got a Tensor"):
            transform(torch.zeros(3, 3))
        with pytest.raises(InputError, match="got one with rna, index"):
            transform(Batch(rna=Batch(X=torch.zeros(3, 3)), index=torch.arange(3)))
        with pytest.raises(InputError, match=r"each of the 4 cells .* shape \(3, 3\)"):
            transform(Batch(X=torch.zeros(3, 3), index=torch.arange(4)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Downsample(), "fraction=.*target_counts="),
        (lambda: Downsample(0.5, target_counts=5), "fraction=.*target_counts="),
        (lambda: Downsample(0), "fraction"),
        (lambda: Downsample(True), "got True"),
        (lambda: Downsample(target_counts=0), "target_counts"),
        (lambda: Downsample(0.5, seed=-1), "seed"),
        (lambda: Downsample(0.5, layer=3), "layer must be .* got 3"),
        (lambda: MaskGenes(1.0), "1.0"),
        (lambda: MaskGenes(None), "got None"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(("stored", "layout"), [("csr", "csr"), ("dense", "dense"), ("csr", "dense")])
def test_a_loader_yields_what_a_transform_makes_of_its_batches(adata, stored, layout):
    counts = adata.X if stored == "csr" else adata.X.toarray()
    kept = ad.AnnData(counts, layers={"counts": counts * 2})
    for dtype in ("float32", "int32"):
        for transform in (*KINDS, Downsample(0.5, layer="counts"), MaskGenes(0.3, layer="counts")):
            options: dict[str, Any] = {"layout": layout, "dtype": dtype, "layers": ["counts"]}
            dataset = epoch_of(kept, transform, **options)
            for i, (made, plain) in enumerate(zip(dataset, epoch_of(kept, None, **options), strict=True)):
                expected = transform.at_epoch(0).at_batch(dataset.plan(0).batch_number(i))(plain)
                assert (made.X.layout, made.X.dtype) == (plain.X.layout, plain.X.dtype)
                assert dense(made.X).equal(dense(expected.X))
                assert dense(made.layers["counts"]).equal(dense(expected.layers["counts"]))


@pytest.mark.parametrize("transform", KINDS, ids=repr)
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_an_epoch_is_the_same_however_it_is_read(adata, transform, layout):
    dataset = epoch_of(adata, transform, layout=layout)
    expected = listed(dataset)
    assert listed(dataset) != expected  # the next epoch
    for options in ({"scheduler": "synchronous"}, {"scheduler": "threads", "prefetch": 3}):
        assert listed(epoch_of(adata, transform, layout=layout, **options)) == expected
    if layout == "dense":
        assert listed(epoch_of(adata, transform, layout="csr")) == expected


def test_a_resumed_epoch_is_treated_as_it_would_have_been(adata):
    for transform in KINDS:
        expected = listed(epoch_of(adata, transform))
        for n in range(len(expected)):
            dataset = epoch_of(adata, transform)
            before = listed(islice(dataset, n))
            rest = epoch_of(adata, transform)
            rest.load_state_dict(dataset.state_dict())
            assert before + listed(rest) == expected


def test_a_row_drawn_twice_is_treated_twice():
    cells = ad.AnnData(np.full((4, N_VARS), 5, dtype=np.float32))
    for transform in KINDS:
        for batch_size in (1, 4):  # duplicates in different batches, and within one
            drawn = dasksc.BlockWeightedSampling(1, total_size=40, weights=np.ones(4))
            ranks = [epoch_of(cells, transform, drawn, batch_size=batch_size, rank=i, world_size=2) for i in range(2)]
            epoch = [batch for rank in ranks for batch in rank]
            found = {tuple(row) for batch in epoch for row in batch.X.tolist()}
            assert len(found) == 40


def test_segments_and_ranks_number_batches_differently(adata):
    plans = [epoch_of(adata, None, rank=rank, world_size=3).plan(0) for rank in range(3)]
    numbers = [plan.batch_number(i) for plan in plans for i in range(plan.n_batches)]
    assert sorted(numbers) == list(range(len(numbers)))
    consumed = (ConsumedSegment(world_size=1, batch_size=8, fetch_factor=2, n_batches=3),)
    rest = dataclasses.replace(plans[0], consumed=consumed)
    assert rest.batch_number(0) > plans[2].batch_number(10**9)


def test_lists_of_transforms_are_called_in_order(adata):
    def log(batch: Batch) -> Batch:
        return Batch({**batch, "X": batch.X.log1p()})

    composed = listed(epoch_of(adata, [Downsample(0.5), MaskGenes(0.2), log]))
    plain = listed(epoch_of(adata, lambda batch: log(batch)))
    assert [rows for rows, _ in composed] == [rows for rows, _ in plain]
    assert composed != plain
    one = listed(epoch_of(adata, (Downsample(0.5),)))
    assert one == listed(epoch_of(adata, Downsample(0.5)))
    assert isinstance(next(iter(epoch_of(adata, []))), torch.Tensor)  # as without a transform


def test_a_batch_that_somebody_keeps_is_not_changed(adata):
    def keep(batch: Batch) -> Batch:
        return Batch({**batch, "target": batch.X})

    for transform in KINDS:
        for layout in ("dense", "csr"):
            other = MaskGenes(0.1, seed=5)
            kept = [dense(b.target).tolist() for b in epoch_of(adata, [other, keep, transform], layout=layout)]
            assert kept == [dense(b.X).tolist() for b in epoch_of(adata, other, layout=layout)]


def test_lists_that_cannot_be_called_or_draw_the_same_are_refused(adata):
    with pytest.raises(WrongTypeError, match="got 3"):
        epoch_of(adata, [Downsample(0.5), 3])
    with pytest.raises(WrongTypeError, match="transform"):
        epoch_of(adata, 3)
    with pytest.raises(InputError, match="MaskGenes.*seed=0"):
        epoch_of(adata, [MaskGenes(0.5), Downsample(0.5), MaskGenes(0.1)])
    epoch_of(adata, [MaskGenes(0.5), MaskGenes(0.1, seed=1)])

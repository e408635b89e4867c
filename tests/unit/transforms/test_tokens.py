"""Tokens compared with a reference in plain Python, for arbitrary values."""

from __future__ import annotations

import json
import math
import pickle
from itertools import chain

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

import dasksc
from dasksc.batches.batch import Batch
from dasksc.errors import InputError, MissingKeyError, MissingPathError, WrongTypeError
from dasksc.transforms.tokens import IGNORED, RankTokens, ValueBins
from dasksc.transforms.vocabulary import CLS, MASK, PAD, Vocabulary
from tests.support import twins
from tests.support.data import make_adata, write_store

pytestmark = pytest.mark.core

N_GENES = 9
GENES = [f"gene{i}" for i in range(N_GENES)]
# Few distinct values, so that ties are frequent, and values that float32 rounds.
VALUES = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 0.1, 1e-30, 1e30])
CELLS = st.lists(st.lists(VALUES, min_size=N_GENES, max_size=N_GENES), min_size=0, max_size=6)


def batch_of(cells: list[list[float]], layout: str) -> Batch:
    dense = np.array(cells, dtype=np.float32).reshape(len(cells), N_GENES)
    X = torch.from_numpy(dense)
    if layout == "csr":
        matrix = sp.csr_matrix(dense)
        parts = (torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data))
        X = torch.sparse_csr_tensor(*parts, size=dense.shape)
    rows = torch.arange(len(cells)) * 7
    return Batch(X=X, obs={"label": torch.arange(len(cells))}, layers={"raw": X}, index=rows)


def expressed(cell: list[float], ids: list[int]) -> list[tuple[int, float]]:
    return [(i, float(np.float32(value))) for i, value in zip(ids, cell, strict=True) if value != 0 and i >= 0]


def ranked(cell: list[float], ids: list[int], medians: list[float], max_genes: int) -> list[tuple[int, float]]:
    scaled = [float(np.float32(v) / np.float32(m)) for v, m in zip(cell, medians, strict=True)]
    return sorted(expressed(scaled, ids), key=lambda token: -token[1])[:max_genes]  # stable


def binned(cell: list[float], ids: list[int], n_bins: int, key: int) -> list[tuple[int, float]]:
    """Return the id and bin of each expressed gene, binned as in scGPT.

    The bin of a value is its position among the quantiles. A value equal to several quantiles gets one of their bins at
    random.
    """
    tokens = expressed(cell, ids)
    if not tokens:
        return []
    values = np.array([value for _, value in tokens], dtype=np.float32)
    edges = np.quantile(values, np.linspace(0, 1, n_bins - 1))
    # Not numpy.digitize, which requires monotonic edges; rounding can break their order.
    highest, lowest = np.searchsorted(edges, values, "right"), np.searchsorted(edges, values, "left")
    shares = [twins.uniform(twins.stream(key, 4), k) for k in range(len(tokens))]
    bins = [
        int(np.ceil(low * share + high * (1 - share))) for low, high, share in zip(lowest, highest, shares, strict=True)
    ]
    return [(i, one) for (i, _), one in zip(tokens, bins, strict=True)]


def keys_of(seed: int, epoch: int, rows: list[int]) -> list[int]:
    (key,) = np.random.SeedSequence(seed, spawn_key=(epoch, 5)).generate_state(1, np.uint64).tolist()
    return twins.row_keys(key, rows)


def chosen(key: int, n: int, k: int) -> list[int]:
    taken: list[int] = []
    for i in range(n):
        if twins.uniform(key, i) * (n - i) < k - len(taken):
            taken.append(i)
    return taken


def masked(key: int, n: int, ratio: float) -> list[int]:
    return chosen(twins.stream(key, 1), n, min(n, max(1, int(ratio * n + 0.5))))


def written(batch: Batch) -> list[list[tuple[int, float]]]:
    """Return the tokens and values of each cell, without padding."""
    lengths = batch.attention_mask.sum(dim=1).tolist()
    for i, length in enumerate(lengths):
        assert batch.attention_mask[i, :length].all()
        assert (batch["values"][i, length:] == 0).all()
    return [
        list(zip(ids[:n], values[:n], strict=True))
        for ids, values, n in zip(batch.input_ids.tolist(), batch["values"].tolist(), lengths, strict=True)
    ]


@pytest.mark.parametrize("is_ranked", [True, False])
@given(
    cells=CELLS,
    layout=st.sampled_from(["csr", "dense"]),
    n=st.integers(2, 7),
    options=st.fixed_dictionaries(
        {
            "max_genes": st.integers(1, N_GENES + 2),
            "prepend_cls": st.booleans(),
            "padding": st.sampled_from(["longest", "max_length"]),
            "mask_ratio": st.sampled_from([0.0, 0.5]),
            "random_replace_ratio": st.sampled_from([0.0, 0.5]),
        }
    ),
)
def test_tokens_made_on_a_device_are_those_of_the_host(cells, layout, is_ranked, n, options):
    options |= {"vocabulary": Vocabulary.of_genes(GENES[:n]), "missing": "drop", "keep_ratio": 0.2}
    more = {"medians": np.linspace(0.1, n, N_GENES)} if is_ranked else {"n_bins": n}
    tokens = (RankTokens if is_ranked else ValueBins)(GENES, **options, **more).at_epoch(3)
    expected, made = tokens(batch_of(cells, layout)), tokens._on_device(tokens._on_host(batch_of(cells, layout)))
    assert made.keys() == expected.keys()
    for name in made.keys() - {"obs"}:
        assert made[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(made[name].numpy(), expected[name].numpy(), strict=True)


@given(
    cells=CELLS,
    layout=st.sampled_from(["csr", "dense"]),
    max_genes=st.integers(1, N_GENES + 2),
    medians=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=N_GENES, max_size=N_GENES) | st.none(),
    prepend_cls=st.booleans(),
)
def test_ranked_tokens_are_those_of_the_reference(cells, layout, max_genes, medians, prepend_cls):
    by_name = medians and dict(reversed(list(zip(GENES, medians, strict=True))))
    tokens = RankTokens(GENES, medians=by_name, max_genes=max_genes, prepend_cls=prepend_cls)
    made = tokens(batch_of(cells, layout))
    start = [(tokens.vocabulary.cls_id, 0.0)] if prepend_cls else []
    ids = list(range(3, 3 + N_GENES))
    expected = [start + ranked(cell, ids, medians or [1.0] * N_GENES, max_genes) for cell in cells]
    assert written(made) == expected
    assert made.input_ids.shape == (len(cells), max(map(len, expected), default=len(start)))
    assert (made.input_ids[~made.attention_mask] == tokens.vocabulary.pad_id).all()
    assert set(made) == {"obs", "index", "input_ids", "values", "attention_mask"}


@given(cells=CELLS, layout=st.sampled_from(["csr", "dense"]), n_bins=st.integers(2, 12), prepend_cls=st.booleans())
def test_bins_are_those_of_the_reference(cells, layout, n_bins, prepend_cls):
    tokens = ValueBins(GENES, n_bins=n_bins, max_genes=N_GENES, prepend_cls=prepend_cls)
    start = [(tokens.vocabulary.cls_id, 0)] if prepend_cls else []
    made = tokens(batch_of(cells, layout))
    ids = list(range(3, 3 + N_GENES))
    keys = keys_of(0, 0, [7 * i for i in range(len(cells))])
    assert written(made) == [start + binned(cell, ids, n_bins, key) for cell, key in zip(cells, keys, strict=True)]
    assert all(1 <= value < n_bins for tokens_ in written(made) for _, value in tokens_[len(start) :])


def test_edges_are_those_of_numpy_to_the_bit_and_ties_are_spread_over_their_bins():
    rng = np.random.default_rng(0)
    genes = [f"gene{i}" for i in range(700)]
    X = rng.lognormal(size=(20, 700)).astype(np.float32) * rng.integers(0, 2, (20, 700))
    X[10:] = rng.poisson(0.6, (10, 700))
    made = ValueBins(genes, n_bins=51, max_genes=700)(Batch(X=torch.from_numpy(X), index=torch.arange(20)))
    for cell, values, there in zip(X, made["values"].numpy(), made.attention_mask.numpy(), strict=True):
        nonzeros = cell[cell != 0]
        edges = np.quantile(nonzeros, np.linspace(0, 1, 50))
        high, low = np.digitize(nonzeros, edges), np.digitize(nonzeros, edges, right=True)
        found = values[there]
        assert ((found == high) | ((low < found) & (found <= high))).all()
        assert len(np.unique(found)) > 40  # even if most values are 1


@given(
    cells=CELLS,
    ratio=st.sampled_from([0.01, 0.15, 0.5, 0.99]),
    epoch=st.integers(0, 3),
    prepend_cls=st.booleans(),
    kind=st.sampled_from([RankTokens, ValueBins]),
    shares=st.sampled_from([(0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0), (0.3, 0.2)]),
)
def test_masks_hide_replace_or_show_what_the_labels_have(cells, ratio, epoch, prepend_cls, kind, shares):
    batch = batch_of(cells, "csr")
    options = {"max_genes": 6, "prepend_cls": prepend_cls, "seed": 4}
    # Genes missing from the vocabulary are never used as replacements.
    vocabulary = Vocabulary({str(gene): 2 * i for i, gene in enumerate(GENES[1:])})
    options |= {"vocabulary": vocabulary, "missing": "drop"}
    bare = kind(GENES, **options).at_epoch(epoch)(batch)
    replaced, kept = shares
    tokens = kind(GENES, mask_ratio=ratio, random_replace_ratio=replaced, keep_ratio=kept, **options)
    made = tokens.at_epoch(epoch)(batch)
    first = int(prepend_cls)
    ids, values = bare.input_ids.tolist(), bare["values"].tolist()
    hidden, labels = ids if kind is RankTokens else values, torch.full_like(bare.input_ids, IGNORED).tolist()
    choices = list(range(0, 2 * (N_GENES - 1), 2))
    for i, key in enumerate(keys_of(4, epoch, batch.index.tolist())):
        for k in masked(key, int(bare.attention_mask[i].sum()) - first, ratio):
            labels[i][first + k] = hidden[i][first + k]
            fate, draw = (twins.uniform(twins.stream(key, number), k) for number in (2, 3))
            if fate < replaced:
                if kind is RankTokens:
                    ids[i][first + k] = choices[int(draw * len(choices))]
                else:
                    values[i][first + k] = 1 + int(draw * (tokens.n_bins - 1))
            elif fate >= replaced + kept:
                values[i][first + k] = -1
                if kind is RankTokens:
                    ids[i][first + k] = vocabulary.mask_id
    assert made.input_ids.tolist() == ids
    assert made["values"].tolist() == values
    assert made.labels.tolist() == labels


def test_padding_reaches_the_longest_cell_or_the_largest_length():
    cells = [[1.0] * 4 + [0.0] * 5, [1.0] + [0.0] * 8]
    assert RankTokens(GENES, max_genes=6)(batch_of(cells, "csr")).input_ids.shape == (2, 4)
    fixed = RankTokens(GENES, max_genes=6, prepend_cls=True, padding="max_length")
    assert fixed(batch_of(cells, "csr")).input_ids.shape == (2, 7) == (2, fixed.max_length)


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("v.json", json.dumps({"b": 7, CLS: 0}), {"b": 7, CLS: 0, PAD: 8, MASK: 9}),
        ("v.txt", "\ufeff<pad>\nb\na\n", {PAD: 0, "b": 1, "a": 2, MASK: 3, CLS: 4}),
        ("v", "b\na", {"b": 0, "a": 1, PAD: 2, MASK: 3, CLS: 4}),
    ],
)
def test_vocabulary_files_are_read_and_completed(tmp_path, name, text, ids):
    (tmp_path / name).write_text(text)
    vocabulary = Vocabulary.read(tmp_path / name)
    assert vocabulary.ids == ids
    assert vocabulary.size == max(ids.values()) + 1
    tokens = RankTokens(["b"], vocabulary=tmp_path / name)
    assert tokens(Batch(X=torch.ones(1, 1), index=torch.zeros(1).long())).input_ids.tolist() == [[ids["b"]]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.json", b'{"a": 1, "b": 1}', "'a' and 'b' both have 1"),
        ("v.json", b'{"a": -1}', "'a'.*-1"),
        ("v.json", b'{"a": true}', "id of 'a'.*True"),
        ("v.json", b"[1]", "object of ids by name.* got a list"),
        ("v.json", b"{", "is not JSON"),
        ("v.txt", b"a\nb\na\na\n", "v.txt.*'a'"),
        ("v.bin", b"\x80\x04\x95", "is not a text file"),
        ("v.pkl", b"\x80\x04\x95", "pickled dict that maps names"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused_with_what_it_holds(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        Vocabulary.read(tmp_path / name)


def batch_with(value: float) -> Batch:
    X = torch.ones(2, N_GENES)
    X[1, 3] = value
    return Batch(X=X, index=torch.tensor([30, 31]))


def read_with(*transform, **options):
    adata = ad.AnnData(np.ones((4, N_GENES), np.float32), var=pd.DataFrame(index=GENES))
    return next(iter(dasksc.scDataset(adata, batch_size=4, transform=transform, seed=0, **options)))


@pytest.mark.parametrize(
    ("use", "error", "fact"),
    [
        (lambda: RankTokens("CD4"), WrongTypeError, r"genes=\['CD4'\]"),
        (lambda: RankTokens(ad.AnnData(np.ones((2, 3)))), WrongTypeError, "adata.var_names"),
        (lambda: ValueBins(pd.DataFrame(index=GENES)), WrongTypeError, "var.index"),
        (lambda: RankTokens(GENES, vocabulary={"CD4": 0}), WrongTypeError, "dasksc.tokens.Vocabulary"),
        (lambda: RankTokens(GENES, vocabulary="none.json"), MissingPathError, "none.json"),
        (lambda: RankTokens(GENES, medians={"CD4": 1.0}), InputError, "medians"),
        (lambda: RankTokens(GENES, medians=["1"] * 9), WrongTypeError, "medians"),
        (lambda: RankTokens(GENES, medians=[1.0]), InputError, r"\(1,\)"),
        (lambda: RankTokens(GENES, medians=[0.0] * 9), InputError, "above 0"),
        (lambda: RankTokens(["a", "b", "a"]), InputError, "'a'.*var_names_make_unique"),
        (lambda: RankTokens(GENES, max_genes=0), InputError, "max_genes"),
        (lambda: RankTokens(GENES, mask_ratio=1.0), InputError, r"mask_ratio=1.0 .* \[0, 1\)"),
        (lambda: RankTokens(GENES, mask_ratio="0.15"), InputError, "mask_ratio='0.15'"),
        (lambda: RankTokens(GENES, keep_ratio=-0.1), InputError, r"keep_ratio=-0.1 .* \[0, 1\]"),
        (lambda: RankTokens(GENES, random_replace_ratio=0.6, keep_ratio=0.5), InputError, "0.6.*keep_ratio=0.5"),
        (lambda: RankTokens(GENES, prepend_cls="no"), InputError, "prepend_cls.*'no'"),
        (lambda: RankTokens(GENES, missing="ignore"), InputError, "'error'.*'drop'"),
        (lambda: ValueBins([*GENES, GENES[0]], vocabulary=Vocabulary.of_genes(GENES)), InputError, "repeats 'gene0'"),
        (lambda: RankTokens(GENES, padding=True), InputError, "padding"),
        (lambda: RankTokens(GENES, seed=-1), InputError, "seed"),
        (lambda: RankTokens(GENES)(Batch(X=torch.ones(2, 4), index=torch.arange(2))), InputError, "4 .* 9 "),
        (lambda: RankTokens(GENES)(batch_with(math.nan)), InputError, "row 31 "),
        (lambda: RankTokens(GENES)(batch_with(math.inf)), InputError, "row 31 "),
        (lambda: ValueBins(GENES)(batch_with(-1)), InputError, "row 31 "),
        (lambda: RankTokens(GENES)({"X": torch.ones(2, N_GENES)}), InputError, "transform="),
        (lambda: dasksc.scDataset(np.ones((4, 9)), batch_transform=RankTokens(GENES)), InputError, "batch_transform="),
        (lambda: read_with(RankTokens(GENES[::-1])), InputError, "'gene0'.*'gene8'"),
        (lambda: read_with(RankTokens(GENES), genes=GENES[::-1]), InputError, "'gene8'.*'gene0'"),
    ],
)
def test_what_makes_no_tokens_is_refused(use, error, fact):
    with pytest.raises(error, match=fact):
        use()


def test_an_earlier_transform_may_reorder_the_genes():
    made = read_with(lambda batch: Batch(batch, X=batch.X.flip(1)), RankTokens(GENES[::-1]))
    assert made.input_ids.shape == (4, N_GENES)


def test_genes_that_the_vocabulary_lacks_are_counted_and_named_or_dropped():
    vocabulary = Vocabulary.of_genes(GENES[2:4])
    with pytest.raises(MissingKeyError, match="'gene0'.*'gene1'.*'gene4'"):
        RankTokens(GENES, vocabulary=vocabulary)
    for kind in (RankTokens, ValueBins):
        made = kind(GENES, vocabulary=vocabulary, missing="drop")(batch_of([[1.0] * 9, [1.0] + [0.0] * 8], "csr"))
        assert made.input_ids.tolist() == [[3, 4], [0, 0]]
        assert made.attention_mask.tolist() == [[True, True], [False, False]]
    with pytest.raises(MissingKeyError, match="IDs"):
        RankTokens(GENES, vocabulary=Vocabulary.of_genes(["other"]), missing="drop")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    adata = make_adata(103)
    return write_store(adata, tmp_path_factory.mktemp("tokens"), "h5ad")


def dataset_of(path, tokens, **options):
    adata = dasksc.open(path)
    return dasksc.scDataset(
        adata,
        dasksc.BlockShuffling(4),
        batch_size=8,
        fetch_factor=2,
        obs=["cell_type"],
        seed=3,
        transform=tokens,
        **{"layout": "csr", **options},
    )


def as_lists(batches) -> list[tuple]:
    return [
        tuple(part.tolist() for part in (b.index, b.input_ids, b.labels, b["values"], b.obs["cell_type"]))
        for b in batches
    ]


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_masks_are_the_same_after_a_resume(path, layout):
    tokens = ValueBins(dasksc.open(path).var_names, mask_ratio=0.4)
    plain = dataset_of(path, tokens, layout=layout)
    epochs = [as_lists(plain) for _ in range(2)]
    assert epochs[0] != epochs[1]
    resumed = dataset_of(path, tokens)
    iterator = iter(resumed)
    for _ in range(5):
        next(iterator)
    state = resumed.state_dict()
    again = dataset_of(path, tokens)
    again.load_state_dict(state)
    assert as_lists(again) == epochs[0][5:]


def test_transforms_travel(path):
    tokens = RankTokens(GENES, medians=np.full(9, 2.0), mask_ratio=0.4).at_epoch(2)
    batch = batch_of([[1.0, 2.0] + [3.0] * 7], "csr")
    again = pickle.loads(pickle.dumps(tokens))(batch)
    assert all(torch.equal(again[name], part) for name, part in tokens(batch).items() if name != "obs")


def test_a_transform_is_any_function_of_a_batch_and_its_errors_name_the_batch(path):
    dataset = dasksc.scDataset(path, dasksc.Streaming(), batch_size=50, transform=lambda batch: batch.index.tolist())
    assert list(chain(*dataset)) == list(range(103))

    def fail(batch):
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good") as caught:
        list(dasksc.scDataset(path, dasksc.Streaming(), batch_size=50, transform=fail))
    assert "rows" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("options", [{"batch_transform": str}, {"fetch_transform": str}])
def test_a_transform_and_hooks_exclude_each_other(path, options):
    with pytest.raises(InputError, match="transform="):
        dasksc.scDataset(path, dasksc.Streaming(), batch_size=8, transform=str, **options)
    with pytest.raises(InputError, match="ndarray"):
        dasksc.scDataset(np.arange(5), dasksc.Streaming(), batch_size=8, transform=str)
    with pytest.raises(InputError, match="transform.*'x'"):
        dasksc.scDataset(path, dasksc.Streaming(), batch_size=8, transform="x")

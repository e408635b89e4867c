"""Wrong types of arguments of public functions: the class of the error and the name of the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import dasksc
from dasksc import BlockShuffling, BlockWeightedSampling, ClassBalancedSampling, InputError, Streaming
from dasksc.tokens import RankTokens, Vocabulary
from dasksc.train.models import Autoencoder
from dasksc.transforms import Downsample

pytestmark = pytest.mark.core


@pytest.fixture
def adata() -> ad.AnnData:
    obs = pd.DataFrame({"kind": pd.Categorical(["a", "b"] * 5)}, index=[f"c{i}" for i in range(10)])
    return ad.AnnData(np.ones((10, 3), dtype=np.float32), obs=obs, var=pd.DataFrame(index=["x", "y", "z"]))


# Each call, and a part of the error that names the argument.
CALLS: list[tuple[Callable[[ad.AnnData], Any], str]] = [
    (lambda adata: dasksc.statistics(adata, by=3), "by"),
    (lambda adata: dasksc.statistics(adata, layer=["two"]), "layer"),
    (lambda adata: dasksc.statistics(adata, qc={"m": None}), "qc['m']"),
    (lambda adata: dasksc.statistics(adata, qc={"m": [False] * 3}), "qc['m']"),
    (lambda adata: dasksc.highly_variable_genes(adata, 2, batch_key=["kind"]), "batch_key"),
    (lambda adata: dasksc.open(adata, storage_options=3), "storage_options"),
    (lambda adata: dasksc.scDataset(adata, obs=[3]), "obs"),
    (lambda adata: dasksc.suggest_parameters(3, 8), "int"),
    (lambda adata: dasksc.suggest_parameters(adata, None), "batch_size"),
    (lambda adata: dasksc.suggest_parameters(adata, 8, "x"), "target_ram_fraction"),
    (lambda adata: dasksc.suggest_parameters(adata, 8, fetch_callback=3), "fetch_callback"),
    (lambda adata: dasksc.suggest_parameters(adata, 8, labels=["a"]), "labels"),
    (lambda _: ClassBalancedSampling(label_key=["kind"]), "label_key"),
    (lambda _: Vocabulary(["CD4"]), "ids"),
    (lambda _: Vocabulary.of_genes(3), "genes"),
    (lambda _: RankTokens(["a"], vocabulary=3), "vocabulary"),
    (lambda adata: dasksc.open([adata, adata], label=3), "label"),
    (lambda adata: dasksc.scDataset(adata, transform=Downsample), "Downsample"),
    (lambda adata: dasksc.scDataset(adata, fetch_transform=Downsample(0.5)), "fetch_transform"),
    (lambda _: ClassBalancedSampling(label_key="kind", smoothing=True), "smoothing"),
    (lambda adata: dasksc.scDataset(adata, ClassBalancedSampling(label_key="kind", class_weights=[])), "class_w"),
]


@pytest.mark.parametrize(("call", "names"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_argument_of_the_wrong_type_is_named(call: Callable[..., Any], names: str, adata: ad.AnnData) -> None:
    with pytest.raises(InputError) as caught:
        call(adata)
    assert names in str(caught.value)


# Every public function with flags, and its other arguments.
FLAGGED: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (Streaming, ()),
    (BlockShuffling, ()),
    (BlockWeightedSampling, ()),
    (lambda **flags: ClassBalancedSampling(label_key="kind", **flags), ()),
    (dasksc.scDataset, ("adata",)),
    (dasksc.open, ("adata",)),
    (dasksc.convert, ("adata", "out")),
    (dasksc.statistics, ("adata",)),
    (dasksc.highly_variable_genes, ("adata", "n")),
    (dasksc.normalize, ("adata",)),
    (dasksc.datasets.demo_data, ("out",)),
    (dasksc.datasets.synthetic, ("out",)),
    (dasksc.datasets.synthetic_screen, ("out",)),
    (dasksc.suggest_parameters, ("adata", "n")),
    (Autoencoder, ("n",)),
]
FLAGS = [
    (function, names, flag)
    for function, names in FLAGGED
    for flag, parameter in inspect.signature(function).parameters.items()
    if parameter.annotation == "bool"
] + [(FLAGGED[3][0], (), flag) for flag in ("replace", "per_batch")]


@pytest.mark.parametrize(("function", "names", "flag"), FLAGS)
def test_a_flag_given_as_text_does_not_count_as_true(
    function: Callable[..., Any], names: tuple[str, ...], flag: str, adata: ad.AnnData, tmp_path: Path
) -> None:
    given = {"adata": adata, "out": tmp_path / "out", "n": 2}
    with pytest.raises(InputError) as caught:
        function(*(given[name] for name in names), **{flag: "no"})
    assert flag in str(caught.value)

"""Data sets of a training run, and the model arguments that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dasksc
from dasksc import InputError, SamplingStrategy, scDataset
from dasksc.plan.binding import reason_for_no_batches
from dasksc.train.config import Config, created, found
from dasksc.train.sections import STRATEGIES, TOKENIZERS

# Keys of the section `data` that are no arguments of scDataset.
_OWN = {"path", "open", "strategy", "validation", "progress"}


class DataSets(NamedTuple):
    """Data sets of a training run, and values that constructors of models may request."""

    training: scDataset
    validation: scDataset | None
    facts: dict[str, Any]


def opened(path: Any, data: Any, columns: list[str] | None = None, *, names: bool = False) -> Any:
    """Open an atlas with the options of the section ``data``; without names of cells, unless they are needed."""
    names |= data.open["index_unique"] is not None
    return dasksc.open(path, obs=columns, mmap=data.mmap, names=names, **data.open)


def tokens_of(section: Mapping[str, Any], **others: Any) -> Any:
    """Return the tokenizer that a section describes; only known names, since a downloaded model.pt may hold it."""
    name, arguments = section["name"], {key: value for key, value in section.items() if key != "name"}
    if name not in TOKENIZERS:
        raise InputError(f"tokenizer.strategy={name!r} is none of {', '.join(TOKENIZERS)}")
    return created(found(name, TOKENIZERS, what="tokenizer.strategy"), arguments | others, what="tokenizer")


def make_datasets(config: Config, *, device: torch.device, rank: int = 0) -> DataSets:
    """Open the atlas and create the data sets of this rank."""
    data, label, split = config.data, config.model.get("label"), config.data.validation
    strategy_class = found(data.strategy["name"], STRATEGIES, what="data.strategy.name")
    strategy = {name: value for name, value in data.strategy.items() if name != "name"}
    obs = list(dict.fromkeys([*data.obs, *([label] if isinstance(label, str) else [])]))
    weights = None if issubclass(strategy_class, dasksc.CellSets) else strategy.get("weights")
    adata = opened(data.path, data, _columns(obs, data, weights))
    if isinstance(weights, str):
        strategy["weights"] = adata.obs[weights].to_numpy()
    held_out = None
    if split is not None:
        if "indices" in strategy:
            raise InputError(
                "data.strategy.indices and data.validation both select the training rows; give one of them"
            )
        rows = None if data.filter is None else dasksc.rows_where(adata, data.filter)
        if rows is not None and not len(rows):
            raise InputError(f"data.filter={data.filter!r} matches none of the {adata.n_obs} cells")
        strategy["indices"], held_out = _split(adata, split, rows).values()
        if isinstance(weights, str):
            strategy["weights"] = strategy["weights"][strategy["indices"]]

    options = {name: value for name, value in vars(data).items() if name not in _OWN}
    options |= {
        "obs": obs,
        "genes": Path(data.genes) if isinstance(data.genes, str) else data.genes,
        "seed": config.training.seed if data.seed is None else data.seed,
        "device": None if device.type == "cpu" else device,
    }
    tokens: Any = None
    if config.tokenizer is not None:
        if data.genes is not None:
            raise InputError(
                "data.genes and a tokenizer both select genes; leave out data.genes, and give tokenizer.vocabulary"
            )
        tokens = tokens_of(config.tokenizer, genes=adata.var_names, seed=options["seed"])
        options |= {"layout": "csr", "transform": tokens}
    made: SamplingStrategy = created(strategy_class, strategy, what="data.strategy")
    training = scDataset(adata, made, progress=data.progress and rank == 0, **options)
    if not len(training):
        raise InputError(f"an epoch has no batch: {reason_for_no_batches(training.plan())}")
    facts = _facts(training, adata, label, tokens, options["genes"])
    if split is None:
        return DataSets(training, None, facts)

    if training.gene_match is not None:
        options["genes"] = list(training.gene_match.names)
    validation = scDataset(adata, _each_once(made, held_out), equal_ranks=False, **{**options, "drop_last": False})
    n_rows = validation.strategy.get_len(adata)
    if n_rows < validation.world_size:
        raise InputError(
            f"only {n_rows} rows are held out, fewer than the {validation.world_size} ranks; raise "
            "data.validation.share so that each rank has at least one row"
        )
    return DataSets(training, validation, facts)


def _columns(obs: list[str], data: Any, weights: Any) -> list[str] | None:
    """Return the columns of obs to read; None for all, since an expression may use any of them."""
    strategy, split = data.strategy, data.validation or {}
    conditions = [strategy.get("control"), split.get("control"), split.get("hold_out")]
    if any(isinstance(one, str) for one in (data.filter, *conditions)):
        return None
    given = [weights, *(strategy.get(name) for name in ("label_key", "by", "match"))]
    given += [split.get(name) for name in ("by", "groups", "stratify", "conditions")]
    given += [list(part) for one in conditions for part in (one if isinstance(one, list) else [one or {}])]
    needed = [name for one in given for name in (one if isinstance(one, list) else [one])]
    return list(dict.fromkeys([*obs, *(name for name in needed if isinstance(name, str))]))


def _split(adata: Any, split: Mapping[str, Any], rows: Any = None) -> dict[str, Any]:
    """Return the rows to train on and the held-out rows, which are the same on every rank."""
    options = {name: value for name, value in split.items() if name != "share"}
    if split.get("hold_out") is None:
        share = split.get("share", 0.1)
        options["fractions"] = {"training": 1 - share, "validation": share}
    return dasksc.split(adata, indices=rows, **options)


def _each_once(strategy: SamplingStrategy, held_out: Any) -> SamplingStrategy:
    """Return the strategy of validation, which draws each held-out row once."""
    if isinstance(strategy, dasksc.CellSets):  # controls come from the whole atlas
        controls = None if strategy.control is None else slice(None)
        changes: dict[str, Any] = {"n_sets": None, "weights": "cells", "replace": False}
        return replace(strategy, indices=held_out, control_indices=controls, **changes)
    return dasksc.Streaming(indices=held_out)


def _facts(dataset: scDataset, adata: Any, label: Any, tokens: Any, genes: Any) -> dict[str, Any]:
    if tokens is not None:
        facts = {"n_tokens": tokens.vocabulary.size, "pad_id": tokens.vocabulary.pad_id}
        facts["max_seq_len"] = tokens.max_length
        # `RankTokens` have no bins: the order of the tokens represents the values.
        if getattr(tokens, "n_bins", None) is not None:
            facts["n_bins"] = tokens.n_bins
    else:
        match = dataset.gene_match
        chosen = genes if match is None else match.names
        facts = {"n_genes": adata.n_vars if chosen is None else len(chosen)}
    if isinstance(label, str):
        if label not in dataset.categories:
            raise InputError(f"model.label={label!r} is not categorical: obs[{label!r}] holds {adata.obs[label].dtype}")
        facts["n_labels"] = len(dataset.categories[label])
    return facts

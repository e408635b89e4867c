"""Data sets of a training run, and the model arguments that follow from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import dasksc
from dasksc import InputError, MissingKeyError, SamplingStrategy, scDataset
from dasksc.atlas.condition_splits import ConditionRequest
from dasksc.atlas.encoding import encode_column
from dasksc.atlas.filtering import columns_of
from dasksc.atlas.inputs import quoted
from dasksc.atlas.lookup import require_key
from dasksc.loader import titled
from dasksc.sampling.named import STRATEGIES
from dasksc.train.config import Config, Data
from dasksc.train.import_paths import check_arguments, find
from dasksc.train.validation_config import Validation
from dasksc.transforms.vocabulary import PICKLES

__all__ = ["EpochLoader", "EpochLoaders", "make_loaders", "on_device"]

logger = logging.getLogger(__name__)

# Keys that are passed to scDataset unchanged.
_SCDATASET_ARGUMENTS = [
    *("batch_size", "fetch_factor", "layers", "obsm", "filter", "layout", "dtype"),
    *("scheduler", "prefetch", "memory_limit", "genes_missing", "genes_key", "genes_repeated"),
]


class EpochLoader:
    """Data set as read by the training loop, directly or through the workers of a DataLoader.

    Parameters
    ----------
    dataset
        Data set to read.
    data
        ``data`` section of the configuration.
    pin_memory
        If True, batches of DataLoader workers are copied into pinned memory in this process.
    """

    def __init__(self, dataset: scDataset, data: Data, *, pin_memory: bool = False) -> None:
        self.dataset = dataset
        self._n_workers = data.num_workers
        self._n_taken = 0
        self._n_to_skip = 0
        self._n_in_pass = 0
        self.epoch = 0
        self._batches: Any = dataset
        if data.num_workers:
            self._batches = DataLoader(
                dataset,
                batch_size=None,
                num_workers=data.num_workers,
                prefetch_factor=data.prefetch_factor,
                pin_memory=pin_memory,
                # By default, every iterator of a DataLoader draws a seed from the default generator of torch. After a
                # resume, this extra draw would change the dropout masks, which use the same generator.
                generator=torch.Generator().manual_seed(dataset.seed % 2**63),
            )
            self._state = dataset.state_dict()

    @property
    def n_batches_left(self) -> int:
        """Number of batches of the next iteration: those of an epoch, or the rest of a resumed one."""
        return self.dataset.n_batches_left - self._n_to_skip

    @property
    def is_at_end(self) -> bool:
        """True if the last batch yielded is the last of its epoch."""
        return self._n_taken == self._n_in_pass

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of an epoch; the next iteration starts the next epoch."""
        if self._n_workers:
            self.dataset.set_epoch(self.epoch)
        self._n_in_pass = self.dataset.n_batches_left
        self._n_taken, self._n_to_skip = self._n_to_skip, 0
        for batch in islice(iter(self._batches), self._n_taken, None):
            self._n_taken += 1
            yield batch
        self.epoch += 1
        self._n_taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, from which `load_state_dict` resumes."""
        if not self._n_workers:
            return {"dataset": self.dataset.state_dict()}
        # Batches of several workers are interleaved, so the rows yielded so far may not be the first rows of the epoch.
        world = (self.dataset.world_size, self.dataset.batch_size, self.dataset.fetch_factor, self._n_workers)
        state = {**self._state, "epoch": self.epoch, "consumed": []}
        return {"dataset": state, "n_taken": self._n_taken, "read_by": list(world)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the next batch.

        Raises
        ------
        InputError
            If the checkpoint was saved in the middle of an epoch, and the number of ranks, the batch size, the fetch
            factor or the number of DataLoader workers has changed. If neither run uses DataLoader workers, the other
            three may change.
        """
        n_taken = state.get("n_taken", 0)
        inside = bool(n_taken) if "read_by" in state else bool(state["dataset"]["consumed"])
        world = [self.dataset.world_size, self.dataset.batch_size, self.dataset.fetch_factor, self._n_workers]
        if inside and ("read_by" in state or self._n_workers) and state.get("read_by") != world:
            if "read_by" not in state:
                raise InputError(
                    "the checkpoint was saved in the middle of an epoch with data.num_workers=0, but this run has "
                    f"{self._n_workers}. Set data.num_workers=0, or use a checkpoint from the end of an epoch"
                )
            raise InputError(
                "the checkpoint was saved in the middle of an epoch with (ranks, batch_size, fetch_factor, "
                f"num_workers) = {tuple(state['read_by'])}, but this run has {tuple(world)}. Restore these values, or "
                "use a checkpoint from the end of an epoch"
            )
        self.dataset.load_state_dict(state["dataset"])
        if self._n_workers:
            self._state = self.dataset.state_dict()
        self.epoch = int(state["dataset"]["epoch"])
        self._n_to_skip = n_taken


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLoaders:
    """Data sets of a training run.

    Parameters
    ----------
    training, validation
        Loaders of the data sets; `validation` is None if no rows are held out.
    facts
        Values derived from the data. The constructor of a model may request them (`dasksc.train.models`).
    split_table
        For each context (such as a cell line), the numbers of conditions and cells in each part of the split; None if
        conditions were not split.
    """

    training: EpochLoader
    validation: EpochLoader | None
    facts: dict[str, Any]
    split_table: pd.DataFrame | None = None


def make_loaders(config: Config, *, device: torch.device, rank: int = 0) -> EpochLoaders:
    """Open the atlas and create the data sets of this rank.

    Parameters
    ----------
    config
        Configuration of the training run.
    device, rank
        Device and rank of this process.

    Raises
    ------
    InputError
        If the configuration does not fit the atlas.
    MissingKeyError
        If the atlas lacks columns, layers or obsm entries that the configuration names; the message lists all of them.
    """
    data = config.data
    label = config.model.arguments.get("label")
    strategy_class = find(data.strategy.name, STRATEGIES, what="data.strategy.name")
    options = dict(data.strategy.arguments)
    obs = list(dict.fromkeys([*data.obs, *([label] if isinstance(label, str) else [])]))
    in_sets = issubclass(strategy_class, dasksc.CellSets)
    weights = None if in_sets else options.get("weights")
    needed = [
        name for name in (*obs, options.get("label_key"), weights, *_validation_columns(data)) if isinstance(name, str)
    ]
    if in_sets:
        check_arguments(strategy_class, options, what="data.strategy")
        needed += dasksc.CellSets(**options).obs_columns
    # A filter, and an expression for control cells, may use any column.
    names_columns = data.filter is not None or isinstance(options.get("control"), str)
    columns = None if names_columns else list(dict.fromkeys(needed))
    names = data.open.index_unique is not None
    try:
        adata = dasksc.open(data.path, obs=columns, mmap=data.mmap, names=names, **data.open.model_dump())
    except MissingKeyError:
        # Read all columns, so that the error lists every unknown name and not only the first.
        _check_names(dasksc.open(data.path, mmap=data.mmap, names=names, **data.open.model_dump()), config)
        raise
    _check_names(adata, config)
    if isinstance(weights, str):
        options["weights"] = np.asarray(adata.obs[weights], dtype=np.float64)
    held_out = split_table = None
    if data.validation is not None and data.validation.path is None:
        rows = None if data.filter is None else dasksc.rows_where(adata, data.filter)
        parts = _parts_of(adata, data.validation, rows)
        rest, held_out = parts.values()
        split_table = _table_of(parts, data.validation)
        if "indices" in options:
            raise InputError(
                "data.strategy.indices and data.validation.share both select the training rows; give one of them"
            )
        if isinstance(options.get("weights"), np.ndarray):
            options["weights"] = options["weights"][rest]
        options["indices"] = rest
    check_arguments(strategy_class, options, what="data.strategy")

    on_gpu = device.type == "cuda"
    pinned = on_gpu if data.pin_memory is None else data.pin_memory
    common = {name: getattr(data, name) for name in _SCDATASET_ARGUMENTS}
    common |= {
        "obs": obs,
        "genes": _genes(data.genes),
        "seed": config.training.seed if data.seed is None else data.seed,
        "pin_memory": pinned and not data.num_workers,
    }
    tokens = None
    if config.tokenizer is not None:
        if data.genes is not None:
            raise InputError(
                "data.genes and a tokenizer both select genes; leave out data.genes, and give tokenizer.vocabulary"
            )
        tokens = _tokens(config, adata.var_names, common["seed"])
        _check_length(config, tokens, adata.n_vars)
        common |= {"layout": "csr", "transform": tokens}
    training = scDataset(
        adata,
        strategy_class(**options),
        drop_last=data.drop_last,
        progress=data.progress and rank == 0,
        **_known(common),
    )
    if not len(training):
        raise InputError(
            f"an epoch has no batch: with data.drop_last=true, {training.strategy.get_len(adata)} rows are too few for "
            f"a batch of {data.batch_size} on every rank ({training.world_size} in total). Lower data.batch_size, or "
            "set data.drop_last=false"
        )
    match = training.gene_match
    if match is not None:
        common["genes"] = list(match.names)
    facts = _facts(training, adata, label, tokens, None if common["genes"] is None else len(common["genes"]))
    validation = None
    if data.validation is not None:
        held = adata
        if data.validation.path is not None:
            columns = list(dict.fromkeys([*obs, *needed] if in_sets else obs)) if not names_columns else None
            held = dasksc.open(data.validation.path, obs=columns, mmap=data.mmap, names=names, **data.open.model_dump())
            if data.filter is not None:
                held_out = dasksc.rows_where(held, data.filter)  # before labels change
            if match is None or (data.genes_missing, data.genes_key, data.genes_repeated) == ("error", None, "error"):
                common["genes"] = _same_genes(held, adata, common["genes"])
            elif data.genes_missing == "drop":
                common["genes_missing"] = "error"  # dropping genes would change the columns
            common["filter"] = None
            _relabel(held, training.categories, warns=rank == 0)
        validation = scDataset(
            held, _validation_strategy(strategy_class(**options), held_out), equal_ranks=False, **_known(common)
        )
        titled(validation, "validation pass {epoch}, rank {rank} of {world_size}")
        if odd := validation.categories.keys() - training.categories.keys():
            raise InputError(
                f"obs columns {sorted(odd)} of data.validation.path hold labels, but those of data.path hold numbers. "
                "Store the same type in both"
            )
        n_rows = validation.strategy.get_len(held)
        if n_rows < validation.world_size:
            raise InputError(
                f"only {n_rows} rows are held out, fewer than the {validation.world_size} ranks; raise "
                "data.validation.share so that each rank has at least one row"
            )
    return EpochLoaders(
        training=EpochLoader(training, data, pin_memory=pinned),
        validation=None if validation is None else EpochLoader(validation, data, pin_memory=pinned),
        facts=facts,
        split_table=split_table,
    )


def _check_names(adata: Any, config: Config) -> None:
    """Raise one error that lists all unknown layers, obsm and obs columns, each with its key in the configuration."""
    data = config.data
    columns: dict[str, list[Any]] = {
        "data.obs": data.obs,
        "model.label": [config.model.arguments.get("label")],
        "data.strategy.label_key": [data.strategy.arguments.get("label_key")],
        "data.strategy.weights": [data.strategy.arguments.get("weights")],
        "data.filter": [] if data.filter is None else columns_of(data.filter),
        "data.validation": _validation_columns(data),
    }
    if issubclass(find(data.strategy.name, STRATEGIES, what="data.strategy.name"), dasksc.CellSets):
        del columns["data.strategy.weights"]  # "cells", "groups" or a mapping, not a column
    wanted: list[tuple[str, str, list[Any]]] = [
        ("data.layers", "layers", data.layers),
        ("data.obsm", "obsm", data.obsm),
    ]
    wanted += [(key, "obs", names) for key, names in columns.items()]
    problems = []
    for key, group, names in wanted:
        held = getattr(adata, group)
        for name in names:
            try:
                if isinstance(name, str):
                    require_key(group, name, held)
            except MissingKeyError as error:
                problems.append(f"{key}: {error}")
    if len(problems) == 1:
        raise MissingKeyError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise MissingKeyError(f"{quoted(data.path)} lacks {len(problems)} of the names in the configuration:{lines}")


def _validation_strategy(strategy: SamplingStrategy, held_out: Any) -> SamplingStrategy:
    """Return the strategy of validation, which draws each held-out row once.

    If training uses `CellSets`, validation also draws sets, whose controls come from the whole atlas.
    """
    if isinstance(strategy, dasksc.CellSets):
        controls = None if strategy.control is None else slice(None)
        changes: dict[str, Any] = {"n_sets": None, "weights": "cells", "replace": False}
        return replace(strategy, indices=held_out, control_indices=controls, **changes)
    return dasksc.Streaming(indices=held_out)


def _same_genes(held: Any, adata: Any, genes: Any) -> Any:
    """Return the genes of `held` that match those read from `adata`, in the same order."""
    if held.var_names.equals(adata.var_names):
        return genes
    by_name = genes is not None and isinstance(genes[0], str)
    names = list(genes if by_name else adata.var_names if genes is None else adata.var_names[genes])
    if len(set(names)) < len(names):
        raise InputError(
            "the genes of data.validation.path differ from those of data.path, and repeated var_names cannot be "
            "matched. Make var_names unique in both"
        )
    missing = [name for name in names if name not in held.var_names]
    if missing:
        raise InputError(
            f"data.validation.path lacks {len(missing)} of the {len(names)} genes used for training: "
            f"{_first(missing)}. Give an atlas that has them, or select common genes with data.genes"
        )
    return names


def _relabel(held: Any, categories: Mapping[str, list[Any]], *, warns: bool) -> None:
    """Convert obs columns of `held` to the categories of training; labels that training lacks become missing."""
    for name, known_labels in categories.items():
        if name not in held.obs:
            continue  # the data set reports it
        codes, labels = encode_column(held.obs[name])
        if labels is None:
            distinct, codes = np.unique(codes, return_inverse=True)
            labels = distinct.tolist()
        position = {label: code for code, label in enumerate(known_labels)}
        # The last entry maps missing values, whose code is -1.
        new = np.array([*(position.get(label, -1) for label in labels), -1])[codes]
        unknown = [labels[code] for code in np.unique(codes[new < 0]) if code >= 0]
        if unknown and warns:
            logger.warning(
                "obs[%r] of data.validation.path has %d labels that data.path does not have: %s. Their %d cells are "
                "treated as unlabeled",
                name,
                len(unknown),
                _first(unknown),
                int(((new < 0) & (codes >= 0)).sum()),
            )
        held.obs[name] = pd.Categorical.from_codes(new, categories=known_labels)


def _first(names: list[Any]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def split_rows(adata: Any, validation: Validation) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows for training and the held-out rows; the split is the same on every rank."""
    rest, held_out = _parts_of(adata, validation, None).values()
    return rest, held_out


def _parts_of(adata: Any, validation: Validation, rows: NDArray[np.int64] | None) -> dict[str, NDArray[np.int64]]:
    """Split all rows of an atlas, or the given ones."""
    options: dict[str, Any] = {}
    if validation.hold_out is None:
        options["fractions"] = {"training": 1 - validation.share, "validation": validation.share}
    return dasksc.split(
        adata,
        indices=rows,
        by=validation.by,
        groups=validation.groups,
        stratify=validation.stratify,
        conditions=validation.conditions,
        hold_out=validation.hold_out,
        few_shot=validation.few_shot,
        control=validation.control,
        seed=validation.seed,
        **options,
    )


def _table_of(parts: Any, validation: Validation) -> pd.DataFrame | None:
    """Return the table of a split by conditions for display; None for any other split.

    If the conditions are the values of a single column, such as ``donor``, the headers of the table have the name of
    that column in place of "conditions". The column of control cells is left out if no controls are given.
    """
    table: pd.DataFrame | None = getattr(parts, "table", None)
    if table is None:
        return None
    if validation.control is None:
        table = table.drop(columns="control cells")
    columns = [validation.conditions] if isinstance(validation.conditions, str) else list(validation.conditions or ())
    if len(columns) == 1:
        names = {f"{part} conditions": f"{part} {columns[0]}" for part in parts}
        table = table.rename(columns=names).rename_axis(None)
    return table


def _validation_columns(data: Data) -> list[Any]:
    """Return the obs columns that determine which rows are held out."""
    held = data.validation
    if held is None:
        return []
    if held.conditions is not None:
        return ConditionRequest.of(held.conditions, held.hold_out, held.few_shot, held.control).needed
    given = (held.by, held.groups, held.stratify)
    return [name for names in given for name in (names if isinstance(names, list) else [names])]


def _tokens(config: Config, genes: Any, seed: int) -> Any:
    assert config.tokenizer is not None
    tokens = import_module("dasksc.tokens")
    return tokens.from_config(config.tokenizer.options, genes=genes, vocabulary=config.tokenizer.vocabulary, seed=seed)


def _check_length(config: Config, tokens: Any, n_genes: int) -> None:
    """Raise an error if a cell can have more tokens than the model accepts."""
    longest = min(tokens.max_genes, n_genes) + tokens.prepend_cls
    room = config.model.arguments.get("max_seq_len")
    if isinstance(room, int) and room < longest:
        note = ", not counting the cell token" if tokens.prepend_cls else ""
        raise InputError(
            f"model.max_seq_len={room}, but cells may have {longest} tokens. Raise it, or set tokenizer.max_genes to "
            f"{room - tokens.prepend_cls}{note}"
        )


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None or name in ("fetch_factor", "dtype")}


def _genes(genes: Any) -> Any:
    if not isinstance(genes, str):
        return genes
    if Path(genes).suffix in (".json", *PICKLES):
        return Path(genes)
    try:
        return Path(genes).read_text().split()
    except OSError as error:
        raise InputError(
            f"data.genes={genes!r} is not a text file with one gene name per line ({error}); give such a file or a list"
        ) from error


def _facts(dataset: scDataset, adata: Any, label: Any, tokens: Any, n_genes: int | None) -> dict[str, Any]:
    if tokens is not None:
        facts = {
            "n_tokens": tokens.vocabulary.size,
            "pad_id": tokens.vocabulary.pad_id,
            "max_seq_len": tokens.max_length,
        }
        # `RankTokens` have no bins: the order of the tokens represents the values.
        if getattr(tokens, "n_bins", None) is not None:
            facts["n_bins"] = tokens.n_bins
    else:
        facts = {"n_genes": adata.n_vars if n_genes is None else n_genes}
    if isinstance(label, str):
        if label not in dataset.categories:
            raise InputError(f"model.label={label!r} is not categorical: obs[{label!r}] holds {adata.obs[label].dtype}")
        facts["n_labels"] = len(dataset.categories[label])
    return facts


def on_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a batch to a device; copies from pinned memory are asynchronous."""
    if device.type == "cpu":
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({name: on_device(value, device) for name, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch

"""Checkpoints, written collectively by all ranks with ``torch.distributed.checkpoint``.

A checkpoint is a directory ``step-<number>``. It contains the shards of the model, the optimizer and the random
states, which any number of ranks can load under any strategy, and ``state.json`` with everything else. The directory
is written under a temporary name and renamed when complete.

A run that resumes from an older checkpoint abandons the later ones. They are moved into ``abandoned-<number>`` as soon
as the run has written its first checkpoint, so the latest checkpoint of a directory belongs to its most recent run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dasksc import CorruptDataError, DaskscError, InputError, MissingPathError, StorageError
from dasksc.train.optim import hyperparameters_of
from dasksc.train.parallel import RankContext

__all__ = ["Checkpoints", "read_state", "read_tensors"]

logger = logging.getLogger(__name__)

_VERSION = 1
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Checkpoints of a run.

    Parameters
    ----------
    folder
        Directory of the checkpoints, visible to all ranks.
    keep
        Number of best checkpoints to keep in addition to the latest; -1 keeps all.
    mode
        ``min`` if the smallest value is best, ``max`` if the largest is.
    context
        Rank and device of this process.
    """

    folder: Path
    keep: int
    mode: str
    context: RankContext

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        value: float | None,
        *,
        branched_at: int | None = None,
    ) -> Path:
        """Write a checkpoint. All ranks must call this method.

        Parameters
        ----------
        step
            Number of the step.
        model, optimizer
            Model and optimizer, sharded or not.
        state
            All other state, serializable as JSON; the state of rank 0 is written.
        value
            Value of the monitored metric, by which checkpoints are compared. With None, the checkpoint is kept only
            until the next one.
        branched_at
            Step of the checkpoint from which the run resumed, or 0 if that checkpoint is not in `folder`. None if the
            run did not resume, or has saved a checkpoint since. Checkpoints of steps after `branched_at` belong to the
            abandoned run and are moved into ``abandoned-<number>``.

        Returns
        -------
        Path
            Path of the checkpoint.

        Raises
        ------
        StorageError
            If the checkpoint cannot be written.
        """
        path = self.folder / f"step-{step:08d}"
        partial = path.with_name(path.name + ".partial")
        unwritten = f"the checkpoint {path} cannot be written"

        def begin() -> None:
            for leftover in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.gone")]:
                shutil.rmtree(leftover)  # left by a run that was killed
            partial.mkdir(parents=True)

        def complete() -> None:
            written = {"version": _VERSION, "step": step, "value": value, **state}
            with open(partial / "state.json", "w") as file:
                json.dump(written, file)
                file.flush()
                os.fsync(file.fileno())
            self._publish(partial, path, branched_at)
            self._prune(path)

        self.context.on_rank_zero(begin, unwritten)
        tensors = _tensors_of(model, optimizer) | _random_state(self.context)
        with _quiet(), _converted_errors(StorageError, f"{partial} cannot be written", "Is there space left?"):
            save(tensors, checkpoint_id=partial, no_dist=not dist.is_initialized())
        self.context.on_rank_zero(complete, unwritten)
        return path

    def _publish(self, complete: Path, path: Path, branched_at: int | None) -> None:
        """Rename a complete checkpoint to its final name, and move the checkpoints of the abandoned run aside."""
        abandoned = [other for other in self.all() if branched_at is not None and _step_of(other) > branched_at]
        aside = next(folder for n in count(1) if not (folder := self.folder / f"abandoned-{n}").exists())
        if path.exists():
            abandoned = sorted({*abandoned, path})
            _move(path, aside)
        complete.rename(path)
        # An abandoned checkpoint of the same name had to be moved before the rename. The others are moved only now, so
        # that they stay in place if the run is killed before the rename.
        for other in abandoned:
            if other != path:
                _move(other, aside)
        if abandoned:
            logger.warning(
                "checkpoints of another run were moved from %s to %s, where training.resume_from=auto and "
                "training.save_top_k ignore them: %s. Delete that folder if you do not need them",
                self.folder,
                aside,
                ", ".join(other.name for other in abandoned),
            )

    def _prune(self, latest: Path) -> None:
        if self.keep < 0:
            return
        values: dict[Path, float | None] = {}
        for path in self.all():
            try:
                values[path] = read_state(path)["value"]
            except (InputError, CorruptDataError) as error:
                logger.warning("an unreadable checkpoint is skipped and kept: %s", error)
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((sign * value, path) for path, value in values.items() if value is not None)
        kept = {latest, *(path for _, path in ranked[: self.keep])}
        for path in values.keys() - kept:
            _remove(path)

    def all(self) -> list[Path]:
        """Return the complete checkpoints in ascending order of their steps."""
        if not self.folder.is_dir():
            return []
        # The whole name must match: copies under other names belong to the user.
        found = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name) and (p / "state.json").exists()]
        return sorted(found, key=_step_of)

    def has(self, path: Path) -> bool:
        """Return True if the checkpoint `path` is in `folder`. All ranks must call this method."""
        is_here = _NAME.fullmatch(path.name) is not None and path.resolve().parent == self.folder.resolve()
        return bool(self.context.broadcast(is_here))

    def find(self, resume_from: str | None) -> Path | None:
        """Return the checkpoint to resume from, or None to start a new run. All ranks must call this method.

        Raises
        ------
        InputError
            If a new run would write into a directory that has checkpoints of another run.
        MissingPathError
            If `resume_from` is not a checkpoint.
        """
        existing = self.context.broadcast([str(path) for path in self.all()])
        if resume_from is None:
            if existing:
                raise InputError(
                    f"{self.folder} has {len(existing)} checkpoint{'s' * (len(existing) > 1)} of another run, the "
                    f"latest {Path(existing[-1]).name}. Resume it with training.resume_from=auto, or give another "
                    "training.checkpoint_dir"
                )
            return None
        if resume_from == "auto":
            return Path(existing[-1]) if existing else None
        path = Path(resume_from)
        if not (path / "state.json").exists():
            raise MissingPathError(
                f"training.resume_from={resume_from!r} is not a checkpoint; {self.folder} has {existing}"
            )
        return path

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, made: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Load model, optimizer and random states, and return the remaining state. All ranks must call this method.

        Parameters
        ----------
        path
            Path of the checkpoint.
        model, optimizer
            Model and optimizer, sharded or not. The optimizer keeps its constructor arguments, such as
            ``weight_decay``; its other state comes from the checkpoint.
        made
            ``name`` and ``arguments`` of ``model`` and ``optimizer``, in the same form as in the checkpoint.

        Returns
        -------
        dict
            Saved state.

        Raises
        ------
        InputError
            If the checkpoint is of another model or optimizer; nothing is loaded in that case.
        CorruptDataError
            If the checkpoint is damaged.
        """
        state = read_state(path)
        known_tensors = _known_tensors(path)
        tensors = _tensors_of(model, optimizer)
        _check_fits(path, state, made, tensors, known_tensors)
        random = {name: value for name, value in _random_state(self.context).items() if name in known_tensors}
        groups = tensors["optimizer"]["param_groups"]
        states = _group_states(groups, hyperparameters_of(optimizer), known_tensors)
        filled = {**tensors, "optimizer": {**tensors["optimizer"], "param_groups": states}}
        read_tensors(filled | random, path, no_dist=not dist.is_initialized())
        for group, values in zip(groups, states, strict=True):
            group.update(values)
        set_model_state_dict(model, tensors["model"])
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        _set_random_state(random, self.context)
        return state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning that torch.distributed is not initialized, since a single process is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextlib.contextmanager
def _converted_errors(kind: type[DaskscError], what: str, advice: str) -> Iterator[None]:
    """Convert torch's `CheckpointException`, which derives only from `BaseException`, to an error of dasksc."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, KeyboardInterrupt | MemoryError | torch.OutOfMemoryError):
            raise cause from None
        of_rank = (
            f" on rank {rank}" if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else ""
        )
        raise kind(f"{what}: {type(cause).__name__}{of_rank}, {cause}. {advice}") from error


def read_tensors(tensors: dict[str, Any], path: Path, *, no_dist: bool) -> None:
    """Load tensors and other named values from a checkpoint in place."""
    advice = "Its files may be damaged: resume from another checkpoint, or remove this one"
    with _quiet(), _converted_errors(InputError, f"{path} cannot be loaded", advice):
        load(tensors, checkpoint_id=path, no_dist=no_dist)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _move(path: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed one is never taken for a checkpoint."""
    shutil.rmtree(path.rename(path.with_name(path.name + ".gone")))


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint other than its tensors.

    Raises
    ------
    MissingPathError
        If there is no checkpoint at `path`.
    CorruptDataError
        If its ``state.json`` is damaged.
    InputError
        If its version is not supported.
    """
    file = path / "state.json"
    advice = f"Remove {path} to resume from the previous checkpoint"
    try:
        state = json.loads(file.read_text())
    except FileNotFoundError as error:
        model = path / "model.pt"
        hint = f"; did you mean {model}?" if model.exists() else f": expected {file}"
        raise MissingPathError(f"there is no checkpoint at {path}{hint}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise CorruptDataError(f"{file} is damaged or truncated: {error}. {advice}") from error
    if not isinstance(state, dict):
        raise CorruptDataError(f"{file} is damaged: expected a JSON object, found {type(state).__name__}. {advice}")
    if state.get("version") != _VERSION:
        raise InputError(
            f"{path} has version {state.get('version')}, but this version of dasksc reads version {_VERSION}. Use the "
            "version of dasksc that wrote it"
        )
    return state


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _known_tensors(path: Path) -> dict[str, Any]:
    """Return the metadata of the entries of a checkpoint, by names such as ``model.layer.weight``.

    The metadata of a tensor has a `size`.
    """
    try:
        return dict(FileSystemReader(path).read_metadata().state_dict_metadata)
    except MemoryError:
        raise
    except Exception as error:  # unpickling a truncated file raises errors of any type
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise StorageError(f"{path / '.metadata'} cannot be read: {error}") from error
        raise CorruptDataError(
            f"{path / '.metadata'} is missing or damaged: {type(error).__name__}, {error}. Remove {path} to resume "
            "from the checkpoint before it"
        ) from error


def _group_states(
    groups: list[dict[str, Any]], hyperparameters: Collection[str], known_tensors: Collection[str]
) -> list[dict[str, Any]]:
    """Return the entries to load for each parameter group: those in the checkpoint that are not hyperparameters."""
    return [
        {
            name: value
            for name, value in group.items()
            if name not in hyperparameters and f"optimizer.param_groups.{i}.{name}" in known_tensors
        }
        for i, group in enumerate(groups)
    ]


def _check_fits(
    path: Path,
    state: Mapping[str, Any],
    made: Mapping[str, Any],
    tensors: Mapping[str, Any],
    known_tensors: Mapping[str, Any],
) -> None:
    """Raise an error if the tensors of a checkpoint do not match those of the run, or if the optimizers differ.

    Arguments that change no tensor, such as ``dropout``, may differ.
    """
    mismatches = _tensor_mismatches("model.", tensors["model"], known_tensors, is_all=True)
    if mismatches:
        raise InputError(_mismatch_message(path, "model", state, made["model"], mismatches))
    # Additional optimizer state that this run does not use, such as momentum, is harmless.
    mismatches = _tensor_mismatches("optimizer.state.", tensors["optimizer"]["state"], known_tensors, is_all=False)
    saved = state.get("optimizer", made["optimizer"])  # earlier versions wrote checkpoints without it
    if mismatches or saved["name"] != made["optimizer"]["name"]:
        raise InputError(_mismatch_message(path, "training.optimizer", state, made["optimizer"], mismatches))


def _tensor_mismatches(
    prefix: str, tree: Mapping[str, Any], known_tensors: Mapping[str, Any], *, is_all: bool
) -> list[str]:
    """Describe each tensor that differs from the checkpoint; `is_all` includes tensors that only the checkpoint has."""
    current = {f"{prefix}{name}": value.size() for name, value in _tensors_in(tree)}
    saved = {name: one.size for name, one in known_tensors.items() if name.startswith(prefix) and hasattr(one, "size")}
    mismatches = [f"{name} is not in the checkpoint" for name in current if name not in saved]
    if is_all:
        mismatches += [f"{name} is only in the checkpoint" for name in saved if name not in current]
    return [
        *(
            f"{name} has shape {list(size)} and had {list(saved[name])}"
            for name, size in current.items()
            if name in saved and saved[name] != size
        ),
        *mismatches,
    ]


def _tensors_in(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dicts and lists, with names as torch writes them."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        if isinstance(value, torch.Tensor):
            yield str(name), value
        else:
            yield from ((f"{name}.{rest}", tensor) for rest, tensor in _tensors_in(value))


def _mismatch_message(
    path: Path, section: str, state: Mapping[str, Any], current: Mapping[str, Any], mismatches: list[str]
) -> str:
    """Return the error message that lists arguments and tensors in which a checkpoint and this run differ."""
    saved = state.get(section.rpartition(".")[2])
    differences = [] if saved is None else _different_arguments(section, saved, json.loads(json.dumps(current)))
    origin = " (n_genes, n_labels, n_tokens and the like come from the data)" if section == "model" else ""
    advice = f"Restore these values{origin}"
    if not differences:
        advice = "Restore the code and the data of that run"
        differences = [
            "the arguments are the same, so the code or the data differ"
            if saved
            else "the checkpoint has no arguments to compare"
        ]
    if mismatches:
        differences.append(f"tensors that differ: {len(mismatches)}, the first {mismatches[0]}")
    return (
        f"the checkpoint {path} does not fit the section {section}: {'; '.join(differences)}. {advice}, or start "
        "from the beginning in another training.checkpoint_dir"
    )


def _different_arguments(section: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe each argument that differs; if the name of the model or optimizer differs, describe only the name."""
    if saved["name"] != current["name"]:
        return [f"{section}.name is {current['name']!r} and was {saved['name']!r}"]
    before, now = saved["arguments"], current["arguments"]
    differences = []
    for name in dict.fromkeys([*before, *now]):
        if name not in before:
            differences.append(f"{section}.{name} is {now[name]!r} in this run and is not given in the checkpoint")
        elif name not in now:
            differences.append(f"{section}.{name} is not given in this run and is {before[name]!r} in the checkpoint")
        elif before[name] != now[name]:
            differences.append(f"{section}.{name} is {now[name]!r} and was {before[name]!r}")
    return differences


def _random_state(context: RankContext) -> dict[str, torch.Tensor]:
    state = {f"random-cpu-{context.rank}": torch.get_rng_state()}
    if context.device.type == "cuda":
        state[f"random-cuda-{context.rank}"] = torch.cuda.get_rng_state(context.device)
    return state


def _set_random_state(state: Mapping[str, torch.Tensor], context: RankContext) -> None:
    for name, value in state.items():
        if name.startswith("random-cuda"):
            torch.cuda.set_rng_state(value, context.device)
        else:
            torch.set_rng_state(value)

"""Training loop."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dasksc import InputError, TrainingError
from dasksc.inspection.report import Report
from dasksc.train.checkpoint import Checkpoints
from dasksc.train.config import Config, created, found
from dasksc.train.data import make_datasets
from dasksc.train.metrics import Means, Pace, Table, imported, loggers_of
from dasksc.train.parallel import Ranks, distribute, dtype_of, joined_ranks
from dasksc.train.saved_models import check_predictions, predict_trained, reading_options, save_model
from dasksc.train.sections import MODELS, OPTIMIZERS, Scheduler


def fit(config: Config, *, say: Callable[[str], None] = print) -> Report:
    """Train a model according to a configuration. Every rank must call this function.

    Parameters
    ----------
    config
        Configuration of the training run.
    say
        Function that prints a line; called on rank 0 only.

    Returns
    -------
    Report
        Facts by name, also as attributes: ``strategy``, ``world_size``, ``device`` and the number of trained parameters
        (``n_parameters``); ``n_steps`` and ``n_epochs``, including those before the run was resumed; ``n_cells`` over
        all ranks, ``elapsed_s`` without validation and checkpoints, and ``cells_per_s`` since then; ``wait_share``, the
        share of time that the slowest rank waited for data; ``figures`` with the last value of each metric; and the
        paths of the last ``checkpoint`` and of the ``model``.

    Raises
    ------
    TrainingError
        If the loss becomes NaN or infinite.
    StorageError
        If a checkpoint, the model or the metrics cannot be written; raised on every rank.

    Examples
    --------
    >>> from dasksc.train import Config, fit
    >>> config = Config.of(
    ...     {
    ...         "data": {"path": "atlas.h5ad", "validation": 0.1},
    ...         "model": {"name": "mlp_classifier", "label": "cell_type", "hidden_dim": 32},
    ...         "training": {"checkpoint_dir": "run", "logger": "csv"},
    ...     }
    ... )
    >>> report = fit(config, say=lambda line: None)
    >>> report.n_steps, "validation_accuracy" in report.figures
    (29, True)
    """
    with joined_ranks(config.training) as ranks, contextlib.ExitStack() as closing:
        return _Run(config, ranks, say, closing).train()


class _Run:
    """State and progress of a training run."""

    def __init__(self, config: Config, ranks: Ranks, say: Callable[[str], None], closing: contextlib.ExitStack) -> None:
        self.config, self.training, self.ranks, self.say = config, config.training, ranks, say
        training = config.training
        for name in {"tensorboard", "wandb"} & set(training.loggers):
            imported(name)  # so that all ranks raise an error
        self.folder = Path(training.checkpoint_dir)
        self.dataset, self.validation, facts = make_datasets(config, device=ranks.device, rank=ranks.rank)
        unwritten = f"training.checkpoint_dir={training.checkpoint_dir!r} cannot be written"
        ranks.on_rank_zero(lambda: self.folder.mkdir(parents=True, exist_ok=True), unwritten)
        if ranks.rank == 0:
            say(f"writing checkpoints, metrics.csv and model.pt to {self.folder.absolute()}")

        model_class = found(config.model["name"], MODELS, what="model.name")
        accepted = created(inspect.signature, {"obj": model_class}, what="model.name").parameters
        facts = {name: value for name, value in facts.items() if name in accepted}
        self.arguments = facts | {name: value for name, value in config.model.items() if name != "name"}
        torch.manual_seed(training.seed)  # equal parameters on every rank
        self.model: nn.Module = created(model_class, self.arguments, what="model")
        if config.predict is not None:
            check_predictions(config.predict, self.model)
        self.n_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.whole = distribute(self.model, training, ranks)
        optimizer_class = found(training.optimizer["name"], OPTIMIZERS, what="training.optimizer.name")
        options = {"lr": 1e-3} | {name: value for name, value in training.optimizer.items() if name != "name"}
        options["params"] = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer = created(optimizer_class, options, what="training.optimizer")
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=training.precision == "16-mixed")
        self.dtype = dtype_of(training.precision)

        self.monitor = training.monitor or ("loss" if self.validation is None else "validation_loss")
        self.monitors_validation = self.monitor.startswith("validation_")
        if self.monitors_validation and self.validation is None:
            raise InputError(f"training.monitor={self.monitor!r} is a metric of validation: set data.validation")
        mode = training.monitor_mode or ("max" if self.monitor.endswith("accuracy") else "min")
        self.checkpoints = Checkpoints(
            folder=self.folder, keep=training.save_top_k, is_larger_better=mode == "max", ranks=ranks
        )
        self.max_epochs = training.max_epochs or (None if training.max_steps else 1)
        self.step = self.epoch = self.n_cells = 0
        self.step_saved = self.step_validated = -1
        self.figures: dict[str, Any] = {}
        self.values: dict[str, float] = {}
        self.rated: float | None = None
        # Dropout must differ between ranks.
        torch.manual_seed(training.seed + 1 + ranks.rank)
        self._resume()
        self.total_steps = self._total_steps()
        self.pace = Pace(ranks, self.dataset)
        self.logs: list[Callable[[Mapping[str, Any]], Any]] = []

        def begin_logs() -> None:
            self.logs = [Table(self.folder / "metrics.csv", self.step), *loggers_of(config, say, closing)]

        ranks.on_rank_zero(begin_logs, unwritten)

    def _total_steps(self) -> int:
        """Return the number of steps of the run: those already taken, perhaps with other batch sizes, and the rest."""
        k, total = self.training.gradient_accumulation, math.inf
        if self.max_epochs is not None:
            total = self.step
            if self.epoch < self.max_epochs:
                n_epochs = self.max_epochs - self.epoch - 1
                total += math.ceil(self.dataset.n_batches_left / k) + n_epochs * math.ceil(len(self.dataset) / k)
        return int(min(total, self.training.max_steps or math.inf))

    def _made(self) -> dict[str, Any]:
        return {"model": {"name": self.config.model["name"], **self.arguments}, "optimizer": self.training.optimizer}

    def _resume(self) -> None:
        path = self.checkpoints.find(self.training.resume_from)
        if path is None:
            return
        state = self.checkpoints.load(path, self.model, self.optimizer, self._made())
        self.dataset.load_state_dict(state["data"])
        self.epoch = int(state["data"]["epoch"])
        if state["scaler"]:  # empty unless the precision is 16-mixed
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.figures, self.values = state["step"], state["figures"], state["values"]
        self.step_validated, self.rated = state["validated_at"], state["values"].get(str(self.step))
        if path.resolve().parent == self.folder.resolve():
            self.step_saved = self.step
        if self.ranks.rank == 0:
            self.say(f"resuming from {path}")

    def _is_over(self) -> bool:
        is_last_step = self.training.max_steps is not None and self.step >= self.training.max_steps
        return is_last_step or (self.max_epochs is not None and self.epoch >= self.max_epochs)

    def train(self) -> Report:
        """Train until the end of the run, write the model and the predictions, and return the report."""
        save_every = self.training.save_every
        if self._is_over() and self.ranks.rank == 0:
            self.say("nothing is left to train: the run has reached training.max_epochs or training.max_steps")
        while not self._is_over():
            epoch = self.epoch
            self._train_epoch()
            if self.epoch == epoch:
                break  # max_steps was reached within the epoch
            if self.epoch % self.training.validate_every == 0:
                self._validate(epoch)
            # Validated epochs are candidates for the best checkpoint, so each is saved.
            is_candidate = self.training.save_top_k != 0 and self.step_validated == self.step
            if not self._is_over() and (save_every is None or self.step % save_every == 0 or is_candidate):
                self._save()
        self._validate(self.epoch)
        self._save()
        return self._finish()

    def _train_epoch(self) -> None:
        training, n_left = self.training, self.dataset.n_batches_left
        self.model.train()
        means = Means(self.ranks)
        unlogged: dict[str, Any] | None = None
        self.pace.waited_s = 0.0
        for group in grouped(self.dataset, training.gradient_accumulation):
            unlogged = self._take_step(group, means)
            n_left -= len(group)
            # The caller validates and saves at the end of an epoch.
            saves = n_left and training.save_every is not None and self.step % training.save_every == 0
            if saves or self.step % training.log_every_n_steps == 0:
                self._log_step(means, unlogged)
                unlogged = None
            if n_left and self._is_over():
                break
            if saves:
                self._save()
        if unlogged is not None:
            self._log_step(means, unlogged)
        self.epoch += not n_left

    def _take_step(self, group: list[Any], means: Means) -> dict[str, Any]:
        """Take a step with batches weighted by ``n`` of the model or their number of rows; return metrics of it."""
        sizes = [batch_length(batch) for batch in group]
        # The sum of `n` over all ranks is known only after the last batch of the step; until then all ranks divide by
        # the same constant.
        n_expected = self.config.data.batch_size * self.training.gradient_accumulation
        n_counted: torch.Tensor | None = None
        for i, (batch, n_rows) in enumerate(zip(group, sizes, strict=True)):
            with self._accumulating(is_last=i == len(group) - 1):
                with self._autocast():
                    outputs = self.whole(batch)
                n = outputs.get("n")
                if n is None:
                    weight: torch.Tensor | float = n_rows / sum(sizes)
                else:
                    weight = n / n_expected
                    n_counted = n.clone() if n_counted is None else n_counted + n
                torch.autograd.backward(self.scaler.scale(outputs["loss"] * weight))
            means.add(outputs, n_rows)
        parameters = list(self.model.parameters())
        if n_counted is not None:
            # DDP and FSDP have averaged the gradients over ranks.
            scale = self.ranks.world_size * n_expected / self.ranks.reduced(n_counted).clamp(min=1)
            for gradient in [p.grad for p in parameters if p.grad is not None]:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(scale.to(local.device))
        factor = factor_at(self.step, self.training.scheduler, self.total_steps)
        for parameter_group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            parameter_group["lr"] = rate * factor
        metrics = {"lr": self.rates[0] * factor}
        if self.training.gradient_clip is not None:
            self.scaler.unscale_(self.optimizer)
            metrics["gradient_norm"] = nn.utils.clip_grad_norm_(parameters, self.training.gradient_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return metrics

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.ranks.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def _accumulating(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context that synchronizes gradients over ranks only for the last batch of a step."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        elif isinstance(self.whole, DistributedDataParallel) and not is_last:
            return self.whole.no_sync()
        return contextlib.nullcontext()

    def _log_step(self, means: Means, metrics: dict[str, Any]) -> None:
        figures, n_rows = means.reduced()
        loss = figures.get("loss", 0.0)
        if not math.isfinite(loss) and not self.scaler.is_enabled():
            raise TrainingError(
                f"the loss is {loss} at step {self.step}. Look for NaN and infinite values in X (the built-in models "
                "expect counts, perhaps in raw: data.open.raw=true), lower training.optimizer.lr, or set a "
                "training.gradient_clip"
            )
        if not figures and self.ranks.rank == 0:
            self.say("the model uses none of the rows (they may have no label), so it learns nothing from them")
        self.n_cells += n_rows
        for name, value in metrics.items():
            metrics[name] = float(value.full_tensor() if isinstance(value, DTensor) else value)
        if not self.monitors_validation:
            self._rate(figures)
        self._log(self.epoch, figures | metrics | self.pace.reduced(n_rows))

    def _rate(self, figures: Mapping[str, float]) -> None:
        """Record the value of the monitored metric at this step; None if it is a mean over no items."""
        name = self.monitor.removeprefix("validation_")
        if figures and name not in figures:
            if self.monitors_validation:
                self._save()  # the run can go on with another monitor
            prefix = "validation_" if self.monitors_validation else ""
            names = ", ".join(f"{prefix}{one}" for one in figures)
            raise InputError(f"training.monitor={self.monitor!r} is not a metric of this run, which has {names}")
        self.rated = figures.get(name)

    def _log(self, epoch: int, figures: dict[str, Any]) -> None:
        self.figures |= figures

        def write() -> None:
            for log in self.logs:
                log({"step": self.step, "epoch": epoch, **figures})

        self.ranks.on_rank_zero(write, f"the metrics of the run in {self.folder} cannot be written")

    def _validate(self, epoch: int) -> None:
        if self.validation is None or self.step_validated == self.step:
            return
        self.step_validated = self.step
        self.validation.set_epoch(epoch)  # masks of a resumed run are those of an uninterrupted one
        with self.pace.paused(), self._autocast(), torch.no_grad():
            self.model.eval()
            means = Means(self.ranks)
            n_calls = len(self.validation)
            if isinstance(self.model, FSDPModule):
                # All ranks must gather parameters together. Ranks with fewer batches evaluate their last batch again.
                most = torch.tensor(n_calls, device=self.ranks.device)
                n_calls = int(self.ranks.reduced(most, dist.ReduceOp.MAX))
            for last in self.validation:
                means.add(self.model(last), batch_length(last))
            for _ in range(n_calls - len(self.validation)):
                self.model(last)
            figures, _ = means.reduced()
            self.model.train()
        if self.monitors_validation:
            self._rate(figures)
        if figures:
            self._log(epoch, {f"validation_{name}": value for name, value in figures.items()})
        elif self.ranks.rank == 0:
            self.say("the model uses none of the held-out rows (they may have no label): no validation metrics")

    def _save(self) -> None:
        if self.step_saved == self.step:
            return
        if self.rated is not None and (not self.monitors_validation or self.step_validated == self.step):
            self.values[str(self.step)] = self.rated
        state = {
            "data": self.dataset.state_dict(),
            "scaler": self.scaler.state_dict(),
            "figures": self.figures,
            "values": self.values,
            "validated_at": self.step_validated,
            **self._made(),
            "world_size": self.ranks.world_size,
            "config": self.config.to_dict(),
        }
        with self.pace.paused():
            self.checkpoints.save(self.step, self.model, self.optimizer, state)
        self.step_saved = self.step

    def _finish(self) -> Report:
        path = self.folder / "model.pt"
        reading = reading_options(self.config, self.dataset)
        saved = {"categories": dict(self.dataset.categories), "reading": reading, "step": self.step, **self._made()}
        save_model(path, self.model, saved, self.ranks)
        seconds = self.pace.total_s
        shown = self.figures.keys() - {"cells_per_s", "wait_share", "lr"}
        report = Report(
            strategy=self.ranks.strategy,
            world_size=self.ranks.world_size,
            device=self.ranks.device.type,
            n_parameters=self.n_parameters,
            n_steps=self.step,
            n_epochs=self.epoch,
            n_cells=self.n_cells,
            elapsed_s=seconds,
            cells_per_s=self.n_cells / seconds if seconds else 0.0,
            wait_share=self.pace.total_wait_s / seconds if seconds else 0.0,
            figures=Report({name: self.figures[name] for name in sorted(shown)}),
            checkpoint=str(self.checkpoints.path_of(self.step)),
            model=str(path),
        )
        if self.config.predict is not None:
            with self._autocast():
                written = predict_trained(self.config, self.model, self.dataset, self.ranks)
            if self.ranks.rank == 0:
                self.say(f"predictions of {written.n_obs:,} cells are in {written.path}")
        return report


def factor_at(step: int, scheduler: Scheduler, total_steps: int) -> float:
    """Return the factor of the learning rate for a step, counted from 0; it depends on nothing else."""
    if step < scheduler.warmup_steps:
        return (step + 1) / (scheduler.warmup_steps + 1)
    if scheduler.name == "constant":
        return 1.0
    total = scheduler.total_steps or total_steps
    done = min(1.0, (step - scheduler.warmup_steps) / max(1, total - scheduler.warmup_steps))
    remaining = 0.5 * (1 + math.cos(math.pi * done)) if scheduler.name == "cosine_warmup" else 1 - done
    return scheduler.final + (1 - scheduler.final) * remaining


def grouped(items: Iterable[Any], n: int) -> Iterator[list[Any]]:
    """Yield lists of `n` items; the last may be shorter."""
    iterator = iter(items)
    while group := list(islice(iterator, n)):
        yield group


def batch_length(batch: Any) -> int:
    """Return the number of rows of a batch: the length of its first tensor."""
    if isinstance(batch, Mapping):
        return next((n for n in map(batch_length, batch.values()) if n), 0)
    return int(batch.shape[0]) if hasattr(batch, "shape") else 0

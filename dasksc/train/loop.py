"""Training loop."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dasksc import InputError, TrainingError
from dasksc.train.checkpoint import Checkpoints
from dasksc.train.config import Config
from dasksc.train.config_checks import check_config
from dasksc.train.data import EpochLoader, EpochLoaders, make_loaders, on_device
from dasksc.train.import_paths import arguments_of, check_arguments, find
from dasksc.train.loggers import CSVLog, Log, check_loggers, make_logs
from dasksc.train.models import BUILT_IN
from dasksc.train.nonfinite_loss import explain_nonfinite_loss
from dasksc.train.optim import LearningRate, make_optimizer
from dasksc.train.parallel import (
    DistributedModel,
    RankContext,
    batch_length,
    clip_gradient,
    distribute,
    joined_ranks,
    number_of,
    scale_gradient,
    unused_of,
)
from dasksc.train.predicting import predict_trained, reading_options
from dasksc.train.profiling import profiling
from dasksc.train.report import Report, can_plot, plot, shown
from dasksc.train.running_means import Means, Pace
from dasksc.train.saved_models import build_model, save_model

__all__ = ["fit"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        Summary of the run.

    Raises
    ------
    InputError
        If the configuration does not fit the data, the model or the run.
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
    check_config(config)
    with joined_ranks(config.training) as context:
        run = _Run(config, context, say)
        run.train()
        report = run.finish()
        run.predict()
        return report


class _Run:
    """State and progress of a training run."""

    def __init__(self, config: Config, context: RankContext, say: Callable[[str], None]) -> None:
        training = config.training
        check_loggers(training.loggers)
        if context.rank == 0:
            for line in unused_of(config, context):
                logger.warning(line)
        self.config = config
        self.context = context
        self.say = say
        self.folder = Path(training.checkpoint_dir)
        self.loaders: EpochLoaders = make_loaders(config, device=context.device, rank=context.rank)
        context.on_rank_zero(
            lambda: self.folder.mkdir(parents=True, exist_ok=True),
            f"training.checkpoint_dir={training.checkpoint_dir!r} cannot be created",
        )
        if context.rank == 0:
            files = ["checkpoints", "metrics.csv", *(["training.png"] if can_plot() else [])]
            say(f"writing {', '.join(files)} and model.pt to {self.folder.absolute()}")
        if context.rank == 0 and self.loaders.split_table is not None:
            say(f"cells trained on and held out:\n{shown(self.loaders.split_table)}")
        self.model_arguments = _model_arguments(config, self.loaders.facts)
        torch.manual_seed(training.seed)  # equal parameters on every rank
        model = build_model(config.model.name, self.model_arguments)
        self.n_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.distributed_model: DistributedModel = distribute(model, training, context)
        scale = context.world_size if training.scale_lr else 1
        self.optimizer = make_optimizer(model.parameters(), training.optimizer, scale=scale)
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=training.precision == "16-mixed")
        self.max_epochs = training.max_epochs or (None if training.max_steps else 1)
        self.step = 0
        self.learning_rate = LearningRate(self.optimizer, training.scheduler, self._total_steps())
        self.monitor, mode = _monitored(config)
        self.monitors_validation = self.monitor.startswith("validation_")
        self.monitored: float | None = None
        self.checkpoints = Checkpoints(folder=self.folder, keep=training.save_top_k, mode=mode, context=context)

        self.step_saved: int | None = None
        self.branched_at: int | None = None
        self.step_validated: int | None = None
        self.n_cells = 0
        self.figures: dict[str, Any] = {}
        self.latest: Path | None = None
        # Dropout must differ between ranks.
        torch.manual_seed(training.seed + 1 + context.rank)
        self._resume()
        self.learning_rate.total_steps = self._total_steps()
        self.pace = Pace(context)
        self.table: CSVLog | None = None
        self.logs: list[Log] = []
        self._unwritten = f"the metrics of the run in {self.folder} cannot be written"

        def begin_logs() -> None:
            self.table = CSVLog(self.folder / "metrics.csv", resumed_at=self.step if self.step else None)
            self.logs = [self.table, *make_logs(config, say=say)]

        context.on_rank_zero(begin_logs, self._unwritten)

    @property
    def _loader(self) -> EpochLoader:
        return self.loaders.training

    def _total_steps(self) -> int:
        """Return the number of steps of the run: the steps already taken plus the remaining steps.

        The batch size may have been different before a resume, so the steps taken are not computed from the epoch.
        """
        training = self.config.training
        k = training.gradient_accumulation
        total = math.inf
        if self.max_epochs is not None:
            total = self.step
            if self._loader.epoch < self.max_epochs:
                n_epochs = self.max_epochs - self._loader.epoch - 1
                total += math.ceil(self._loader.n_batches_left / k) + n_epochs * math.ceil(
                    len(self._loader.dataset) / k
                )
        return int(min(total, training.max_steps or math.inf))

    def _resume(self) -> None:
        path = self.checkpoints.find(self.config.training.resume_from)
        if path is None:
            return
        state = self.checkpoints.load(path, self.distributed_model.bare, self.optimizer, self._made())
        self._loader.load_state_dict(state["data"])
        if state["scaler"]:  # empty unless the precision is 16-mixed
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.figures, self.latest = state["step"], state["figures"], path
        is_of_this_folder = self.checkpoints.has(path)
        self.step_saved = self.step if is_of_this_folder else None
        self.branched_at = self.step if is_of_this_folder else 0
        self.step_validated = state["validated_at"]
        self.monitored = self.figures.get(self.monitor)
        logger.info("resuming from %s", path)

    def _made(self) -> dict[str, Any]:
        """Return the names and arguments of model and optimizer, which a later run compares with its own."""
        optimizer = self.config.training.optimizer
        return {
            "model": {"name": self.config.model.name, "arguments": self.model_arguments},
            "optimizer": {"name": optimizer.name, "arguments": optimizer.arguments},
        }

    # --- Steps ------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        training = self.config.training
        enough_steps = training.max_steps is not None and self.step >= training.max_steps
        return enough_steps or (self.max_epochs is not None and self._loader.epoch >= self.max_epochs)

    def train(self) -> None:
        """Train until the end of the run."""
        training = self.config.training
        window, folder = self.config.training.profile, self.folder / "profile"
        with profiling(window, folder, self.context, lambda: self.step) as profiler:
            while not self._is_over():
                epoch = self._loader.epoch
                self._train_epoch(epoch, profiler)
                if self._loader.epoch == epoch:
                    break  # max_steps was reached within the epoch
                if (epoch + 1) % training.validate_every == 0:
                    self._validate(epoch)
                # Validated epochs are candidates for the best checkpoint, so each is saved. `finish` saves the last.
                is_due = training.save_every is None or self.step % training.save_every == 0
                is_candidate = training.save_top_k != 0 and self.step_validated == self.step
                if not self._is_over() and (is_due or is_candidate):
                    self._save()
        self._validate(self._loader.epoch)

    def _train_epoch(self, epoch: int, profiler: Any) -> None:
        training = self.config.training
        self.distributed_model.whole.train()
        means = Means(self.context)
        rate = norm = None
        batches = self.pace.timed(self._loader)
        with contextlib.closing(batches):
            for group in grouped(batches, training.gradient_accumulation):
                rate, norm = self._take_step(group, means)
                if profiler is not None:
                    profiler.step()
                if self.step % training.log_every_n_steps == 0:
                    self._log_step(epoch, means, rate, norm)
                if self._loader.is_at_end:
                    continue  # the caller validates and saves at the end of an epoch
                if self._is_over():
                    break
                if training.save_every is not None and self.step % training.save_every == 0:
                    if self.step % training.log_every_n_steps:
                        self._log_step(epoch, means, rate, norm)  # so that the saved metrics are those of this step
                    self._save()
        if rate is not None and self.step % training.log_every_n_steps:
            self._log_step(epoch, means, rate, norm)

    def _take_step(self, group: list[Any], means: Means) -> tuple[float, torch.Tensor | None]:
        """Compute the gradient of a step, and update the parameters.

        Batches are weighted by ``n`` of the model output or, without it, by their number of rows.
        """
        training = self.config.training
        sizes = [batch_length(batch) for batch in group]
        # The sum of `n` over all ranks is known only after the last batch of the step; until then all ranks divide by
        # the same constant.
        n_expected = self.config.data.batch_size * training.gradient_accumulation
        n_counted: torch.Tensor | None = None
        for i, (batch, n_rows) in enumerate(zip(group, sizes, strict=True)):
            with self.distributed_model.accumulating(is_last=i == len(group) - 1):
                outputs = self.distributed_model(on_device(batch, self.context.device))
                n = outputs.get("n")
                if n is None:
                    weight: torch.Tensor | float = n_rows / sum(sizes)
                else:
                    weight = n / n_expected
                    n_counted = n.clone() if n_counted is None else n_counted + n
                torch.autograd.backward(self.scaler.scale(outputs["loss"] * weight))
            means.add(outputs, n_rows)
        if n_counted is not None:
            # DDP and FSDP have averaged the gradients over ranks.
            total = self.context.reduced(n_counted).clamp(min=1)
            scale_gradient(self.distributed_model.bare.parameters(), self.context.world_size * n_expected / total)
        rate = self.learning_rate.set(self.step)
        norm = None
        if training.gradient_clip is not None:
            self.scaler.unscale_(self.optimizer)
            norm = clip_gradient(self.distributed_model.bare.parameters(), training.gradient_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return rate, norm

    def _log_step(self, epoch: int, means: Means, rate: float, norm: torch.Tensor | None) -> None:
        figures, n_rows = means.reduce_and_reset()
        if not n_rows:
            return
        if not math.isfinite(figures.get("loss", 0.0)) and not self.scaler.is_enabled():
            raise TrainingError(
                f"the loss is {figures['loss']} at step {self.step}. {explain_nonfinite_loss(self._loader.dataset)}"
            )
        self.n_cells += n_rows
        is_counted = bool(figures)
        figures |= (
            {"lr": rate}
            | ({} if norm is None else {"gradient_norm": number_of(norm)})
            | self.pace.reduce_and_reset(n_rows)
        )
        if not self.monitors_validation:
            self._record_monitored(figures, is_counted=is_counted)
        self._log(epoch, figures)

    def _record_monitored(self, figures: dict[str, Any], *, is_counted: bool) -> None:
        """Record the value of the monitored metric, or None if it is a mean over no items."""
        if is_counted and self.monitor not in figures:
            available = ", ".join(sorted(figures))
            raise InputError(f"training.monitor={self.monitor!r} is not a metric of this run; give one of {available}")
        self.monitored = figures.get(self.monitor)

    def _log(self, epoch: int, figures: dict[str, Any]) -> None:
        self.figures |= figures

        def write() -> None:
            for log in self.logs:
                log.write({"step": self.step, "epoch": epoch, **figures})

        self.context.on_rank_zero(write, self._unwritten)

    def _validate(self, epoch: int) -> None:
        loader = self.loaders.validation
        if loader is None or self.step_validated == self.step:
            return
        self.step_validated = self.step
        paused = self.pace.pause()
        self.distributed_model.bare.eval()
        means = Means(self.context)
        n_calls = n_batches = len(loader.dataset)
        if self.distributed_model.is_sharded:
            # The number of batches may differ by one between ranks, but all ranks must gather parameters together.
            # Ranks with fewer batches therefore evaluate their last batch again. The metrics must not be reduced before
            # the last gather.
            most = self.context.reduced(torch.tensor(n_batches, device=self.context.device), dist.ReduceOp.MAX)
            n_calls = int(most)
        last = None
        for batch in loader:
            last = on_device(batch, self.context.device)
            means.add(self.distributed_model.evaluate(last), batch_length(last))
        for _ in range(n_calls - n_batches):
            self.distributed_model.evaluate(last)
        figures, _ = means.reduce_and_reset()
        self.distributed_model.bare.train()
        self.pace.resume(paused)
        figures = {f"validation_{name}": value for name, value in figures.items()}
        if self.monitors_validation:
            self._record_monitored(figures, is_counted=bool(figures))
        if figures:
            self._log(epoch, figures)
        elif self.context.rank == 0:
            logger.warning(
                "the model uses none of the held-out rows (they may have no label), so there are no validation metrics"
            )

    # --- Checkpoints and end of training --------------------------------------------------------------

    def _save(self) -> None:
        if self.step_saved == self.step:
            return
        paused = self.pace.pause()
        is_new = not self.monitors_validation or self.step_validated == self.step
        value = self.monitored if is_new else None
        state = {
            "data": self._loader.state_dict(),
            "scaler": self.scaler.state_dict(),
            "figures": self.figures,
            "validated_at": self.step_validated,
            **self._made(),
            "world_size": self.context.world_size,
            "config": self.config.written(),
        }
        self.latest = self.checkpoints.save(
            self.step, self.distributed_model.bare, self.optimizer, state, value, branched_at=self.branched_at
        )
        self.step_saved, self.branched_at = self.step, None
        self.pace.resume(paused)

    def finish(self) -> Report:
        """Write the last checkpoint, the model and the plot, and return the report."""
        self._save()
        path = self.folder / "model.pt"
        save_model(
            path,
            self.distributed_model.bare,
            name=self.config.model.name,
            arguments=self.model_arguments,
            context=self.context,
            more={
                "step": self.step,
                "categories": dict(self._loader.dataset.categories),
                "reading": reading_options(self.config, self._loader.dataset),
            },
        )
        hidden = {"cells_per_s", "wait_share", "lr"}
        report = Report(
            strategy=self.context.strategy,
            world_size=self.context.world_size,
            device=self.context.device.type,
            n_parameters=self.n_parameters,
            n_steps=self.step,
            n_epochs=self._loader.epoch,
            n_cells=self.n_cells,
            elapsed_s=self.pace.total_s,
            cells_per_s=self.n_cells / self.pace.total_s if self.pace.total_s else 0.0,
            wait_share=self.pace.total_wait_s / self.pace.total_s if self.pace.total_s else 0.0,
            figures={name: value for name, value in self.figures.items() if name not in hidden},
            checkpoint=None if self.latest is None else str(self.latest),
            model=str(path),
        )
        step_cells = self.config.data.batch_size * self.context.world_size * self.config.training.gradient_accumulation
        title = f"{self.config.model.name}, {report.ranks}: {report.n_steps:,} steps of {step_cells:,} cells"

        def end_logs() -> None:
            for log in self.logs:
                log.close()
            if self.table is not None:
                plot(self.table.rows, self.folder / "training.png", title=title)

        self.context.on_rank_zero(end_logs, self._unwritten)
        return report

    def predict(self) -> None:
        """Write the predictions of the section ``predict``."""
        if self.config.predict is None:
            return
        is_shown = self.config.data.progress and self.context.rank == 0
        with self.distributed_model.autocast():
            report = predict_trained(
                self.config,
                self.distributed_model.bare,
                self._loader.dataset,
                device=self.context.device,
                progress=is_shown,
            )
        if self.context.rank == 0:
            keys = ", ".join(f"{key} {what}" for key, what in report.keys.items())
            self.say(f"predictions of {report.n_obs:,} cells in {report.path}: {keys}")


def grouped(items: Iterable[T], n: int) -> Iterator[list[T]]:
    """Yield lists of `n` items; the last may be shorter."""
    iterator = iter(items)
    while group := list(islice(iterator, n)):
        yield group


def _model_arguments(config: Config, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model: those of the configuration, and the `facts` that its constructor accepts."""
    model_class = find(config.model.name, BUILT_IN, what="model.name")
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)) and not callable(model_class):
        raise InputError(f"model.name={config.model.name!r} is not a torch.nn.Module; got {model_class!r}")
    wanted = arguments_of(model_class)
    arguments = {name: value for name, value in facts.items() if name in wanted} | config.model.arguments
    check_arguments(model_class, arguments, what="model")
    return arguments


def _monitored(config: Config) -> tuple[str, str]:
    """Return the name of the metric that determines the best checkpoint, and the direction ``min`` or ``max``."""
    name = config.training.monitor or ("loss" if config.data.validation is None else "validation_loss")
    if name.startswith("validation_") and config.data.validation is None:
        raise InputError(
            f"training.monitor={name!r} is a validation metric, but data.validation is not set. Set it, or monitor a "
            "training metric such as loss"
        )
    return name, config.training.monitor_mode or ("max" if name.endswith("accuracy") else "min")

"""Callback that writes the predictions of a Lightning run, for either of Lightning's two packages.

Lightning loads the parameters before it requests the data set of `predict` from the data module. The callback then
replaces the data set by the batches of this rank's share, and writes the results of ``predict_step``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dasksc import InputError, PredictionReport
from dasksc.checks import check_flags
from dasksc.inference import Predictions
from dasksc.inference.sharing import RankStatus, Share
from dasksc.integrations.data_module import DataModule

__all__ = ["Writer"]


class Writer:
    """Callback of a Trainer that writes the results of ``predict_step``, as `dasksc.predict` does.

    ``trainer.predict(model, datamodule=data)`` needs a `scDataModule` with a strategy for ``predict``, such as
    ``dasksc.Streaming()``. Whatever the strategy, all cells of the collection are read in storage order. The Trainer
    keeps no predictions in memory.

    Parameters
    ----------
    out, key, categories, in_place, overwrite, nan
        As for `dasksc.predict`.

    Attributes
    ----------
    report
        Report of the last ``trainer.predict``; None before the first.

    Examples
    --------
    >>> import torch
    >>> from lightning.pytorch import LightningModule, Trainer
    >>> from dasksc.integrations.lightning import Writer, scDataModule
    >>> class Model(LightningModule):
    ...     def predict_step(self, batch, batch_idx):
    ...         return batch.log1p().mean(dim=1)
    >>> writer = Writer("mean.zarr", key="mean")
    >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    >>> trainer = Trainer(accelerator="cpu", callbacks=[writer], **quiet)
    >>> _ = trainer.predict(Model(), datamodule=scDataModule("atlas.h5ad", 256, predict=dasksc.Streaming()))
    >>> writer.report.keys
    {'obs/mean': '(2000,) float32'}
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        key: str = "X_emb",
        categories: Mapping[str, Sequence[Any]] | None = None,
        in_place: bool = False,
        overwrite: bool = False,
        nan: Literal["error", "report"] = "error",
    ) -> None:
        super().__init__()  # Initializes Lightning's base class.
        check_flags(in_place=in_place, overwrite=overwrite)
        self._out = out
        self._options: dict[str, Any] = {
            "key": key,
            "categories": categories,
            "in_place": in_place,
            "overwrite": overwrite,
            "nan": nan,
        }
        self.report: PredictionReport | None = None
        self._run: Predictions | None = None
        self._share: Share | None = None
        self._status: RankStatus | None = None
        self._n_done = 0
        self._begun = 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the data set for ``predict`` by the share of this rank."""
        if stage != "predict":
            return
        data = trainer.datamodule
        if not isinstance(data, DataModule):
            raise InputError(
                "Writer needs the row number of every prediction. Call trainer.predict(model, datamodule=...) with a "
                "scDataModule of dasksc.integrations"
            )
        # Predictions of all batches would fill memory.
        trainer.predict_loop.return_predictions = False
        data.predict_by(lambda dataset: self._batches(pl_module, dataset))

    def _batches(self, pl_module: Any, dataset: Any) -> Any:
        """Begin the predictions, after Lightning has loaded the parameters."""
        self._run = run = Predictions(pl_module, dataset, self._out, **self._options)
        self._status = status = run.status
        self._n_done, self._begun = 0, time.perf_counter()
        with status.recording_failure(), run.explaining():
            self._share = run.begin()
        return _Batches(self._share)

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write the predictions of a batch."""
        if self._run is not None and self._share is not None:
            with self._run.explaining():
                self._n_done += self._run.write_batch(self._share, outputs)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write the last predictions of this rank, publish the result if complete, and wait for the other ranks."""
        run, status = self._run, self._status
        if stage != "predict" or run is None or status is None:
            return
        trainer.datamodule.predict_by(None)
        self._run = None
        with status.recording_failure(), run.explaining():
            if self._share is not None:
                self._share.flush()
                # With limit_predict_batches, the last unit (see `dasksc.inference.work`) may be unfinished.
                self._share.abandon()
                run.publish()
            if trainer.limit_predict_batches == 1.0:
                status.await_others(run.work)
        self.report = run.report(self._n_done, time.perf_counter() - self._begun)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Notify the other ranks of the error, and remove the files of an unfinished unit (`dasksc.inference.work`)."""
        if self._status is not None and self._run is not None:
            self._status.fail(exception)
            if self._share is not None:
                self._share.abandon()
            self._run = None


class _Batches:
    """Iterable over the batches of a share.

    It has no ``__len__``, since Lightning raises an error if the length is 0 on a rank.
    """

    def __init__(self, share: Share | None) -> None:
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self._share is None else self._share.batches()

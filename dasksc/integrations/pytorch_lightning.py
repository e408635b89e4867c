"""`LightningDataModule` of an atlas and a callback that writes predictions, for trainers of ``pytorch_lightning``.

Requires ``pip install pytorch-lightning``.
The classes are those of `dasksc.integrations.lightning`, with the base classes of ``pytorch_lightning``.
"""

from __future__ import annotations

try:
    from pytorch_lightning import Callback, LightningDataModule
except ImportError as error:
    raise ImportError("dasksc.integrations.pytorch_lightning needs Lightning: pip install pytorch-lightning") from error

from dasksc.integrations.data_module import DataModule
from dasksc.integrations.prediction_writer import Writer as PredictionWriter

__all__ = ["Writer", "scDataModule"]


class scDataModule(DataModule, LightningDataModule):  # noqa: D101 - documented in DataModule
    __doc__ = DataModule.__doc__


class Writer(PredictionWriter, Callback):  # noqa: D101 - documented in prediction_writer.Writer
    __doc__ = PredictionWriter.__doc__

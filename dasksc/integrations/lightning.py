"""`LightningDataModule` of an atlas and a callback that writes predictions, for trainers of ``lightning.pytorch``.

Requires ``pip install 'dasksc[lightning]'``.
For trainers of ``pytorch_lightning``, import `dasksc.integrations.pytorch_lightning` instead.
"""

from __future__ import annotations

try:
    from lightning.pytorch import Callback, LightningDataModule
except ImportError as error:
    raise ImportError("dasksc.integrations.lightning needs Lightning: pip install 'dasksc[lightning]'") from error

from dasksc.integrations.data_module import DataModule
from dasksc.integrations.prediction_writer import Writer as PredictionWriter

__all__ = ["Writer", "scDataModule"]


class scDataModule(DataModule, LightningDataModule):  # noqa: D101 - documented in DataModule
    __doc__ = DataModule.__doc__


class Writer(PredictionWriter, Callback):  # noqa: D101 - documented in prediction_writer.Writer
    __doc__ = PredictionWriter.__doc__

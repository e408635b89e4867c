"""`LightningDataModule` of an atlas, for trainers of ``pytorch_lightning``.

Requires ``pip install pytorch-lightning``.
The class is that of `dasksc.integrations.lightning`, with the base class of ``pytorch_lightning``.
"""

from __future__ import annotations

try:
    from pytorch_lightning import LightningDataModule
except ImportError as error:
    raise ImportError("dasksc.integrations.pytorch_lightning needs Lightning: pip install pytorch-lightning") from error

from dasksc.integrations.data_module import DataModule

__all__ = ["scDataModule"]


class scDataModule(DataModule, LightningDataModule):  # noqa: D101 - documented in DataModule
    __doc__ = DataModule.__doc__

"""`LightningDataModule` of an atlas, for trainers of ``pytorch_lightning``.

Requires ``pip install pytorch-lightning``.
The class is that of `dasksc.integrations.lightning`, with the base class of ``pytorch_lightning``.
"""

from __future__ import annotations

from pytorch_lightning import LightningDataModule

from dasksc.integrations.data_module import DataModule

__all__ = ["scDataModule"]


class scDataModule(DataModule, LightningDataModule):  # noqa: D101 - documented in DataModule
    __doc__ = DataModule.__doc__

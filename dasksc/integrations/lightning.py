"""`LightningDataModule` of an atlas, for trainers of ``lightning.pytorch``.

Requires ``pip install 'dasksc[lightning]'``.
For trainers of ``pytorch_lightning``, import `dasksc.integrations.pytorch_lightning` instead.
"""

from __future__ import annotations

from lightning.pytorch import LightningDataModule

from dasksc.integrations.data_module import DataModule

__all__ = ["scDataModule"]


class scDataModule(DataModule, LightningDataModule):  # noqa: D101 - documented in DataModule
    __doc__ = DataModule.__doc__

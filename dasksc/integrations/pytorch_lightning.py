"""A `LightningDataModule` of one atlas, for trainers of the package ``pytorch_lightning``.

Needs ``pip install pytorch-lightning``.
It is what `dasksc.integrations.lightning` has, on the other package's base class.
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

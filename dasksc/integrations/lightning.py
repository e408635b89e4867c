"""A `LightningDataModule` of one atlas, for trainers of the package ``lightning.pytorch``.

Needs ``pip install 'dasksc[lightning]'``.
Where trainers come from ``pytorch_lightning``, `dasksc.integrations.pytorch_lightning` is the one to import.
"""

from __future__ import annotations

try:
    from lightning.pytorch import LightningDataModule
except ImportError as error:
    raise ImportError("dasksc.integrations.lightning needs Lightning: pip install 'dasksc[lightning]'") from error

from dasksc.integrations.data_module import DataModule

__all__ = ["scDataModule"]


class scDataModule(DataModule, LightningDataModule):  # noqa: D101 - documented in DataModule
    __doc__ = DataModule.__doc__

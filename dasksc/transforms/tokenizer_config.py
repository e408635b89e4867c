"""Creation of transforms from the ``tokenizer`` section of a training configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from dasksc.atlas.lookup import nearest
from dasksc.errors import InputError
from dasksc.transforms.tokens import RankTokens, ValueBins, check_choice
from dasksc.transforms.vocabulary import Vocabulary

__all__ = ["from_config"]

_STRATEGIES: dict[str, type[RankTokens] | type[ValueBins]] = {"rank_value": RankTokens, "value_bins": ValueBins}
_SETTINGS = ("strategy", "max_genes", "prepend_cls", "masking", "missing", "padding")


def from_config(
    tokenizer: Mapping[str, Any],
    *,
    genes: Iterable[str],
    vocabulary: Vocabulary | str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> RankTokens | ValueBins:
    """Create a transform from the ``tokenizer`` section of a training configuration.

    Parameters
    ----------
    tokenizer
        ``strategy``: ``"rank_value"`` (`RankTokens`) or ``"value_bins"`` (`ValueBins`); and optionally
        ``max_genes``, ``prepend_cls``, ``masking`` (with ``mask_ratio``, ``random_replace_ratio`` and ``keep_ratio``),
        ``missing``, ``padding``, and ``n_bins`` for value bins.
    genes, vocabulary, seed
        As for `RankTokens`.

    Returns
    -------
    RankTokens or ValueBins
        Transform of batches.

    Raises
    ------
    InputError
        If an option is unknown, or its value is invalid.

    Examples
    --------
    >>> section = {"strategy": "rank_value", "max_genes": 16, "masking": {"mask_ratio": 0.15}}
    >>> tokens = dasksc.tokens.from_config(section, genes=dasksc.open("atlas.h5ad").var_names)
    >>> type(tokens).__name__, tokens.max_length
    ('RankTokens', 16)
    """
    strategy = tokenizer.get("strategy")
    check_choice("tokenizer.strategy", strategy, tuple(_STRATEGIES))
    kind = _STRATEGIES[str(strategy)]
    names = (*_SETTINGS, "n_bins") if kind is ValueBins else _SETTINGS
    _check_names("tokenizer", tokenizer, names)
    masking = tokenizer.get("masking") or {}
    if not isinstance(masking, Mapping):
        raise InputError(f"tokenizer.masking must contain mask_ratio, as in {{mask_ratio: 0.15}}; got {masking!r}")
    _check_names("tokenizer.masking", masking, ("mask_ratio", "random_replace_ratio", "keep_ratio"))
    settings = {name: value for name, value in tokenizer.items() if name not in ("strategy", "masking")}
    return kind(genes, vocabulary=vocabulary, seed=seed, **masking, **settings)


def _check_names(section: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in given:
        if name not in names:
            raise InputError(f"{section} has no setting {name!r}; {nearest(name, names)}")

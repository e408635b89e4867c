"""Synthetic perturbation screens whose effects are known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import scipy.sparse as sp

from dasksc.datasets.writing import partial_path
from dasksc.errors import InputError

__all__ = ["synthetic_screen"]


def synthetic_screen(
    path: str | os.PathLike[str],
    n_obs: int = 40_000,
    n_vars: int = 200,
    *,
    lines: int | Sequence[str] = 6,
    perturbations: int | Sequence[str] = 40,
    control: str = "non-targeting",
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write a synthetic perturbation screen of raw counts to an h5ad file.

    A perturbation changes a fixed set of genes, and each gene changes only in cell lines that express it. The effect of
    an unseen combination of perturbation and cell line can therefore be predicted. Cells are sorted by cell line and
    perturbation; a tenth of them are controls. obs has the columns ``cell_line`` and ``gene`` (the perturbed gene, or
    `control`).

    Parameters
    ----------
    path
        Path of the h5ad file. It appears when the screen is complete.
    n_obs, n_vars
        Number of cells and genes. Memory is about 24 bytes for each gene of each cell.
    lines
        Names of the cell lines, or their number.
    perturbations
        Names of the perturbations, or their number.
    control
        Name of the control cells in ``gene``.
    seed
        Random seed, an integer in [0, 2**64). The same arguments give the same screen.
    overwrite
        Replace an existing file at `path`.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    InputError
        If a number is not positive, a name repeats, or `path` exists and `overwrite` is False.

    Examples
    --------
    >>> path = dasksc.datasets.synthetic_screen("lines.h5ad", n_obs=2_000, lines=["K562", "RPE1"])
    >>> dasksc.open(path).obs["cell_line"].cat.categories.to_list()
    ['K562', 'RPE1']
    """
    path = Path(path)
    line_names = _names("lines", lines, "line{}")
    perturbed = _names("perturbations", perturbations, "P{:02d}", first=1)
    if min(n_obs, n_vars) < 1:
        raise InputError(f"n_obs and n_vars must be at least 1; got {n_obs} and {n_vars}")
    if control in perturbed:
        raise InputError(f"control={control!r} is one of the perturbations; give it another name")
    n_lines, n_perturbations = len(line_names), len(perturbed)
    with partial_path(path, overwrite=overwrite) as partial:
        rng = np.random.default_rng(seed)
        expressed = rng.random((n_lines, n_vars)) < 0.5
        baseline = np.where(expressed, rng.normal(1.5, 0.5, (n_lines, n_vars)), -2.0)
        effect = rng.normal(0, 1.5, (n_perturbations + 1, n_vars)) * (rng.random((n_perturbations + 1, n_vars)) < 0.2)
        effect[0] = 0
        share = np.full(n_perturbations + 1, 0.9 / n_perturbations)
        share[0] = 0.1
        line = np.sort(rng.integers(0, n_lines, n_obs))
        gene = rng.choice(n_perturbations + 1, n_obs, p=share)
        order = np.lexsort((gene, line))
        line, gene = line[order], gene[order]
        log_rate = baseline[line] + effect[gene] * expressed[line] + rng.normal(0, 0.3, (n_obs, n_vars))
        obs = pd.DataFrame(
            {
                "cell_line": pd.Categorical(np.array(line_names)[line]),
                "gene": pd.Categorical(np.array([control, *perturbed])[gene]),
            },
            index=[f"cell{i}" for i in range(n_obs)],
        )
        counts = sp.csr_matrix(rng.poisson(np.exp(log_rate)).astype(np.float32))
        anndata.AnnData(counts, obs).write_h5ad(partial)
    return path


def _names(argument: str, given: int | Sequence[str], pattern: str, *, first: int = 0) -> list[str]:
    names = [pattern.format(first + i) for i in range(given)] if isinstance(given, int) else list(given)
    if not names or len(set(names)) < len(names):
        raise InputError(f"{argument} must be a number, or a non-empty list of distinct names; got {given!r}")
    return names

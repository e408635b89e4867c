"""Example files for the guides of the documentation, and synthetic perturbation screens whose effects are known."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from anndata.io import write_elem

from dasksc.checks import check_flags
from dasksc.datasets.atlas import names, partial_path, synthetic
from dasksc.errors import InputError, StorageError

_TYPES = ("T cell", "B cell", "monocyte", "NK cell", "dendritic cell", "platelet")
_PROTEINS = ("CD3", "CD4", "CD8a", "CD14", "CD19")


def demo_data(folder: str | os.PathLike[str], *, overwrite: bool = False) -> dict[str, str]:
    """Write the example files that the guides of the documentation use, about 5 MB, in a few seconds.

    The files are small atlases of raw counts, the same on every call. Cells have types, donors and batches in obs, and
    genes are named ``gene_000`` to ``gene_299``. Donors of different files differ.

    Parameters
    ----------
    folder
        Path of the folder, which is created if it does not exist.
    overwrite
        Replace existing files. If False and one exists, nothing is written.

    Returns
    -------
    dict of str to str
        Description of each file, by its path in `folder`.

    Examples
    --------
    >>> contents = dasksc.datasets.demo_data("demo")
    >>> contents["atlas.h5ad"]
    '2,000 cells, 300 genes, 6 cell types, 12 donors'
    """
    folder = Path(folder)
    contents = {
        "atlas.h5ad": "2,000 cells, 300 genes, 6 cell types, 12 donors",
        "plates/1.h5ad": "300 cells, 200 genes, 2 donors",
        "plates/2.h5ad": "300 cells, 200 genes (100 shared with plates/1.h5ad), 2 other donors",
        "cite.h5mu": "600 cells, 300 genes and 5 proteins",
        "filtered_feature_bc_matrix.h5": "600 cells, 300 genes and 5 antibodies, in the format of Cell Ranger",
        "screen.h5ad": "4,000 cells, 200 genes, 2 cell lines, 5 perturbations and controls",
    }
    check_flags(overwrite=overwrite)
    existing = [file for file in contents if (folder / file).exists()]
    if existing and not overwrite:
        raise InputError(
            f"{folder} already has {', '.join(existing)}. Give another folder, or overwrite=True (--overwrite)."
        )
    try:
        (folder / "plates").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder {folder} cannot be created: {error.strerror}. Give a folder that you may write to"
        ) from error
    _cells(folder / "atlas.h5ad", 2_000, range(300), donors=range(12), seed=0)
    _cells(folder / "plates" / "1.h5ad", 300, range(200), donors=range(12, 14), seed=1)
    _cells(folder / "plates" / "2.h5ad", 300, range(100, 300), donors=range(14, 16), seed=2)
    rna, proteins = _modalities(folder / "cite.h5mu", seed=3)
    _cell_ranger(folder / "filtered_feature_bc_matrix.h5", rna, proteins)
    lines, perturbations = ["K562", "RPE1"], ["GATA1", "KLF1", "MYC", "SPI1", "TP53"]
    synthetic_screen(folder / "screen.h5ad", 4_000, lines=lines, perturbations=perturbations, overwrite=overwrite)
    return contents


def _cells(path: Path, n_obs: int, genes: range, *, donors: range, seed: int) -> AnnData:
    """Write an atlas with these genes and donors at `path`, and return it."""
    n_vars = genes.stop
    synthetic(path, n_obs, n_vars, n_types=len(_TYPES), n_donors=len(donors), n_batches=3, seed=seed, overwrite=True)
    adata = anndata.read_h5ad(path)[:, list(genes)].copy()
    adata.var_names = names("gene", 300)[genes.start : genes.stop]
    adata.obs_names = [f"cell{seed}-{i}" for i in range(n_obs)]
    adata.obs["cell_type"] = adata.obs["cell_type"].cat.rename_categories(list(_TYPES))
    adata.obs["donor"] = adata.obs["donor"].cat.rename_categories([f"d{i}" for i in donors])
    adata.obs["n_genes"] = np.diff(adata.X.indptr)
    adata.raw = adata
    adata.write_h5ad(path)
    return adata


def _modalities(path: Path, *, seed: int) -> tuple[AnnData, AnnData]:
    """Write a MuData of RNA and, in reverse order, proteins; return both modalities with cells in the same order."""
    rna = _cells(path, 600, range(300), donors=range(16, 18), seed=seed)
    rng = np.random.default_rng(seed)
    rates = rng.lognormal(1, 1, (len(_TYPES), len(_PROTEINS)))
    counts = rng.poisson(rates[rna.obs["cell_type"].cat.codes]).astype(np.float32)
    proteins = AnnData(sp.csr_matrix(counts), obs=rna.obs[[]], var=pd.DataFrame(index=list(_PROTEINS)))
    with h5py.File(path, "w") as file, warnings.catch_warnings():
        # Suppress warnings about formats and defaults of later versions of AnnData.
        warnings.simplefilter("ignore")
        file.attrs["encoding-type"] = "MuData"
        file.attrs["encoding-version"] = "0.1.0"
        write_elem(file, "obs", pd.DataFrame(index=rna.obs_names))
        modalities = file.create_group("mod")
        modalities.attrs["mod-order"] = ["rna", "prot"]
        write_elem(modalities, "rna", rna)
        write_elem(modalities, "prot", proteins[::-1].copy())
    return rna, proteins


def _cell_ranger(path: Path, rna: AnnData, proteins: AnnData) -> None:
    """Write counts of genes and proteins as Cell Ranger 3 does: a row for each feature, in CSC."""
    counts = sp.hstack([rna.X, proteins.X], format="csr")
    features = {
        "name": [*rna.var_names, *proteins.var_names],
        "id": [*(f"ENSG{i:011d}" for i in range(rna.n_vars)), *proteins.var_names],
        "feature_type": ["Gene Expression"] * rna.n_vars + ["Antibody Capture"] * proteins.n_vars,
        "genome": ["GRCh38"] * rna.n_vars + [""] * proteins.n_vars,
    }
    with h5py.File(path, "w") as file:
        file.attrs["filetype"] = "matrix"
        matrix = file.create_group("matrix")
        matrix["shape"] = np.array(counts.shape[::-1], dtype=np.int32)
        matrix["barcodes"] = np.array(rna.obs_names, dtype="S")
        for name, dtype in (("indptr", np.int64), ("indices", np.int64), ("data", np.int32)):
            matrix.create_dataset(name, data=getattr(counts, name).astype(dtype), compression="gzip")
        table = matrix.create_group("features")
        table["_all_tag_keys"] = np.array(["genome"], dtype="S")
        for name, column in features.items():
            table[name] = np.array(column, dtype="S")


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
    lines, perturbations
        Names of the cell lines and of the perturbations, or their numbers.
    control
        Name of the control cells in ``gene``.
    seed, overwrite
        As for `synthetic`.

    Returns
    -------
    Path
        `path`.

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

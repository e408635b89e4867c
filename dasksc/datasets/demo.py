"""Example files for the guides of the documentation."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import anndata
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata import AnnData
from anndata.io import write_elem

from dasksc.checks import check_flags
from dasksc.datasets.atlas import synthetic
from dasksc.datasets.design import names
from dasksc.datasets.screen import synthetic_screen
from dasksc.errors import InputError, StorageError

__all__ = ["demo_data"]

_TYPES = ("T cell", "B cell", "monocyte", "NK cell", "dendritic cell", "platelet")
_PROTEINS = ("CD3", "CD4", "CD8a", "CD14", "CD19")


def demo_data(folder: str | os.PathLike[str], *, overwrite: bool = False) -> dict[str, str]:
    """Write the example files that the guides of the documentation use, about 5 MB, in a few seconds.

    All matrices hold raw counts. The files are the same on every call.

    Parameters
    ----------
    folder
        Path of the folder, which is created if it does not exist.
    overwrite
        Replace existing files.

    Returns
    -------
    dict of str to str
        Description of each file, by its path in `folder`.

    Raises
    ------
    InputError
        If one of the files exists and `overwrite` is False. Nothing is written in this case.
    StorageError
        If the folder cannot be created.

    Notes
    -----
    ``atlas.h5ad`` has 2,000 cells and 300 genes, ``gene_000`` to ``gene_299``. Its obs has ``cell_type`` (6 types),
    ``donor`` (12 donors), ``batch``, ``n_counts`` and ``n_genes``; ``raw`` holds the same counts. ``plates/1.h5ad`` and
    ``plates/2.h5ad`` have 300 cells and 200 genes each; 100 genes are in both. Each of these two files has two donors
    that occur in no other file. ``cite.h5mu`` is a MuData of 600 cells with the modalities ``rna`` and ``prot``, whose
    cells are in different orders. ``filtered_feature_bc_matrix.h5`` holds the same genes and proteins in the format of
    Cell Ranger 3. ``screen.h5ad`` is a `synthetic_screen` of 4,000 cells, 2 cell lines and 5 perturbations.

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
    existing = [file for file in contents if (folder / file).exists()]
    check_flags(overwrite=overwrite)
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
    synthetic_screen(
        folder / "screen.h5ad",
        4_000,
        lines=["K562", "RPE1"],
        perturbations=["GATA1", "KLF1", "MYC", "SPI1", "TP53"],
        overwrite=overwrite,
    )
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
    """Write a MuData of RNA and proteins, without the package mudata, and return the two modalities.

    The cells of both are returned in the same order. In the file, those of the proteins are in reverse order.
    """
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
        for name, values, dtype in (
            ("indptr", counts.indptr, np.int64),
            ("indices", counts.indices, np.int64),
            ("data", counts.data, np.int32),
        ):
            matrix.create_dataset(name, data=values.astype(dtype), compression="gzip")
        table = matrix.create_group("features")
        table["_all_tag_keys"] = np.array(["genome"], dtype="S")
        for name, column in features.items():
            table[name] = np.array(column, dtype="S")

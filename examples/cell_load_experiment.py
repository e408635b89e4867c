#!/usr/bin/env python
"""Divide the cells of a cell-load experiment (a TOML file) into training, validation and test rows of one atlas.

    python cell_load_experiment.py experiment.toml --cell-type-key cell_line --out parts.npz

``[datasets]`` names files, folders or patterns with braces; ``[training]`` the data sets to train on; ``[zeroshot]``
cell types (``"dataset.cell type"``) whose perturbed cells are all in one part; and ``[fewshot]`` the perturbations of
cell types that are in ``val`` or ``test``, or in both. All other cells of these cell types, such as controls, are in
``train``. Cells of other data sets are in no part. The interpretation follows the documentation of cell-load
(https://github.com/ArcInstitute/cell-load), which pairs cells only with controls of the same file: to do the same,
include ``"file"`` in ``CellSets(match=)``.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np

import dasksc

PARTS = ("train", "val", "test")
SECTIONS = ("datasets", "training", "zeroshot", "fewshot")
IGNORED = {"h5ad_csv_path", "RAW_COUNT_HEURISTIC_THRESHOLD", "EXPONENTIATED_UMIS_LIMIT"}


def from_toml(
    path: str | Path,
    *,
    cell_type_key: str = "cell_type",
    pert_col: str = "gene",
    control_pert: str = "non-targeting",
    obs: tuple[str, ...] = (),
) -> tuple[ad.AnnData, dict[str, np.ndarray]]:
    """Open the files as one atlas, with obs columns ``dataset`` and ``file``; return it and the rows of each part."""
    raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    if unknown := raw.keys() - {*SECTIONS} - IGNORED:
        raise ValueError(f"{path}: {', '.join(sorted(unknown))} is none of the sections {', '.join(SECTIONS)}")
    datasets, training, zeroshot, fewshot = (raw.get(name, {}) for name in SECTIONS)
    for name, part in training.items():
        if name not in datasets or part != "train":
            raise ValueError(f"[training] {name} = {part!r} must be a name of [datasets] with the value 'train'")
    held = held_out(zeroshot, fewshot)

    files = {name: files_of(where) for name, where in datasets.items()}
    adata = dasksc.open(
        [file for found in files.values() for file in found],
        obs=list(dict.fromkeys([cell_type_key, pert_col, *obs])),
        label="file",
        keys=[f"{name}/{file.stem}" for name, found in files.items() for file in found],
    )
    dataset = adata.obs["file"].astype(str).str.rpartition("/")[0]
    adata.obs["dataset"] = dataset.astype("category")
    context = (dataset + "." + adata.obs[cell_type_key].astype(str)).to_numpy()
    perturbation = adata.obs[pert_col].astype(str).to_numpy()
    is_control = perturbation == control_pert
    if not is_control.any():
        raise ValueError(f"no cell has control_pert={control_pert!r} in obs[{pert_col!r}]")

    is_in = {part: np.zeros(adata.n_obs, dtype=bool) for part in PARTS}
    is_in["train"] |= dataset.isin([*training]).to_numpy()
    for name, lists in held.items():
        own = context == name
        if not own.any():
            raise ValueError(f"no cell is of {name!r}; there are {', '.join(sorted(set(context)))}")
        is_in["train"] |= own
        for part, listed in lists.items():
            chosen = own & ~is_control
            if listed is not None:
                chosen &= np.isin(perturbation, listed)
                if missing := {*listed} - {*perturbation[chosen]}:
                    print(f"no cell of {name} has {', '.join(sorted(missing))}")
            is_in["train"] &= ~chosen
            is_in[part] |= chosen
    return adata, {part: np.flatnonzero(rows) for part, rows in is_in.items()}


def held_out(zeroshot: dict[str, Any], fewshot: dict[str, Any]) -> dict[str, dict[str, list[str] | None]]:
    """Return the perturbations in each part by ``"dataset.cell type"``; None stands for all perturbations."""
    if both := zeroshot.keys() & fewshot.keys():
        raise ValueError(f"{both.pop()!r} is in [zeroshot] and in [fewshot]; list it in only one of them")
    for name, part in zeroshot.items():
        if part not in PARTS:
            raise ValueError(f'[zeroshot] "{name}" = {part!r} must be one of {PARTS}; write keys with a dot in quotes')
    for name, lists in fewshot.items():
        if not isinstance(lists, dict) or lists.keys() - {"val", "test"} or not all(map(is_list, lists.values())):
            raise ValueError(
                f'[fewshot."{name}"] must have lists of names, val = [...] and test = [...]; got {lists!r}'
            )
    return {name: {part: None} for name, part in zeroshot.items()} | fewshot


def is_list(value: Any) -> bool:
    """Return True for a list of names."""
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def files_of(where: str) -> list[Path]:
    """Return the files that an entry of ``[datasets]`` names, sorted by name."""
    found: list[str] = []
    for one in without_braces(where):
        is_pattern = one.endswith((".h5", ".h5ad"))
        found += glob(one) if is_pattern else [file for end in ("h5", "h5ad") for file in glob(f"{one}/*.{end}")]
    files = sorted(map(Path, found), key=lambda file: file.stem)
    if not files or len({file.stem for file in files}) < len(files):
        raise ValueError(f"{where}: there is no .h5 or .h5ad file, or there are several with the same name: {files}")
    return files


def without_braces(text: str) -> Iterator[str]:
    """Yield the alternatives of ``a{b,c}``."""
    match = re.search(r"\{([^{}]+)\}", text)
    if match is None:
        yield text
        return
    for option in match[1].split(","):
        yield from without_braces(text[: match.start()] + option.strip() + text[match.end() :])


def main() -> None:
    """Print the number of cells of each part by data set and cell type, and write the row numbers."""
    parser = argparse.ArgumentParser(description="Divide the cells of a cell-load experiment.")
    parser.add_argument("toml", help="experiment of cell-load")
    parser.add_argument("--cell-type-key", default="cell_type", help="obs column with cell types")
    parser.add_argument("--pert-col", default="gene", help="obs column with perturbations")
    parser.add_argument("--control-pert", default="non-targeting", help="label of control cells")
    parser.add_argument("--out", default="parts.npz", help="file to write: an array of row numbers for each part")
    args = vars(parser.parse_args())
    path, out = args.pop("toml"), args.pop("out")
    adata, parts = from_toml(path, **args)
    np.savez(out, **parts)
    by = ["dataset", args["cell_type_key"]]
    for part, rows in parts.items():
        dataset = dasksc.scDataset(adata, dasksc.BlockShuffling(indices=rows), batch_size=64) if len(rows) else ()
        counts = adata.obs.iloc[rows].groupby(by, observed=True).size()
        listed = ", ".join(f"{'.'.join(map(str, name))}: {n}" for name, n in counts.items())
        print(f"{part}: {len(rows)} cells in {len(dataset)} batches; {listed}")


if __name__ == "__main__":
    main()

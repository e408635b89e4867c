"""Loaders of sets that `sets.py` compares, each in the fastest configuration available to its users.

`_harness.Contender` runs ``python _set_contenders.py NAME SPEC``. A builder returns a function that starts an epoch of
dense float32 tensors of shape (rows of whole sets, n_vars). The tensors hold the perturbed cells; the loaders also
read the controls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _harness import serve

Spec = dict[str, Any]
Epoch = Callable[[], Iterator[Any]]


def dasksc_sets(spec: Spec) -> Epoch:
    """Load sets of cells with `CellSets`."""
    import dasksc

    control = spec.get("control")
    strategy = dasksc.CellSets(
        spec["by"], spec["set_size"], control=control, block_size=spec["block"], weights=spec["weights"]
    )
    dataset = dasksc.scDataset(
        spec["path"],
        strategy,
        batch_size=spec["batch"],
        fetch_factor=spec["fetch"] // spec["batch"],
        rank=0,
        world_size=1,
        seed=0,
    )
    return lambda: (batch.X for batch in dataset)


def cell_load_sets(spec: Spec) -> Epoch:
    """Load sets with cell-load: consecutive rows of a sorted file in DataLoader workers, as cell-load recommends."""
    from cell_load.data_modules import PerturbationDataModule

    folder = Path(spec["work"]) / "cell-load"
    folder.mkdir(exist_ok=True)
    link = folder / "screen.h5ad"
    if not link.exists():
        link.symlink_to(spec["path"])
    config = folder / "experiment.toml"
    config.write_text(f'[datasets]\nscreen = "{folder}"\n[training]\nscreen = "train"\n[zeroshot]\n[fewshot]\n')
    context, perturbation = spec["by"]
    module = PerturbationDataModule(
        str(config),
        batch_size=spec["batch"] // spec["set_size"],
        cell_sentence_len=spec["set_size"],
        num_workers=spec["workers"],
        pert_col=perturbation,
        cell_type_key=context,
        batch_col=context,
        control_pert=spec["control"][perturbation],
        output_space="all",
        use_consecutive_loading=True,
    )
    module.setup()
    loader = module.train_dataloader()
    return lambda: (batch["pert_cell_emb"] for batch in loader)


def annbatch_classes(spec: Spec) -> Epoch:
    """Load batches of one class from annbatch's own store with `ClassSampler`."""
    import numpy as np
    import pandas as pd
    import torch
    import zarr
    from annbatch import DatasetCollection, Loader
    from annbatch.samplers import ClassSampler

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    collection = DatasetCollection(spec["path"])
    labels = pd.Categorical(collection.obs(columns=[spec["by"]])[spec["by"]])
    sampler = ClassSampler(
        chunk_size=spec["block"],
        preload_nchunks=spec["fetch"] // spec["block"],
        batch_size=spec["set_size"],
        classes=labels,
        num_samples=len(labels),
        class_weights=np.asarray(labels.value_counts(), dtype=float) if spec["weights"] == "cells" else None,
        rng=np.random.default_rng(0),
    )
    loader = Loader(batch_sampler=sampler).use_collection(collection)
    return lambda: (torch.from_numpy(batch["X"].toarray()) for batch in loader)


def write_annbatch_store(spec: Spec) -> None:
    """Write annbatch's own store from a sorted screen, in the order of the file."""
    from annbatch import DatasetCollection

    DatasetCollection(spec["annbatch_path"]).add_adatas([spec["path"]], shuffle=False, groupby=spec["by"])


CONTENDERS: dict[str, Callable[[Spec], Epoch]] = {
    "dasksc": dasksc_sets,
    "cell-load": cell_load_sets,
    "annbatch": annbatch_classes,
}

if __name__ == "__main__":
    name, spec = sys.argv[1], json.loads(sys.argv[2])
    if name == "write annbatch store":
        write_annbatch_store(spec)
    else:
        serve(CONTENDERS[name], spec)

#!/usr/bin/env python
"""Measure batches on a GPU: made dense on the host or on the device, pinned or not, narrow types, tokens and waiting.

    python benchmarks/gpu.py --out benchmarks/results/gpu

Without a GPU, the program says so and measures nothing. `--device cpu` runs it on the CPU, as a test of the program.
Contenders take turns; the clock of a rate stops when the device has finished. What was not measured, such as annbatch
where it is not installed, has no figure: the report gives the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _atlas import add_options, atlas
from _contenders import write_annbatch_store
from _harness import measure
from _machine import read_through
from _reports import add_out, write_report

import dasksc


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=200_000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a measurement in seconds")
    parser.add_argument("--steps", type=int, default=500, help="number of training steps whose waiting is measured")
    add_out(parser)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; nothing was measured")
        return {}

    path = atlas(options)
    read_through(path)
    contenders, missing = contenders_of(options, path)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(-1, options.rounds):
        for name, epoch in contenders.items():
            found = measure(epoch, seconds=options.seconds, fetch_rows=options.fetch, consume=None)
            if i >= 0:  # The first round, which is not measured, fills caches and compiles.
                rates[name].append(found.rows_per_s)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "cells_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "rounds": rates,
        "load": os.getloadavg()[0],
    }
    for name, train in (("linear model", train_linear), ("scVI", train_scvi)):
        try:
            report[f"wait_share, {name}"] = train(options, path)
        except ImportError as error:
            missing[f"wait_share, {name}"] = str(error)
    report["not measured"] = missing
    print(f"| on {report['device']} | cells/s |\n| --- | ---: |")
    for name, rate in report["cells_per_s"].items():
        print(f"| {name} | {rate:,.0f} |")
    for name, shares in report.items():
        if name.startswith("wait_share"):
            print(name, ", ".join(f"{where} {share:.1%}" for where, share in shares.items()))
    for name, reason in missing.items():
        print(f"not measured: {name}, because {reason}")
    write_report(options.out, report)
    return report


def dataset(options: argparse.Namespace, path: Path, **more: Any) -> Any:
    """Return a data set of X."""
    strategy = dasksc.BlockShuffling(block_size=options.block)
    given = {"fetch_factor": max(1, options.fetch // options.batch), "rank": 0, "world_size": 1, "seed": 0} | more
    return dasksc.scDataset(path, strategy, options.batch, **given)


def contenders_of(
    options: argparse.Namespace, path: Path
) -> tuple[dict[str, Callable[[], Iterator[Any]]], dict[str, str]]:
    """Return the loaders by name, and why others are missing."""

    def move(X: torch.Tensor) -> torch.Tensor:
        return X.to(options.device, non_blocking=True)

    there = {"device": options.device}
    genes = dasksc.open(path).var_names
    # Ways to get batches to the device, then options of batches that are made there
    moved = {
        "dense on the host, pageable, moved by the loop": {},
        "CSR, pageable, moved by the loop": {"layout": "csr"},
    }
    if options.device == "cuda":
        moved["dense on the host, pinned, moved by the loop"] = {"pin_memory": True}
        moved["CSR, pinned, moved by the loop"] = {"layout": "csr", "pin_memory": True}
    placed: dict[str, dict[str, Any]] = {
        "dense on the host": {"expand": "host"},
        "dense on the device": {"expand": "device"},
        "bfloat16 on the host": {"expand": "host", "dtype": "bfloat16"},
        "bfloat16 on the device": {"expand": "device", "dtype": "bfloat16"},
        "uint16 on the device": {"expand": "device", "dtype": "uint16"},
        "CSR": {"layout": "csr"},
    }
    made = {name: loop(options, dataset(options, path, **more), take=move) for name, more in moved.items()}
    made |= {name: loop(options, dataset(options, path, **there, **more)) for name, more in placed.items()}
    for name, tokenizer in (("RankTokens", dasksc.tokens.RankTokens), ("ValueBins", dasksc.tokens.ValueBins)):
        for where in ("host", "device"):
            found = dataset(options, path, **there, expand=where, transform=tokenizer(genes))
            made[f"{name} on the {where}"] = loop(options, found, take=lambda batch: batch["input_ids"])
    needed = ("annbatch", "cupy", "zarrs")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if options.device == "cpu" or lacking:
        return made, {"annbatch": f"these are not installed: {', '.join(lacking)}" if lacking else "there is no GPU"}
    made["annbatch, dense on the device"] = annbatch(options, path)
    return made, {}


def loop(
    options: argparse.Namespace, batches: Any, *, take: Callable[[Any], torch.Tensor] = lambda batch: batch
) -> Callable[[], Iterator[torch.Tensor]]:
    """Return a function that starts an epoch of tensors on the device, and waits for the device after each fetch."""
    every = max(1, options.fetch // options.batch)

    def epoch() -> Iterator[torch.Tensor]:
        for i, batch in enumerate(batches, start=1):
            X = take(batch)
            if options.device == "cuda" and i % every == 0:
                torch.cuda.synchronize()
            yield X

    return epoch


def annbatch(options: argparse.Namespace, path: Path) -> Callable[[], Iterator[torch.Tensor]]:
    """Return a function that starts an epoch of annbatch's loader, which decodes and shuffles on the GPU."""
    import anndata
    import zarr
    from annbatch import Loader

    store = Path(tempfile.mkdtemp(dir=options.work)) / "annbatch.zarr"
    n_rows = dasksc.open(path, names=False).n_obs
    write_annbatch_store({"h5ad_path": str(path), "annbatch_path": str(store), "n_rows": n_rows})
    loader = Loader(
        batch_size=options.batch,
        chunk_size=options.block,
        preload_nchunks=options.fetch // options.block,
        shuffle=True,
        preload_to_gpu=True,
        to="torch",
    )
    group = zarr.open_group(store, mode="r")
    for key in sorted(group.keys()):
        loader.add_dataset(anndata.io.sparse_dataset(group[f"{key}/X"]))
    return loop(options, loader, take=lambda batch: batch["X"].to_dense())


def train_linear(options: argparse.Namespace, path: Path) -> dict[str, float]:
    """Return the share of time that training a linear model on float32 batches waits, for each place of expansion."""
    shares = {}
    for where in ("host", "device"):
        batches = dataset(options, path, device=options.device, expand=where)
        n_genes = next(islice(batches, 1)).shape[1]
        model = torch.nn.Linear(n_genes, 128).to(options.device)
        optimizer = torch.optim.Adam(model.parameters())
        for X in islice(batches, options.steps):
            loss = model(X.log1p()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        shares[where] = float(batches.stats()["wait_share"])
    return shares


def train_scvi(options: argparse.Namespace, path: Path) -> dict[str, float]:
    """Return the share of time that training a small scVI model waits, for each place of expansion."""
    import scvi

    from dasksc.integrations.scvi import SCVIDataModule

    shares = {}
    for where in ("host", "device"):
        given = {"fetch_factor": max(1, options.fetch // options.batch), "seed": 0, "drop_last": True}
        data = SCVIDataModule(
            path,
            options.batch,
            train=dasksc.BlockShuffling(options.block),
            device=options.device,
            expand=where,
            **given,
        )
        model = scvi.model.SCVI(registry=data.registry, n_hidden=64)
        quiet = {"enable_progress_bar": False, "logger": False, "max_steps": options.steps}
        accelerator = "gpu" if options.device == "cuda" else "cpu"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.train(datamodule=data, max_epochs=1, accelerator=accelerator, devices=1, **quiet)
        shares[where] = float(data.datasets["train"].stats()["wait_share"])
    return shares


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Measure the cost of tokenization between the file and the training loop.

    python benchmarks/tokens.py --cells 200000 --out benchmarks/results/tokens

The program measures the cells per second delivered to a loop: sparse batches without tokens; tokens computed by
`scDataset(transform=)`; and ranked genes computed in the loop, with NumPy cell by cell or with `torch.topk` on dense
batches. It first checks that all rankings agree. Contenders take turns after an unmeasured round, and rates are medians
over rounds. Finally, the program measures the CPU time per cell on one thread, for gathering and for tokenization.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from _atlas import add_options, atlas
from _harness import measure
from _machine import read_through
from _reports import add_out, write_report

import dasksc


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and write and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=100_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--max-genes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a measurement in seconds")
    add_out(parser)
    options = parser.parse_args(arguments)

    path = atlas(options)
    read_through(path)
    adata = dasksc.open(path)
    ranks = dasksc.tokens.RankTokens(adata.var_names, max_genes=options.max_genes)
    bins = dasksc.tokens.ValueBins(adata.var_names, max_genes=options.max_genes)

    def dataset(**more: Any) -> Any:
        return dasksc.scDataset(
            adata,
            dasksc.BlockShuffling(block_size=options.block),
            batch_size=options.batch,
            fetch_factor=options.fetch // options.batch,
            **{"layout": "csr", "rank": 0, "world_size": 1, "seed": 0, **more},
        )

    sparse, dense = dataset(), dataset(layout="dense")
    ranked, binned = (dataset(transform=transform) for transform in (ranks, bins))
    ids = ranks.vocabulary.ids_of(list(adata.var_names), missing="error")
    contenders: dict[str, Callable[[], Iterator[Any]]] = {
        "no tokens": lambda: iter(sparse),
        "RankTokens, transform=": lambda: (batch.input_ids for batch in ranked),
        "ValueBins, transform=": lambda: (batch.input_ids for batch in binned),
        "NumPy, in the loop": lambda: (by_numpy(X, ids, ranks)[0] for X in sparse),
        "torch.topk, in the loop": lambda: (by_topk(X, ids, ranks)[0] for X in dense),
    }
    ours = first(ranked)
    same_ids = torch.equal(by_numpy(first(sparse), ids, ranks)[0], ours.input_ids)
    if not same_ids or not torch.equal(by_topk(first(dense), ids, ranks)[1], ours["values"]):
        raise SystemExit("the tokens computed in the loop differ from those of the transform")
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(-1, options.rounds):
        for name, epoch in contenders.items():
            found = measure(epoch, seconds=options.seconds, fetch_rows=options.fetch, consume=None)
            if i >= 0:  # The first round, which is not measured, fills caches and compiles.
                rates[name].append(found.rows_per_s)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print("| | cells/s | share of the rate without tokens |\n| --- | ---: | ---: |")
    for name, rate in medians.items():
        print(f"| {name} | {rate:,.0f} | {rate / medians['no tokens']:.1%} |")
    costs = one_thread(dataset(scheduler="synchronous", transform=as_it_is), ranks, bins)
    print(
        "one thread, microseconds of CPU time per cell: " + ", ".join(f"{name} {us:.1f}" for name, us in costs.items())
    )
    report = {
        "n_rows": adata.n_obs,
        "n_vars": adata.n_vars,
        **{name: getattr(options, name) for name in ("files", "block", "batch", "fetch", "max_genes")},
        "cells_per_s": medians,
        "rounds": rates,
        "one_thread_us": costs,
        "load": os.getloadavg()[0],
    }
    write_report(options.out, report)
    print(json.dumps(report))
    return report


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged; because of this transform, the data set yields a `Batch`, which has row numbers."""
    return batch


def by_numpy(X: torch.Tensor, ids: Any, like: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and values of the genes of sparse rows in descending order of value, computed cell by cell."""
    indptr, columns, values = (part.numpy() for part in (X.crow_indices(), X.col_indices(), X.values()))
    n_genes = min(like.max_genes, int(np.diff(indptr).max()))
    made_ids = np.full((len(indptr) - 1, n_genes), like.vocabulary.pad_id, dtype=np.int64)
    made_values = np.zeros(made_ids.shape, dtype=np.float32)
    for i, (start, stop) in enumerate(pairwise(indptr)):
        order = np.argsort(-values[start:stop], kind="stable")[:n_genes]
        made_ids[i, : len(order)] = ids[columns[start:stop][order]]
        made_values[i, : len(order)] = values[start:stop][order]
    return torch.from_numpy(made_ids), torch.from_numpy(made_values)


def by_topk(X: torch.Tensor, ids: Any, like: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and values of the genes of dense rows in descending order of value, with ties in any order."""
    n_genes = min(like.max_genes, int((X != 0).sum(dim=1).max()))
    values, columns = torch.topk(X, n_genes, dim=1)
    made = torch.from_numpy(ids)[columns]
    made[values == 0] = like.vocabulary.pad_id
    return made, values


def first(batches: Any) -> Any:
    """Return the first batch of an epoch, which is the same for each data set."""
    batches.set_epoch(0)
    iterator = iter(batches)
    batch = next(iterator)
    iterator.close()
    batches.set_epoch(0)
    return batch


def one_thread(dataset: Any, ranks: Any, bins: Any) -> dict[str, float]:
    """Return the CPU time per cell in microseconds, for gathering sparse batches and for each kind of tokens."""
    for _ in islice(dataset, 1):  # Compile kernels and open files.
        pass
    start = time.thread_time()
    batches = list(islice(dataset, min(dataset.fetch_factor, len(dataset))))
    costs = {"sparse batches": time.thread_time() - start}
    for name, transform in (("RankTokens", ranks), ("ValueBins", bins)):
        start = time.thread_time()
        for batch in batches:
            transform(batch)
        costs[name] = time.thread_time() - start
    n_cells = sum(len(batch.index) for batch in batches)
    return {name: 1e6 * s / n_cells for name, s in costs.items()}


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Compare reading of Parquet files with lists of genes with pyarrow's own read of the same row groups.

    pip install 'dasksc[parquet]'
    python benchmarks/parquet.py --cells 20000

The file has the layout of Tahoe-100M, with row groups of 1,000 cells. pyarrow decodes the two columns with lists and
discards them; dasksc also maps tokens to genes, checks them and makes CSR rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from _atlas import add_options, atlas
from _reports import add_out, write_report

import dasksc
from dasksc.pushdown import matrix_of

_GROUP_ROWS = 1_000
_FIRST_TOKEN = 3
_LISTS = ["genes", "expressions"]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure with the options of the command line, and return the report."""
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_options(parser, cells=20_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    options = parser.parse_args(arguments)
    path, given = written(atlas(options, "h5ad"), options)
    matrix = matrix_of(dasksc.open(path, obs=[], names=False, reader_options=given).X)
    n_rows = min(options.fetch, matrix.shape[0]) // _GROUP_ROWS * _GROUP_ROWS
    # In a large atlas, hardly two blocks of a shuffled fetch are in the same row group.
    blocks = np.arange(0, n_rows, _GROUP_ROWS)
    shuffled = (blocks[:, None] + np.arange(options.block)).ravel()
    file = pq.ParquetFile(path)

    def by_pyarrow() -> None:
        for number in range(n_rows // _GROUP_ROWS):
            file.read_row_group(number, columns=_LISTS, use_threads=False)

    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "pyarrow, row groups": (n_rows, by_pyarrow),
        "dasksc, the same rows": (n_rows, lambda: matrix.fetch(np.arange(n_rows))),
        "dasksc, a block of each group": (len(shuffled), lambda: matrix.fetch(shuffled)),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds + 1):  # the first one compiles
        for name, (_, work) in works.items():
            begun = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - begun)
    rates = {name: works[name][0] / statistics.median(taken[name][1:]) for name in works}
    for name, rate in rates.items():
        print(f"{name}: {rate:,.0f} cells/s")
    report = {"cells_per_s": rates, "ratio": rates["dasksc, the same rows"] / rates["pyarrow, row groups"]}
    print(f"dasksc against pyarrow: {report['ratio']:.2f}")
    write_report(options.out, report)
    return report


def written(source: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Write the cells of an atlas as lists, unless that was done; return the path and the options of its reader."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = options.work / f"atlas-{options.cells}x{options.genes}.parquet"
    genes = path.with_suffix(".genes.csv")
    if not path.exists():
        with h5py.File(source) as file:
            X, n_vars = file["X"], file["X"].attrs["shape"][1]
            pd.DataFrame({"token_id": np.arange(n_vars) + _FIRST_TOKEN, "ensembl_id": np.arange(n_vars)}).to_csv(genes)
            indptr = X["indptr"][: options.cells + 1]
            types = {"genes": pa.list_(pa.int64()), "expressions": pa.list_(pa.float32())}
            with pq.ParquetWriter(path, pa.schema(types)) as writer:
                for start in range(0, options.cells, _GROUP_ROWS):
                    offsets = indptr[start : start + _GROUP_ROWS + 1]
                    rows = slice(offsets[0], offsets[-1])
                    values = X["indices"][rows].astype(np.int64) + _FIRST_TOKEN, X["data"][rows].astype(np.float32)
                    local = pa.array((offsets - offsets[0]).astype(np.int32))
                    lists = [pa.ListArray.from_arrays(local, pa.array(one)) for one in values]
                    writer.write_table(pa.table(dict(zip(_LISTS, lists, strict=True))), row_group_size=_GROUP_ROWS)
    return path, {"gene_table": str(genes)}


if __name__ == "__main__":
    main()

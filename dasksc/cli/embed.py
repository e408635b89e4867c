"""``dasksc embed``: run a model on every cell of an atlas."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

import dasksc
from dasksc.cli._shared import Features, StorageOptions, cached_in, can_show_progress, feature_options, url_options

__all__ = ["command"]

_EXAMPLES = """
\b
Examples:
  dasksc embed atlas.h5ad --model run/model.pt --out emb.zarr
  dasksc embed a.zarr --model run/model.pt --method predict --out a.zarr
  dasksc embed atlas.h5ad --model mypackage.models:embed --out e.zarr
  torchrun --nproc-per-node 8 -m dasksc embed a.zarr --model m.pt --out e.zarr
"""


@click.command(epilog=_EXAMPLES)
@click.argument("atlas")
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    help="model.pt, or an import path.",
)
@click.option("--out", required=True, metavar="OUT.zarr", help="Store to create or extend.")
@click.option("--key", default="X_emb", show_default=True, help="Name in obsm.")
@click.option("--method", metavar="NAME", help="Method of the model to call.")
@click.option(
    "--batch-size", type=click.IntRange(1), default=1024, show_default=True, metavar="N", help="Cells in a batch."
)
@click.option("--device", metavar="DEVICE", help="Device of the model: cpu, cuda, cuda:1.")
@click.option(
    "--genes-missing",
    type=click.Choice(["error", "zero"]),
    default="error",
    show_default=True,
    help="Absent genes.",
)
@click.option(
    "--nan", type=click.Choice(["error", "report"]), default="error", show_default=True, help="NaN in results."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing key.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar.")
@feature_options
@url_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    atlas: str,
    model: str,
    out: str,
    key: str,
    method: str | None,
    batch_size: int,
    device: str | None,
    genes_missing: str,
    nan: str,
    overwrite: bool,
    progress: bool | None,
    features: Features,
    storage_options: StorageOptions,
    cache: str | None,
    as_json: bool,
) -> None:
    """Run a model on every cell of ATLAS, and write the results.

    MODEL is a model.pt that `dasksc train` wrote, or the import path (package.module:name) of a function or
    torch.nn.Module instance, which is called with batches. --method defaults to `embed` if the model has it, and to the
    model itself otherwise. --device defaults to a GPU if there is one.

    The key (--key) appears in OUT.zarr when all cells are done. After Ctrl-C, a crash or a full disk, the same command
    resumes the work, on any number of ranks. Models are not compared: give --overwrite or another --key after changing
    the model. --overwrite also discards unfinished predictions that were begun with other arguments. Genes of the model
    that the atlas lacks are refused or read as zeros (--genes-missing). NaN in results is refused or reported (--nan).
    """
    device_of_rank = _device(device)  # before anything is read
    with cached_in(cache):
        data: Any = atlas
        if storage_options or features:
            chosen: Any = features
            data = dasksc.open(atlas, storage_options=storage_options, **chosen)
        called, dataset, categories = _prepared(model, data, method, batch_size=batch_size, genes_missing=genes_missing)
        is_first = dasksc.World.detect().rank == 0
        report = dasksc.predict(
            called,
            dataset,
            out,
            key=key,
            categories=categories,
            device=device_of_rank,
            overwrite=overwrite,
            nan="report" if nan == "report" else "error",
            progress=(can_show_progress() if progress is None else progress) and is_first,
        )
    if as_json:
        click.echo(json.dumps(report.as_dict()))
        return
    if not report.is_complete:
        click.echo(f"{report.n_predicted:,} cells predicted; the last rank to finish writes them to {report.path}")
        return
    keys = ", ".join(f"{name} {what}" for name, what in report.keys.items())
    rate = f" ({report.cells_per_s:,.0f} cells/s)" if report.n_predicted else ""
    click.echo(
        f"{report.path}: {keys}; {report.n_predicted:,} of {report.n_obs:,} cells predicted in {report.elapsed_s:.1f} s"
        f"{rate}"
    )
    for name, (n, cells) in report.nan_cells.items():
        named = ", ".join(f"{row} {cell}".strip() for row, cell in cells)
        click.echo(f"  NaN in {name} of {n:,} cells: {named}{', ...' if n > len(cells) else ''}")


def _prepared(
    model: str, data: Any, method: str | None, *, batch_size: int, genes_missing: str
) -> tuple[Any, Any, dict[str, list[Any]]]:
    """Return the function to call, the data set, and the labels of codes."""
    try:
        from dasksc.train import predicting, saved_models
    except ModuleNotFoundError as error:
        if error.name not in ("pydantic", "yaml"):
            raise
        raise dasksc.InputError("dasksc embed needs pydantic and PyYAML: pip install 'dasksc[train]'") from error
    if ":" in model and not os.path.exists(model):
        called = predicting.imported_model(model)
        if method is not None:
            called = predicting.method_of(called, method)
        return called, dasksc.scDataset(data, dasksc.Streaming(), batch_size), {}
    trained = saved_models.load_model(model)
    recorded, categories = predicting.read_model(Path(model))
    if recorded is None:
        raise dasksc.InputError(
            f"{model} does not record which genes its model reads, since an earlier version of dasksc wrote it. Load "
            "it with dasksc.train.load_model, and call dasksc.predict with a data set that has the genes of the "
            "training data"
        )
    dataset = predicting.dataset_for(recorded, data, batch_size=batch_size, genes_missing=genes_missing)
    return predicting.method_of(trained, method), dataset, predicting.categories_for(trained, method, categories)


def _device(given: str | None) -> Any:
    """Return the given device if this machine has it, or the GPU of this rank."""
    import torch

    if given is not None:
        try:
            return torch.empty(0, device=given).device
        except (RuntimeError, AssertionError, ImportError) as error:
            available = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
            available += ["mps"] * torch.backends.mps.is_available()
            if given in available or f"{given}:0" in available:  # it exists, but is busy or full
                raise
            raise dasksc.InputError(
                f"--device {given!r} is not available on this machine; give one of: {', '.join(available)}"
            ) from error
    if not torch.cuda.is_available():
        return None
    from dasksc.train.launch import local_rank_of

    return torch.device("cuda", local_rank_of(dasksc.World.detect(), os.environ) % torch.cuda.device_count())

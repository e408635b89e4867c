"""Commands: a function each, which adds the options to a parser and returns what to do with them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import dasksc
from dasksc.errors import InputError
from dasksc.options import Parser, arguments_of, check_path, parameters_of

Run: TypeAlias = Callable[[Mapping[str, Any]], int | None]
"""Execution of a command with the parsed options, which returns the exit code (None: 0)."""

_NO_OPTIONS = ("data", "obs", "names", "mmap")
_SET_BY_CHECK = ("data_collection", "label_key", "rank", "world_size")
_WITHOUT_EFFECT = (
    *("categories", "device", "expand", "mmap", "pin_memory", "prefetch", "progress", "return_index", "scheduler"),
)


def _add_paths(parser: Parser, *, with_open: bool = True) -> None:
    """Add the paths of atlases, ``--json``, and the options of `dasksc.open`."""
    parser.add_argument("--json", action="store_true", help="Print JSON")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="File, store, directory, 'pattern' or URL")
    if with_open:
        parser.add_options("open", skip=_NO_OPTIONS, title="opening, as by dasksc.open")


def _data_of(options: Mapping[str, Any]) -> str | list[str]:
    """Return the paths, which exist; a single one may be a pattern. Warnings go to stderr from here on."""
    logging.basicConfig(format="dasksc: warning: %(message)s")
    paths: list[str] = options["paths"]
    for path in paths:
        check_path(path)
    return paths[0] if len(paths) == 1 else list(paths)


def _given_to_open(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `dasksc.open` that differ from their defaults."""
    defaults = {one.name: one.default for one in parameters_of("open") if one.name not in _NO_OPTIONS}
    return {name: options[name] for name, one in defaults.items() if options.get(name, one) != one}


def _opened(options: Mapping[str, Any], *, names: bool = False) -> Any:
    """Return the atlas of a command line, with names of cells if they are needed, or the modalities of a MuData."""
    data, given = _data_of(options), _given_to_open(options)
    from dasksc.atlas.modalities import is_modalities

    if not is_modalities(data):
        return dasksc.open(data, names=names or "index_unique" in given, **given)
    if given:
        raise InputError(f"several modalities are read without options of dasksc.open; leave out {', '.join(given)}")
    return dasksc.Modalities(data)


def _genes_of(text: Any) -> Any:
    """Return the names in ``A,B``, or the path of a vocabulary file."""
    return (Path(text) if os.path.isfile(text) else text.split(",")) if isinstance(text, str) else text


def _shows_progress(given: bool | None) -> bool:
    """Return the given choice, by default True if stderr is a terminal and tqdm is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None if given is None else given


def _show(report: Any, options: Mapping[str, Any]) -> None:
    """Print a report as text or as one line of JSON."""
    print(report.to_json() if options["json"] else report)


def info(parser: Parser) -> Run:
    """Describe the content, storage and reading speed of an atlas.

    The description covers cells, obs, chunks, codecs, measured speeds, and recommendations. Several atlases are joined.
    For an .h5mu file or Zarr store of a MuData, the modalities are listed. With --seconds 0, no matrix is read.

    For example:
      dasksc info atlas.h5ad
      dasksc info 'plates/*.h5ad' --join outer --seconds 0
      dasksc info atlas.zarr --json | jq .rates
    """
    _add_paths(parser)
    parser.add_options("describe", skip=["data", *(one.name for one in parameters_of("open"))])

    def run(options: Mapping[str, Any]) -> None:
        data, named = _data_of(options), arguments_of("describe", options)
        if _given_to_open(options).keys() - named.keys():  # the storage of files that are joined is not described
            data, named = _opened(options), {"seconds": options["seconds"]}
        _show(dasksc.describe(data, **named), options)

    return run


def check(parser: Parser) -> Run:
    """Summarize an epoch without reading X.

    The summary gives the rows and batches of each rank, the mix of classes, memory, and warnings. `shuffle` draws
    blocks in random order, `stream` reads rows as they are stored, `balance` draws the classes of --label-key evenly.
    For several modalities, columns are named with their modality (rna:cell_type).

    For example:
      dasksc check atlas.h5ad --label-key cell_type --world-size 8
      dasksc check atlas.h5ad --strategy balance --label-key cell_type
      dasksc check atlas.h5ad --filter "n_genes > 500" --json
      dasksc check atlas.zarr --fetch-factor null --memory-limit 8GiB --strict
    """
    parser.add_options("check", skip=("data",), world_size=1)
    parser.add_options("BlockShuffling", skip=("drop_last", "indices"))
    parser.add_options("scDataset", skip=_SET_BY_CHECK + _WITHOUT_EFFECT, seed=0)
    parser.add_argument("--strict", action="store_true", help="Exit with code 1 if there is a warning")
    _add_paths(parser)

    def run(options: Mapping[str, Any]) -> int:
        adata = _opened(options)
        from dasksc.plan.binding import as_strategy, is_balanced
        from dasksc.storage import redact_url

        label_key = options["label_key"] if is_balanced(options["strategy"]) else None
        named = arguments_of("scDataset", options)
        named["strategy"] = as_strategy(options["strategy"], label_key=label_key, block_size=options["block_size"])
        named |= {"genes": _genes_of(options["genes"]), "label_key": None, "rank": 0, "world_size": 1}
        dataset = dasksc.scDataset(adata, **named)
        found = dasksc.check(dataset, **arguments_of("check", options))
        found["name"] = f"{', '.join(map(redact_url, options['paths']))} by {type(dataset.strategy).__name__}"
        _show(found, options)
        return int(options["strict"] and bool(found.warnings))

    return run


def suggest(parser: Parser) -> Run:
    """Suggest fetch_factor and block_size for an atlas on this machine.

    With --labels, the speed and the mix of classes of each block size are measured.

    For example:
      dasksc suggest atlas.h5ad --batch-size 256
      dasksc suggest atlas.h5ad --labels cell_type
      dasksc suggest 'plates/*.h5ad' --join outer --json
    """
    skipped = ("data_collection", "max_workers", "min_workers", "verbose")
    parser.add_options("suggest_parameters", skip=skipped, batch_size=64)
    _add_paths(parser)

    def run(options: Mapping[str, Any]) -> None:
        given = _given_to_open(options)
        adata = dasksc.open(_data_of(options), names="index_unique" in given, **given)
        named = arguments_of("suggest_parameters", options)
        _show(dasksc.suggest_parameters(adata, **named, verbose=False), options)

    return run


def convert(parser: Parser) -> Run:
    """Write atlases to one shuffled Zarr store that is fast to load.

    Several inputs are joined. The store appears when it is complete. After Ctrl-C, a crash or a full disk, the same
    command resumes the conversion.

    For example:
      dasksc convert atlas.h5ad atlas.zarr --verify
      dasksc convert 'plates/*.h5ad' all.zarr --join outer --label plate
      dasksc convert atlas.h5ad by-type.zarr --group-by cell_type
      dasksc convert atlas.h5ad t.zarr --filter "cell_type == 'T cell'"
      dasksc convert s3://bucket/atlas.h5ad atlas.zarr --cache /scratch/blocks
    """
    parser.add_options("convert", skip=("data", "target"), progress=None)
    _add_paths(parser, with_open=False)
    parser.add_argument("target", metavar="OUT.zarr", help="Store to write")

    def run(options: Mapping[str, Any]) -> None:
        named = arguments_of("convert", options) | {"data": _data_of(options)}
        named |= {"genes": _genes_of(options["genes"]), "progress": _shows_progress(options["progress"])}
        _show(dasksc.convert(**named), options)

    return run


def index(parser: Parser) -> Run:
    """Write a catalogue of many files, which opens in seconds.

    The catalogue holds the joined tables and the places of all matrices. Files must not change afterwards.

    For example:
      dasksc index 'plates/*.h5ad' --out plates.catalog
      dasksc index samples.csv --files path --where "tissue == 'lung'" --out lung.catalog
    """
    parser.add_argument("--out", required=True, metavar="OUT.catalog", help="Catalogue to write")
    _add_paths(parser)

    def run(options: Mapping[str, Any]) -> None:
        n_files = dasksc.index(_data_of(options), options["out"], **_given_to_open(options))
        print(json.dumps({"files": n_files}) if options["json"] else f"{options['out']}: {n_files} files")

    return run


def embed(parser: Parser) -> Run:
    """Run a model on every cell of an atlas, and write the results.

    MODEL is a model.pt that `dasksc train` wrote, or the import path (package.module:name) of a function or
    torch.nn.Module instance, which is called with batches. The results appear when all cells are done. After Ctrl-C, a
    crash or a full disk, the same command resumes the work, on any number of ranks. Models are not compared: after
    changing the model, give --overwrite, or another --key or --out.

    For example:
      dasksc embed atlas.h5ad --model run/model.pt --out emb.zarr
      dasksc embed a.zarr --model run/model.pt --method predict --out a.zarr
      dasksc embed atlas.h5ad --model mypackage.models:embed --out emb.zarr
      torchrun --nproc-per-node 8 -m dasksc embed a.zarr --model m.pt --out e.zarr
    """
    parser.add_argument("--model", required=True, metavar="MODEL", help="File model.pt, or an import path")
    parser.add_argument("--method", metavar="NAME", help="Method to call [default: embed if it exists, or the model]")
    parser.add_argument("--batch-size", type=int, default=1024, metavar="N", help="Cells in a batch [default: 1024]")
    missing = "Refuse genes of the model that the atlas lacks, or read them as zeros [default: error]"
    parser.add_argument("--genes-missing", choices=("error", "zero"), default="error", help=missing)
    parser.add_options("predict", skip=("model", "dataset", "categories"), progress=None)
    _add_paths(parser)

    def run(options: Mapping[str, Any]) -> None:
        data: Any = _data_of(options)
        if isinstance(data, list) or _given_to_open(options):
            data = _opened(options, names=True)
        import torch

        called, dataset, categories = _prepared(data, options)
        rank, n_gpus = dasksc.World.detect().rank, torch.cuda.device_count()
        named = arguments_of("predict", options) | {"dataset": dataset, "categories": categories}
        named |= {"device": options["device"] or (f"cuda:{rank % n_gpus}" if n_gpus else None)}
        named |= {"progress": _shows_progress(options["progress"]) and rank == 0}
        _show(dasksc.predict(called, **named), options)

    return run


def _prepared(data: Any, options: Mapping[str, Any]) -> tuple[Any, Any, dict[str, list[Any]]]:
    """Return the function to call, the data set, and the labels of codes."""
    from dasksc.train import saved_models
    from dasksc.train.config import found

    model, method, batch_size = options["model"], options["method"], options["batch_size"]
    if ":" in model and not Path(model).exists():
        called = found(model, {}, what="model")
        if isinstance(called, type) or not callable(called):
            raise InputError(f"--model {model} is {called!r}; give a function of a batch, or a module instance")
        called = called if method is None else saved_models.method_of(called, method)
        return called, dasksc.scDataset(data, dasksc.Streaming(), batch_size), {}
    trained = saved_models.load_model(model)
    saved = saved_models.read_saved(Path(model))
    missing = options["genes_missing"]
    dataset = saved_models.dataset_for(saved["reading"], data, batch_size=batch_size, genes_missing=missing)
    categories = saved_models.categories_for(trained, method, saved["categories"])
    return saved_models.method_of(trained, method), dataset, categories


def demo_data(parser: Parser) -> Run:
    """Write the example files of the guides to a folder.

    The files are small atlases of raw counts, about 5 MB in total, the same on every call.

    For example:
      dasksc demo-data demo
      dasksc demo-data . --overwrite
    """
    parser.add_argument("folder", metavar="FOLDER", help="Folder to write to")
    parser.add_options("dasksc.datasets:demo_data", skip=("folder",))

    def run(options: Mapping[str, Any]) -> None:
        contents = dasksc.datasets.demo_data(options["folder"], overwrite=options["overwrite"])
        width = max(map(len, contents))
        print("\n".join(f"{name:<{width}}  {what}" for name, what in contents.items()))

    return run


def train(parser: Parser) -> Run:
    """Train a model on an atlas from a YAML file.

    Each key of the file is also an option. Each process that torchrun, srun or mpirun starts is a rank of the run.
    --print_config checks the options, and prints them with all defaults.

    For example:
      dasksc train --config classifier.yaml --training.max_steps 100
      dasksc train --config classifier.yaml --data.batch_size 128 --print_config
      torchrun --nproc-per-node 8 -m dasksc train --config fsdp.yaml
    """
    from dasksc.train.config import Config, add_sections

    add_sections(parser)
    help_ = "Print the report as JSON, and all else on stderr"
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=help_)  # no key of the file

    def run(options: Mapping[str, Any]) -> None:
        config = Config.of_options(options)
        config.check_paths()
        from dasksc.train.loop import fit

        as_json, is_first = "json" in options, dasksc.World.detect().rank == 0
        level = logging.INFO if is_first else logging.WARNING
        logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s")
        report = fit(config, say=lambda line: print(line, file=sys.stderr if as_json else None, flush=True))
        if is_first:
            print(report.to_json() if as_json else f"\n{report}")

    return run

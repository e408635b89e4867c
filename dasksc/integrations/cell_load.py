"""Reader of cell-load experiments: a TOML file becomes an atlas and row numbers for training, validation and test.

cell-load itself is not required. The interpretation of its files follows its documentation and its class
``ExperimentConfig`` (https://github.com/ArcInstitute/cell-load).
"""

from __future__ import annotations

import glob
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import dasksc
from dasksc import InputError, MissingPathError
from dasksc.atlas.lookup import require_key
from dasksc.displays import with_options_of

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["Experiment", "from_toml"]

logger = logging.getLogger(__name__)

_SECTIONS = ("datasets", "training", "zeroshot", "fewshot")
# Keys outside sections, which some experiments have. The split does not depend on them.
_IGNORED_KEYS = ("h5ad_csv_path", "RAW_COUNT_HEURISTIC_THRESHOLD", "EXPONENTIATED_UMIS_LIMIT")
_PARTS = ("train", "val", "test")
_ENDINGS = (".h5", ".h5ad")
_BRACES = re.compile(r"\{([^{}]+)\}")
_N_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    r"""Experiment of cell-load.

    Parameters
    ----------
    adata
        Files of all datasets, opened by `dasksc.open` as one atlas. In addition to the columns of the files, obs has
        ``dataset`` and ``file`` (``"dataset/name"``, where the name is that of the file without its suffix).
    parts
        Row numbers of ``train``, ``val`` and ``test``, ascending, int64, suitable as ``indices`` of a strategy. A
        perturbation listed for both ``val`` and ``test`` is in both. Control cells are in ``train``, including those of
        cell types whose perturbations are held out. Cell types that `from_toml` leaves out are in no part.
    table
        Data frame with one row per dataset and cell type: the numbers of its perturbations and of its perturbed cells
        in each part, and the number of its control cells.

    Examples
    --------
    >>> from pathlib import Path
    >>> from dasksc.integrations.cell_load import from_toml
    >>> _ = Path("experiment.toml").write_text('[datasets]\nscreen = "screen.h5ad"\n[training]\nscreen = "train"\n')
    >>> experiment = from_toml("experiment.toml", cell_type_key="cell_line")
    >>> train = dasksc.BlockShuffling(indices=experiment.parts["train"])
    >>> len(dasksc.scDataset(experiment.adata, train, batch_size=100, seed=0))
    40
    """

    adata: AnnData
    parts: dict[str, NDArray[np.int64]]
    table: pd.DataFrame


@with_options_of(dasksc.open, without=("label", "keys"))
def from_toml(
    path: str | os.PathLike[str],
    *,
    cell_type_key: str = "cell_type",
    pert_col: str = "gene",
    control_pert: str = "non-targeting",
    obs: Sequence[str] = (),
    **options: Any,
) -> Experiment:
    r"""Read an experiment of cell-load.

    Parameters
    ----------
    path
        Path of the TOML file. ``[datasets]`` gives files, folders of ``.h5`` and ``.h5ad`` files, or patterns with
        braces for alternatives. ``[training]`` gives the datasets to train on. ``[zeroshot]`` gives cell types
        (``"dataset.cell_type"``) whose perturbations are all in one part, usually ``val`` or ``test``. ``[fewshot]``
        lists perturbations by cell type and part. Relative paths are relative to the working directory, as in
        cell-load.
    cell_type_key, pert_col, control_pert
        Names of the obs columns with cell types and with perturbations, and the label of control cells in the latter.
    obs
        Further columns of obs to read, such as that of batches.
    mmap, names, join, index_unique, merge, fill_value, raw, storage_options, cache, feature_types, genome, attach
        As for `dasksc.open`.

    Returns
    -------
    Experiment
        Atlas and rows of each part. X is not read.

    Raises
    ------
    MissingPathError
        If the TOML file does not exist, or none of the files of a dataset exists.
    MissingKeyError
        If no file of a dataset has a given cell type, or obs lacks a column.
    InputError
        If the file is not TOML, the content of a section is invalid, no cell has the label `control_pert`, or two files
        of a dataset have the same name without suffix.

    Notes
    -----
    Cell types of a dataset that is not in ``[training]`` are left out, unless ``[zeroshot]`` or ``[fewshot]`` names
    them. A warning is logged if listed perturbations occur in no cell. The keys ``h5ad_csv_path``,
    ``RAW_COUNT_HEURISTIC_THRESHOLD`` and ``EXPONENTIATED_UMIS_LIMIT`` are ignored. cell-load pairs cells only with
    controls of the same file; to do the same, include ``"file"`` in ``CellSets(match=)``.

    Examples
    --------
    >>> from pathlib import Path
    >>> from dasksc.integrations.cell_load import from_toml
    >>> sections = '[datasets]\nscreen = "screen.h5ad"\n[training]\nscreen = "train"\n'
    >>> sections += '[zeroshot]\n"screen.K562" = "test"\n'
    >>> _ = Path("experiment.toml").write_text(sections)
    >>> experiment = from_toml("experiment.toml", cell_type_key="cell_line")
    >>> {part: len(rows) for part, rows in experiment.parts.items()}
    {'train': 2251, 'val': 0, 'test': 1749}
    """
    sections = _sections(path)
    files = {name: _files_of(name, where) for name, where in sections["datasets"].items()}
    held = _contexts(sections, files)
    keys = [f"{name}/{file.stem}" for name, paths in files.items() for file in paths]
    adata = dasksc.open(
        [file for paths in files.values() for file in paths],
        obs=list(dict.fromkeys([cell_type_key, pert_col, *obs])),
        label="file",
        keys=keys,
        **options,
    )
    codes = pd.Categorical(adata.obs["file"], categories=keys).codes
    datasets = np.repeat(np.arange(len(files)), [len(paths) for paths in files.values()])
    adata.obs["dataset"] = pd.Categorical.from_codes(datasets[codes], categories=list(files))
    cell_types = adata.obs[cell_type_key].astype(str).to_numpy()
    perturbations = adata.obs[pert_col].astype("category")
    is_control = (perturbations == control_pert).to_numpy()
    if not is_control.any():
        raise InputError(
            f"no cell has control_pert={control_pert!r} in obs[{pert_col!r}], which holds "
            f"{', '.join(map(repr, perturbations.cat.categories[:_N_SHOWN]))}, ..."
        )
    context, names = pd.factorize(pd.MultiIndex.from_arrays([adata.obs["dataset"].astype(str), cell_types]))
    parts = _rows_of_parts(context, list(names), perturbations, is_control, sections, held)
    table = _table(context, list(names), perturbations, is_control, parts)
    return Experiment(adata=adata, parts=parts, table=table)


def _sections(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingPathError(f"there is no experiment at {os.fspath(path)!r}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{os.fspath(path)} is not a TOML file: {error}") from error
    ignored = [name for name in _IGNORED_KEYS if raw.pop(name, None) is not None]
    if ignored:
        logger.info("%s ignored in %s: the split does not depend on these keys", ", ".join(ignored), os.fspath(path))
    for name, section in raw.items():
        require_key("an experiment of cell-load", name, _SECTIONS)
        if not isinstance(section, dict):
            raise InputError(f"{name} = {section!r} must be a section, [{name}]")
    sections: dict[str, dict[str, Any]] = {name: raw.get(name, {}) for name in _SECTIONS}
    if not sections["datasets"]:
        raise InputError(f"{os.fspath(path)} has no section [datasets], which names the files")
    for name, part in sections["training"].items():
        require_key("[datasets]", name, sections["datasets"])
        if part != "train":
            raise InputError(
                f"[training] {name} = {part!r} must be 'train'; leave out data sets that are not trained on"
            )
    return sections


def _files_of(name: str, where: Any) -> list[Path]:
    """Return the files of an entry of ``[datasets]``, sorted by name."""
    if not isinstance(where, str):
        raise InputError(f"[datasets] {name} = {where!r} must be a path")
    found: list[Path] = []
    for one in _without_braces(where):
        if os.path.isfile(one):
            found.append(Path(one))
        elif one.endswith(_ENDINGS):
            found += map(Path, glob.glob(one))
        else:
            inside = [file for ending in _ENDINGS for file in glob.glob(os.path.join(_pattern(one), f"*{ending}"))]
            found += map(Path, inside)
    if not found:
        raise MissingPathError(f"[datasets] {name} = {where!r}: there is no .h5 or .h5ad file")
    stems = [file.stem for file in found]
    twice = {stem for stem in stems if stems.count(stem) > 1}
    if twice:
        raise InputError(f"[datasets] {name} = {where!r} has several files named {sorted(twice)[0]!r}; rename one")
    return sorted(found, key=lambda file: file.stem)


def _pattern(folder: str) -> str:
    return glob.escape(folder) if os.path.isdir(folder) else folder


def _without_braces(text: str) -> Iterable[str]:
    """Expand braces: yield the alternatives of ``a{b,c}``."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    for option in match[1].split(","):
        yield from _without_braces(text[: match.start()] + option.strip() + text[match.end() :])


def _contexts(sections: Mapping[str, Any], files: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the rules of ``[zeroshot]`` and ``[fewshot]``, by dataset and cell type."""
    found: dict[tuple[str, str], Any] = {}
    for section in ("zeroshot", "fewshot"):
        for key, value in sections[section].items():
            # The longest matching name is used, since names of datasets may contain dots.
            dataset = max((name for name in files if key.startswith(f"{name}.")), key=len, default=None)
            if dataset is None:
                if key in files and isinstance(value, dict):
                    raise InputError(
                        f"[{section}] {key}.{next(iter(value), '...')} must be in quotes, as in "
                        f'"{key}.{next(iter(value), "...")}"; TOML reads a dot as the start of a subsection'
                    )
                raise InputError(
                    f"[{section}] {key!r} must have the form 'dataset.cell type', where dataset is one of "
                    f"{', '.join(files)}"
                )
            context = dataset, key.removeprefix(f"{dataset}.")
            if context in found:
                raise InputError(f"{key!r} is in [zeroshot] and in [fewshot]; list it in only one of them")
            found[context] = _zeroshot_part(key, value) if section == "zeroshot" else _fewshot_lists(key, value)
    return found


def _zeroshot_part(key: str, part: Any) -> str:
    if part not in _PARTS:
        raise InputError(f"[zeroshot] {key!r} = {part!r} must be one of {', '.join(map(repr, _PARTS))}")
    return str(part)


def _fewshot_lists(key: str, value: Any) -> dict[str, list[str]]:
    is_valid = isinstance(value, dict) and all(
        part in _PARTS[1:] and isinstance(names, list) and all(isinstance(name, str) for name in names)
        for part, names in value.items()
    )
    if not is_valid:
        raise InputError(
            f"[fewshot.{key!r}] must hold lists of perturbations, val = [...] and test = [...]; got {value!r}"
        )
    return dict(value)


def _rows_of_parts(
    context: NDArray[np.int64],
    names: list[tuple[str, str]],
    perturbations: pd.Series[Any],
    is_control: NDArray[np.bool_],
    sections: Mapping[str, Any],
    held: Mapping[tuple[str, str], Any],
) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each part."""
    for dataset, cell_type in held:
        if (dataset, cell_type) not in names:
            require_key(f"the dataset {dataset!r}", cell_type, [one for name, one in names if name == dataset])
    codes, labels = perturbations.cat.codes.to_numpy(), perturbations.cat.categories
    is_in = {part: np.zeros(len(codes), dtype=bool) for part in _PARTS}
    absent: list[str] = []
    for number, name in enumerate(names):
        own = context == number
        perturbed = own & ~is_control
        rule = held.get(name)
        if rule is None:
            if name[0] in sections["training"]:
                is_in["train"] |= own
            continue
        is_in["train"] |= own & is_control
        if isinstance(rule, str):
            is_in[rule] |= perturbed
            continue
        for part, listed in rule.items():
            chosen = perturbed & np.isin(codes, labels.get_indexer(listed)[labels.get_indexer(listed) >= 0])
            is_in[part] |= chosen
            present = set(labels[np.unique(codes[chosen])])
            absent += [f"{'.'.join(name)}: {one}" for one in listed if one not in present]
        is_in["train"] |= perturbed & ~(is_in["val"] | is_in["test"])
    if absent:
        logger.warning(
            "%d perturbations of [fewshot] occur in no cell: %s%s",
            *(len(absent), ", ".join(absent[:_N_SHOWN]), ", ..." if len(absent) > _N_SHOWN else ""),
        )
    return {part: np.flatnonzero(rows) for part, rows in is_in.items()}


def _table(
    context: NDArray[np.int64],
    names: list[tuple[str, str]],
    perturbations: pd.Series[Any],
    is_control: NDArray[np.bool_],
    parts: Mapping[str, NDArray[np.int64]],
) -> pd.DataFrame:
    """Count the perturbations and the perturbed cells of each part, and the control cells, by context."""
    codes, n = perturbations.cat.codes.to_numpy().astype(np.int64), len(names)
    n_codes = len(perturbations.cat.categories) + 1
    columns = {}
    for part, rows in parts.items():
        own = rows[~is_control[rows]]
        pairs = np.unique(context[own] * n_codes + codes[own] + 1)  # a missing value counts as a perturbation
        columns[f"{part} perturbations"] = np.bincount(pairs // n_codes, minlength=n)
        columns[f"{part} cells"] = np.bincount(context[own], minlength=n)
    columns["control cells"] = np.bincount(context[is_control], minlength=n)
    return pd.DataFrame(columns, index=pd.MultiIndex.from_tuples(names, names=["dataset", "cell type"]))

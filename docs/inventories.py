"""Inventories for Sphinx's intersphinx: the names of other libraries that the reference mentions, and their pages.

The site is built without a network, so inventories are not downloaded: this table has the few names that docstrings
and signatures use. To refresh it, list the inventory of a library with
``python -m sphinx.ext.intersphinx https://anndata.readthedocs.io/en/stable/objects.inv``, and compare. A test imports
every name.
"""

from __future__ import annotations

import zlib
from pathlib import Path

_GENERATED = "generated/{}.html"

# Library: address of its documentation; then role, names, and the page of a name (# and the name are added).
LIBRARIES: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "python": (
        "https://docs.python.org/3/",
        [
            ("class", "pathlib.Path", "library/pathlib.html"),
            ("class", "os.PathLike", "library/os.html"),
            (
                "class",
                "collections.abc.Callable collections.abc.Iterable collections.abc.Iterator "
                "collections.abc.Mapping collections.abc.Sequence",
                "library/collections.abc.html",
            ),
            ("class", "bool dict float int list range slice str tuple", "library/stdtypes.html"),
            (
                "exception",
                "FileNotFoundError KeyError OSError RuntimeError TypeError ValueError",
                "library/exceptions.html",
            ),
        ],
    ),
    "numpy": (
        "https://numpy.org/doc/stable/",
        [
            ("class", "numpy.ndarray", "reference/generated/{}.html"),
            ("function", "numpy.unique numpy.quantile", "reference/generated/{}.html"),
        ],
    ),
    "pandas": (
        "https://pandas.pydata.org/docs/",
        [("class", "pandas.DataFrame pandas.Series pandas.Index pandas.RangeIndex", "reference/api/{}.html")],
    ),
    "scipy": (
        "https://docs.scipy.org/doc/scipy/",
        [("class", "scipy.sparse.csr_matrix scipy.sparse.csr_array", "reference/generated/{}.html")],
    ),
    "anndata": (
        "https://anndata.readthedocs.io/en/stable/",
        [
            ("class", "anndata.AnnData", _GENERATED),
            ("class", "anndata.experimental.AnnCollection", _GENERATED),
            ("function", "anndata.concat", _GENERATED),
            ("function", "anndata.io.read_h5ad anndata.io.read_zarr", _GENERATED),
        ],
    ),
    "dask": (
        "https://docs.dask.org/en/stable/",
        [
            ("class", "dask.array.Array", _GENERATED),
            ("class", "dask.diagnostics.ProgressBar", "diagnostics-local.html"),
        ],
    ),
    "distributed": (
        "https://distributed.dask.org/en/stable/",
        [("class", "distributed.Client", "api.html"), ("class", "distributed.Security", "tls.html")],
    ),
    "torch": (
        "https://docs.pytorch.org/docs/stable/",
        [
            ("class", "torch.Tensor", "tensors.html"),
            ("class", "torch.dtype torch.device", "tensor_attributes.html"),
            ("class", "torch.nn.Module", _GENERATED),
            ("method", "torch.Tensor.to", _GENERATED),
            ("class", "torch.utils.data.DataLoader torch.utils.data.IterableDataset", "data.html"),
            ("module", "torch.distributed", "distributed.html"),
            ("module", "torch.distributed.checkpoint", "distributed.checkpoint.html"),
        ],
    ),
    "zarr": (
        "https://zarr.readthedocs.io/en/stable/",
        [("class", "zarr.Group", "api/zarr/group/"), ("class", "zarr.Array", "api/zarr/array/")],
    ),
    "scanpy": (
        "https://scanpy.readthedocs.io/en/stable/",
        [
            (
                "function",
                "scanpy.pp.normalize_total scanpy.pp.log1p scanpy.pp.highly_variable_genes "
                "scanpy.pp.calculate_qc_metrics scanpy.pp.downsample_counts scanpy.get.aggregate",
                _GENERATED,
            )
        ],
    ),
}

# Names by which annotations mention a class that is documented under another name.
ALIASES = {
    "AnnData": "anndata.AnnData",
    "Callable": "collections.abc.Callable",
    "Client": "distributed.Client",
    "Iterable": "collections.abc.Iterable",
    "IterableDataset": "torch.utils.data.IterableDataset",
    "Iterator": "collections.abc.Iterator",
    "Mapping": "collections.abc.Mapping",
    "Sequence": "collections.abc.Sequence",
    "anndata._core.anndata.AnnData": "anndata.AnnData",
    "dask.array.core.Array": "dask.array.Array",
    "distributed.client.Client": "distributed.Client",
    "pandas.core.frame.DataFrame": "pandas.DataFrame",
    "torch._tensor.Tensor": "torch.Tensor",
}


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an ``.inv`` file for each library, and return Sphinx's ``intersphinx_mapping``."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for library, (address, entries) in LIBRARIES.items():
        lines = []
        for role, names, page in entries:
            for name in names.split():
                known_as = [name, *(alias for alias, target in ALIASES.items() if target == name)]
                anchor = f"module-{name}" if role == "module" else name
                for one in known_as:
                    display_name = name if "." in one else "-"  # - is the name itself, such as Callable
                    lines.append(f"{one} py:{role} 1 {page.format(name)}#{anchor} {display_name}")
        header = f"# Sphinx inventory version 2\n# Project: {library}\n# Version: \n"
        header += "# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{library}.inv"
        path.write_bytes(header.encode() + zlib.compress("\n".join([*lines, ""]).encode()))
        mapping[library] = (address, str(path))
    return mapping

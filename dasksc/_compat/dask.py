"""Functions that Dask applies to chunks, and one that returns the tasks of a graph, none of which has a public name."""

from dask._task_spec import _identity_cast as identity_cast
from dask._task_spec import convert_legacy_graph
from dask.array._shuffle import _getitem as shuffled_rows
from dask.array._shuffle import concatenate_arrays
from dask.array.core import _concatenate2 as concatenate2
from dask.array.core import _elemwise_handle_where as elemwise_handle_where
from dask.array.core import _enforce_dtype as enforce_dtype

__all__ = [
    "concatenate2",
    "concatenate_arrays",
    "convert_legacy_graph",
    "elemwise_handle_where",
    "enforce_dtype",
    "shuffled_rows",
    "identity_cast",
]

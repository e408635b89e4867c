"""Joint indexing of several collections.

`MultiIndexable` holds collections with the same rows: a matrix, its labels, a second modality. An index of rows
applies to every member. `count_rows` and `take_rows` define the rows of each supported type of collection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dasksc.errors import InputError, MissingKeyError, WrongTypeError


def count_rows(data: Any) -> int:
    """Return the length of `data` along its first axis; SciPy's sparse matrices have only a shape."""
    shape = getattr(data, "shape", None)
    if isinstance(shape, tuple) and shape:
        return int(shape[0])
    if not hasattr(data, "__len__"):
        raise WrongTypeError(f"data of type {type(data).__name__} has no rows: it has neither a shape nor a length")
    return len(data)


def take_rows(data: Any, rows: Any) -> Any:
    """Return the rows of `data` at positions, in a slice or where a mask is True; a list for a list or tuple."""
    if isinstance(data, Mapping):  # columns, such as rows of a HuggingFace dataset
        return {name: take_rows(column, rows) for name, column in data.items()}
    module = type(data).__module__.partition(".")[0]
    if module == "pyarrow" or (module != "torch" and np.asarray(rows).dtype == bool):
        rows = np.arange(count_rows(data))[rows]
    if module == "pyarrow":
        return data.take(rows)
    if hasattr(data, "iloc"):
        return data.iloc[rows]
    if isinstance(data, (list, tuple)) and not isinstance(rows, slice):
        return [data[i] for i in np.arange(len(data))[rows]]
    if module == "h5py" and not isinstance(rows, slice):  # which requires ascending positions without repeats
        unique, at = np.unique(rows, return_inverse=True)
        return data[unique][at]
    return data[rows]


class MultiIndexable:
    """Collections with the same rows, indexed together.

    Parameters
    ----------
    *indexables
        Members by position, or one mapping of names to members.
    names
        Names for members given by position.
    unstructured
        Further elements of the data (gene names, a description), which row indexing leaves unchanged.
    **named_indexables
        Members by name.

    Raises
    ------
    InputError
        If the members have different lengths, or `names` does not hold one distinct name per member.
    TypeError
        If there is no member, members are given both by position and by name, or a member has no length.

    Notes
    -----
    ``multi[0]`` and ``multi["X"]`` are members. ``multi[rows]``, with a slice, an array, a list or a mask,
    is a `MultiIndexable` of those rows. ``len(multi)`` is the number of rows, `count` the number of members, and
    iteration yields the members.

    Examples
    --------
    >>> import numpy as np
    >>> pair = dasksc.MultiIndexable(X=np.zeros((100, 20)), y=np.arange(100))
    >>> pair[10:13]["y"]
    array([10, 11, 12])
    """

    def __init__(
        self,
        *indexables: Any,
        names: Sequence[str] | None = None,
        unstructured: Mapping[str, Any] | None = None,
        **named_indexables: Any,
    ) -> None:
        if indexables and named_indexables:
            raise TypeError(
                "MultiIndexable takes its members by position or by name, not both; "
                f"got {len(indexables)} by position and {sorted(named_indexables)} by name"
            )
        if unstructured is not None and not isinstance(unstructured, Mapping):
            raise TypeError(f"unstructured must be a dict, not {type(unstructured).__name__}")
        if len(indexables) == 1 and names is None and isinstance(indexables[0], Mapping):
            named_indexables = dict(indexables[0])
            indexables = ()
        if named_indexables:
            if names is not None:
                raise InputError(
                    "names= applies only to members given by position; these members already have names. Omit names="
                )
            names, indexables = list(named_indexables), tuple(named_indexables.values())
        if not indexables:
            raise TypeError("MultiIndexable needs at least one member, for example MultiIndexable(X=X, y=y)")
        if names is not None and (len(names) != len(indexables) or len(set(names)) != len(names)):
            raise InputError(f"{len(indexables)} members require {len(indexables)} different names; got {list(names)}")

        keys = range(len(indexables)) if names is None else names
        self._is_named = names is not None
        self._members: dict[Any, Any] = dict(zip(keys, indexables, strict=True))
        self._unstructured = dict(unstructured or {})
        lengths = {}
        for name, member in self._members.items():
            try:
                lengths[name] = count_rows(member)
            except TypeError as error:
                raise TypeError(f"member {name!r} ({type(member).__name__}) has no length") from error
        if len(set(lengths.values())) > 1:
            raise InputError(f"all members must have the same number of rows; got {lengths}")

    def _changed(self, change: Callable[[Any], Any]) -> MultiIndexable:
        new = object.__new__(type(self))
        new._is_named, new._unstructured = self._is_named, dict(self._unstructured)
        new._members = {name: change(member) for name, member in self._members.items()}
        return new

    @property
    def names(self) -> list[str] | None:
        """Names of the members, or None."""
        return list(self._members) if self._is_named else None

    @property
    def count(self) -> int:
        """Number of members."""
        return len(self._members)

    @property
    def unstructured(self) -> dict[str, Any]:
        """Elements other than the members; the dict itself, not a copy."""
        return self._unstructured

    @property
    def unstructured_keys(self) -> list[str]:
        """Keys of `unstructured`."""
        return list(self._unstructured)

    def __len__(self) -> int:
        return count_rows(next(iter(self)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members.values())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self._members:
                raise MissingKeyError(f"there is no member {key!r}; the members are {self.keys()}")
            return self._members[key]
        if isinstance(key, (int, np.integer)):
            if not -self.count <= key < self.count:
                raise IndexError(
                    f"member {key} is out of range; the number of members is {self.count}. To select rows, give a "
                    "slice or an array"
                )
            return self.values()[key]
        return self._changed(lambda member: take_rows(member, key))

    def __repr__(self) -> str:
        members = f"names={self.names}" if self._is_named else f"count={self.count}"
        note = f", unstructured_keys={self.unstructured_keys}" if self._unstructured else ""
        return f"{type(self).__name__}({members}, samples={len(self)}{note})"

    def keys(self) -> list[Any]:
        """Return the names of the members, or their positions if they have no names."""
        return list(self._members)

    def values(self) -> list[Any]:
        """Return the members."""
        return list(self)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over pairs of name (or position) and member."""
        return iter(self._members.items())

    def to(self, device: Any, *, non_blocking: bool = False) -> MultiIndexable:
        """Return the same rows with tensors on `device`.

        Parameters
        ----------
        device
            Device, as accepted by torch.
        non_blocking
            If True, copies from pinned memory may be in progress on return.

        Returns
        -------
        MultiIndexable
            Numeric and boolean NumPy arrays become tensors; tensors and members with a method ``to`` are moved. On the
            CPU, a tensor shares memory with its array, unless the array is read-only, has a negative stride or is not
            in native byte order. Other members (text, SciPy matrices, pandas objects) and `unstructured` are the same
            objects as before. Categoricals are not converted either: AnnData renumbers the categories of every
            selection, so their codes differ between batches and cannot serve as labels.
        """
        return self._changed(lambda member: _called(member, "to", device, non_blocking=non_blocking))

    def pin_memory(self) -> MultiIndexable:
        """Return the same rows with tensors in pinned memory; see `to` for the conversion of members."""
        return self._changed(lambda member: _called(member, "pin_memory"))


def _called(member: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a member that has it; a numeric array becomes a tensor first, if torch has its data type."""
    if isinstance(member, np.ndarray) and member.dtype.kind in "biufc":
        import torch

        if not (member.flags.writeable and member.dtype.isnative and all(s >= 0 for s in member.strides)):
            # torch warns about a read-only array, and rejects other byte orders and negative strides.
            member = member.astype(member.dtype.newbyteorder("="), order="C")
        with contextlib.suppress(TypeError):  # such as long double
            member = torch.from_numpy(member)
    return getattr(member, method)(*args, **kwargs) if hasattr(member, method) else member

"""Elements of other stores, such as embeddings, added to an atlas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dasksc.atlas.assemble import Elements, require_key
from dasksc.errors import InputError
from dasksc.readers.arrays import Lazy, lazily
from dasksc.readers.interface import Store
from dasksc.readers.names import digest_names, names_in_pieces
from dasksc.readers.options import OpenOptions, where_of
from dasksc.readers.registry import opened

# Attribute of a store's root group that holds the digest of its cell names, or null if the cells have no names.
NAMES_ATTRIBUTE = "dasksc-names"
_AGAIN = "The store belongs to another atlas; compute its elements again, for this one"


def attach_elements(atlas: Elements, attach: Any, options: OpenOptions) -> None:
    """Add elements of other stores to an atlas: matrices of obsm lazily, columns of obs in memory."""
    if not isinstance(attach, Mapping):
        raise InputError(f"attach={attach!r} is not a dict; give paths by key: attach={{'obsm/X_emb': 'emb.zarr'}}")
    digest = None
    for key, path in attach.items():
        group, _, name = str(key).partition("/")
        if group not in ("obsm", "obs") or not name or "/" in name:
            raise InputError(f"attach= has the key {key!r}; expected 'obsm/NAME' or 'obs/NAME'")
        if name in getattr(atlas, group):
            raise InputError(f"attach= has {key!r}, which the atlas already has. Leave it out of attach=")
        where = where_of(path, options)
        with opened(where, options) as store:
            keys = store.keys()
            held = [one.removeprefix(f"{group}/") for one in keys if one.startswith(f"{group}/")]
            held += store.columns("obs") if group == "obs" and "obs" in keys else []
            require_key(f"{group} of {where}", name, held)
            value = store.table("obs", [name])[name].array if group == "obs" else store.matrix(key)
            value = lazily(value, key, options)
            n_rows = value.matrix.shape[0] if isinstance(value, Lazy) else len(value)
            if n_rows != atlas.n_obs:
                raise InputError(f"{where}:/{key} has {n_rows} rows, but the atlas has {atlas.n_obs} cells. {_AGAIN}")
            if options.has_names:
                digest = digest_names(names_in_pieces(atlas.obs.index)) if digest is None else digest
                if names_digest_of(store) not in (None, digest):
                    raise InputError(
                        f"cells of {where} and of the atlas differ in their names or their order. {_AGAIN}"
                    )
        getattr(atlas, group)[name] = value


def names_digest_of(store: Store) -> str | None:
    """Return the recorded or computed digest of the cell names in a store; None if the cells have no names."""
    if NAMES_ATTRIBUTE in store.attributes:
        recorded = store.attributes[NAMES_ATTRIBUTE]
        return None if recorded is None else str(recorded)
    keys = store.keys()
    return digest_names(store.names()) if "obs" in keys else None

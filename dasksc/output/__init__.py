"""Writing of Zarr stores, shard by shard in a work folder, from which a complete store is moved to its target."""

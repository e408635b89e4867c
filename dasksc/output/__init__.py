"""Writing of Zarr stores, shard by shard in a work folder that becomes the target when it is complete."""

"""Zarr stores that are written shard by shard, in a work folder, and appear when they are complete."""

"""Zarr stores."""

"""Reading of Zarr stores."""

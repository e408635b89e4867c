"""Execution of fetches on the workers of a Dask cluster."""

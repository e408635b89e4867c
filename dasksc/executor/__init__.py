"""Execution of fetches: on threads, in the calling thread, or on a Dask cluster."""

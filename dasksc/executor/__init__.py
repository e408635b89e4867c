"""Fetches in flight: on threads, in this process, or on a Dask cluster."""

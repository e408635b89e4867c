"""HDF5 (.h5ad) files."""

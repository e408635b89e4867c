"""Numba-compiled functions: serial, without the GIL, and without validation of their arguments."""

"""Synthetic atlases for tutorials, tests and benchmarks: raw counts with known structure, written by one call."""

from dasksc.datasets.atlas import synthetic
from dasksc.datasets.demo import demo_data, synthetic_screen

__all__ = ["demo_data", "synthetic", "synthetic_screen"]

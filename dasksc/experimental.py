"""Parameter suggestions, re-exported from `dasksc.inspection.suggestions`."""

from dasksc.inspection.suggestions import estimate_sample_size, suggest_parameters

__all__ = ["estimate_sample_size", "suggest_parameters"]

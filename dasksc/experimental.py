"""Parameter suggestions, re-exported from `dasksc.inspection.suggestions`."""

from dasksc.inspection.suggestions import suggest_parameters

__all__ = ["suggest_parameters"]

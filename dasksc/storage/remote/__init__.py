"""Objects behind URLs."""

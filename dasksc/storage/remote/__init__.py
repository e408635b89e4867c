"""Remote objects behind URLs."""

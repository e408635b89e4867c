"""Reading of remote objects behind URLs."""

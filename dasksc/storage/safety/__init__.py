"""Protection against malicious and damaged files."""

"""What malicious or damaged files may not do."""

"""Fetched rows as tensors."""

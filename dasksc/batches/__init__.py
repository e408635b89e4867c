"""Conversion of fetched rows to tensors."""

"""Atlases as AnnData objects of lazy arrays."""

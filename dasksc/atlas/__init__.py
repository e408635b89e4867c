"""Atlases as AnnData objects over arrays that are not read yet."""

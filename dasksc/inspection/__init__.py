"""Inspection of an atlas and of its epochs before any matrix is read."""

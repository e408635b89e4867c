"""Inspection of an atlas and of its epochs, from metadata, plans of epochs and short probes of the matrices."""

"""Epoch plans, detection of ranks, agreement between ranks, and the epoch counter."""

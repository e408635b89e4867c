"""Plan of an epoch: labels, strategies, draws, order of blocks, ranks, fetches, and the epoch counter."""

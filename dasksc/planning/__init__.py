"""Which rank reads which rows, and when: plans, ranks, what ranks agree on, and epochs."""

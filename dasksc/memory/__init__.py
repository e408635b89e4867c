"""What memory an epoch takes, what there is, and the way of reading that follows."""

"""Model of the memory that an epoch takes, limits of the available memory, and the reading mode chosen from both."""

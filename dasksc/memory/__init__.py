"""Memory that an epoch takes, memory that is available, and the reading mode chosen from both."""

"""Data sets for the training loops of other libraries. Each module requires the library that it is named after."""

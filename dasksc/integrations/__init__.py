"""Data sets inside other libraries' training loops. Each module needs the library it is named after."""

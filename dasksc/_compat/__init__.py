"""Private or unstable parts of other libraries that several places use, in one module per library.

Each module imports only the library that it is named after, and imports it lazily where the rest of dasksc does, too.
"""

"""Access to private or unstable parts of other libraries, in one module per library.

Each module imports only the library that it is named after. Libraries that the rest of dasksc imports lazily are
imported lazily here, too. `dasksc._compat.unsupported` defines the behavior if a version lacks something.
"""

"""Access to private or unstable parts of other libraries, in one module per library.

A module imports only its own library, and none that other packages import lazily. `dasksc._compat.unsupported` defines
the behavior if a version lacks something.
"""

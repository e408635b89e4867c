"""Access to private or unstable parts of other libraries, in one module per library.

Each module imports only the library that it is named after. Libraries that the rest of dasksc imports lazily are
imported lazily here, too. A function whose docstring says "raises if missing" raises an `UnsupportedVersionError` if
the installed version lacks the part. In the same case, a function "for speed only" logs one warning, and returns None
in place of the part.
"""

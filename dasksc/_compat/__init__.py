"""The one door to what is private or unstable in other libraries: a module for each of them.

A module imports no library but its own, and none whose import other packages put off. `dasksc._compat.unsupported` says
what happens where a version lacks something.
"""

"""Every numba-compiled function of the package: serial, without the GIL, no checks of their own."""

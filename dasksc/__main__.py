"""Entry point of ``python -m dasksc``, which runs the ``dasksc`` command."""

import sys

from dasksc.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Entry point of ``python -m dasksc``, which runs the ``dasksc`` command."""

from dasksc.cli import main

if __name__ == "__main__":
    main()

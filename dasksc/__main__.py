"""`python -m dasksc` is the `dasksc` command."""

from dasksc.cli import main

if __name__ == "__main__":
    main()

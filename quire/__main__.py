"""python -m quire: the command line."""

from quire.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

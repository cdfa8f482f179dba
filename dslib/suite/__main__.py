"""``python -m dslib.suite`` is the ``dslib`` command."""

from dslib.suite.cli import main

if __name__ == "__main__":
    main()

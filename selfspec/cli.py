"""`python -m selfspec.cli`, the command line where the `selfspec` script is not on the path."""

from selfspec.apps.cli import main

if __name__ == "__main__":
    main()

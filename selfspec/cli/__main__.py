"""`python -m selfspec.cli`, where the `selfspec` script is not on the path."""

from selfspec.cli.entry import main

main()

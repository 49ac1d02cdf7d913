"""`python -m selfspec.apps.cli`, where the `selfspec` script is not on the path."""

from selfspec.apps.cli.entry import main

main()

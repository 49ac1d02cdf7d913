"""The command line: `selfspec` and its commands."""

from selfspec.apps.cli.entry import commands, main

__all__ = ["commands", "main"]

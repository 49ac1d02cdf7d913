"""The command line: `selfspec` and its commands."""

from selfspec.cli.entry import commands, main

__all__ = ["commands", "main"]

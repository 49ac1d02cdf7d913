"""The command line: `selfspec demo`, `selfspec generate`, `selfspec info`."""

from selfspec.cli.app import app, main

__all__ = ["app", "main"]

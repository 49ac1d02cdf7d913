"""The command line: `selfspec` and its commands."""

from selfspec.cli.app import app, main

__all__ = ["app", "main"]

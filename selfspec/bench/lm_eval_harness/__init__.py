"""Benchmarks of other projects, run through self-speculation."""

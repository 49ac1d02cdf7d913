"""What ships with the package: the demo target and a few prompts."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "mixed16"
"""Folder of the embedded target, in Hugging Face format."""

PROMPTS = Path(__file__).parent / "prompts.json"
"""Beginnings of prose, code and maths that the demo target was not trained on."""

SAMPLES = Path(__file__).parent / "prompts"
"""A few questions of each benchmark whose licence allows it, in the benchmark's own format."""

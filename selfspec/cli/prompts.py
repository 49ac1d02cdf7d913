"""Prompts from the command line: an argument, a file or stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts, from the argument, a file or stdin.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no text, it is not UTF-8, or a line is no JSON object with a prompt.
    """
    if prompt not in (None, "-"):
        source, text = "the argument", prompt
    else:
        source, text = _read(None if file is None or str(file) == "-" else file)
    assert text is not None
    if not text.strip():
        raise ValueError(f"empty prompt from {source}; there has to be text to go on from")
    if source == "the argument":
        return [text]
    if text.lstrip().startswith("{"):
        return [_prompt_of(line, f"{source}, line {n}") for n, line in _lines(text)]
    return [text.rstrip("\n")]


def _read(file: Path | None) -> tuple[str, str]:
    """What a text is from, and the text; without a file it is stdin's."""
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or text on stdin")
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"no prompt file at {file}")
    source = "stdin" if file is None else str(file)
    try:
        return source, sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no UTF-8 text (byte {error.start})") from None


def _lines(text: str) -> list[tuple[int, str]]:
    return [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _prompt_of(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, TypeError, KeyError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{place} must be a JSON object like {{"prompt": "..."}}, got {line[:80]}')
    return prompt

"""Calls of the command line, held to their exit codes, and what they should print."""

from __future__ import annotations

import json
import re

import transformers
from conftest import EXIT, greedy
from typer.testing import CliRunner

from selfspec.apps.cli import commands

PROMPT = "the cat on the mat"
TOKENS = 12
DRAFT = ("--draft", f"exit_layer={EXIT}", "--draft", "num_draft_tokens=3")


def call(*args, code=0, **kwargs):
    """Run a command; returns the finished call."""
    result = CliRunner().invoke(
        commands, [str(arg) for arg in args], prog_name="selfspec", **kwargs
    )
    assert result.exit_code == code, result.output
    return result


def one_object(result):
    """The JSON object that is all of stdout."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def own_text(folder, prompt=PROMPT):
    """What the checkpoint's own `generate` writes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.decode(greedy(model, ids, max_new_tokens=TOKENS)[0, ids.shape[1] :])


def altered(plain):
    """The model's own `generate`, with another token in place of the sixth."""

    def write(self, count=None):
        run = plain(self, count)
        tokens = [*run.tokens[:5], (run.tokens[5] + 1) % 64, *run.tokens[6:]]
        return run._replace(tokens=tokens if len(run.tokens) > 5 else run.tokens)

    return write


def unmarked(text):
    """Text without the markers of `selfspec.apps.display.trace.marked`."""
    return re.sub(r"\\(.)|[\[\]<>]", lambda mark: mark[1] or "", text, flags=re.DOTALL)

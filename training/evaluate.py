"""Held-out bits per byte of any checkpoint, by domain.

python -m training.evaluate --config configs/evaluate.yaml [section.field=value ...]
"""

from __future__ import annotations

from rich.console import Console

from selfspec import DEMO_MODEL
from selfspec.config import StrictConfig
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer

from .language.task import HeldOut
from .loop.script import run_script


class EvaluateConfig(StrictConfig):
    """What is measured on what.

    Attributes:
        target: a checkpoint's folder or model id; `demo` is the one in the package.
        held_out: the text of each domain.
    """

    target: str = "demo"
    held_out: HeldOut = HeldOut()


def evaluate(config: EvaluateConfig) -> dict[str, float]:
    """Bits per byte by domain, in float32.

    Raises:
        ValueError: there is no text, or a domain has not one window of it.
    """
    if not config.held_out.sources:
        raise ValueError("held_out.sources is empty; give the text to measure the model on")
    source = DEMO_MODEL if config.target == "demo" else config.target
    read = config.held_out.read(load_tokenizer(source))  # fail now, before the weights are loaded
    model = load_causal_lm(source, dtype="float32")
    console, figures = Console(highlight=False), {}
    for domain, windows in read.items():
        figures[domain] = windows.measure(model)
        size = "{} windows of {} tokens".format(*windows.tokens.shape)
        console.print(f"{domain}: {figures[domain]:.4f} bits per byte ({size})", markup=False)
    return figures


if __name__ == "__main__":
    run_script(evaluate, EvaluateConfig, __doc__)

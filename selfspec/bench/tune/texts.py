"""Prompts cut out of texts: some to measure on, others to validate on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.display.demo import load_prompts


def cut_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int, count: int
) -> list[Tensor]:
    """Prompts `[length]` of at most `tokens` tokens, `count` at most, at even distances.

    Args:
        tokenizer: the target's.
        texts: a long one is cut into several prompts; none takes the passages in the package.
        tokens: of a prompt; a text's last part may be shorter, if it is all there is.
        count: prompts at most.

    Raises:
        ValueError: the texts hold no token.
    """
    found: list[Tensor] = []
    for text in texts or [passage.text for passage in load_prompts()]:
        ids = torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.long)
        whole = len(ids) // tokens * tokens or len(ids)
        found += [part for part in ids[:whole].split(tokens) if len(part)]
    if not found:
        raise ValueError(f"the {len(texts)} texts hold no token; tuning needs text to write on")
    count = min(count, len(found))
    return [found[place * len(found) // count] for place in range(count)]


def split_prompts(prompts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Every other prompt to measure on, the rest to validate on; a single one serves for both."""
    return list(prompts[::2]), list(prompts[1::2] or prompts)


def in_batches(prompts: Sequence[Tensor], rows: int) -> list[list[Tensor]]:
    """Batches of exactly `rows` prompts; the last is filled up with the first ones again."""
    missing = -len(prompts) % rows
    filled = [*prompts, *(prompts[place % len(prompts)] for place in range(missing))]
    return [filled[start : start + rows] for start in range(0, len(filled), rows)]


def padded(prompts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as `[rows, width]`, padded with 0 on the left, and their attention mask."""
    width = max(len(prompt) for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    mask = (torch.arange(width) >= width - lengths).long()
    return torch.stack(rows).to(device), mask.to(device)

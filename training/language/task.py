"""Causal language modelling as a training task, and held-out bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.config import StrictConfig

from ..data import Batch, SourceConfig, read_texts
from ..loop.loop import Task


class LanguageModelling(Task):
    """Next-token cross-entropy over packed blocks.

    Args:
        model: the causal LM that is trained.
        windows: held-out windows by domain.
    """

    name = "pretraining"
    better = "bits_per_byte"

    def __init__(self, model: PreTrainedModel, windows: Mapping[str, Windows]):
        super().__init__()
        self.model = model
        self.windows = dict(windows)

    def forward(self, batch: Batch, step: int, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed cross-entropy in nats."""
        logits = self.model(**model_inputs(self.model, batch)).logits
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )
        return loss, {}

    def evaluate(self) -> dict[str, float]:
        """Bits per byte of each domain, and their mean."""
        if not self.windows:
            return {}
        figures = {
            f"bpb_{name}": windows.measure(self.model) for name, windows in self.windows.items()
        }
        return {**figures, "bits_per_byte": sum(figures.values()) / len(figures)}


def model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """What a packed batch is for a causal LM: documents do not see one another."""
    mask = batch.visible[:, None]
    if model.config._attn_implementation == "eager":
        mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(
            ~mask, torch.finfo(model.dtype).min
        )
    return {
        "input_ids": batch.tokens,
        "attention_mask": mask,
        "position_ids": batch.positions,
        "use_cache": False,
    }


class Windows(NamedTuple):
    """Held-out text in windows without context across them.

    Attributes:
        tokens: `[windows, size]` token ids.
        num_bytes: bytes of all tokens but each window's first, which is given.
    """

    tokens: Tensor
    num_bytes: int

    @torch.no_grad()
    def measure(self, model: PreTrainedModel, rows: int = 25) -> float:
        """Bits per byte under `model`."""
        nats = 0.0
        for part in self.tokens.to(model.device).split(rows):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            nats += float(loss)
        return nats / math.log(2) / self.num_bytes


class HeldOut(StrictConfig):
    """Held-out text by domain.

    Attributes:
        sources: the text of each domain.
        window: tokens of a window.
        windows_per_document: the most that one document gives.
        windows: the most of one domain; 0 takes all.
    """

    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    window: int = Field(default=256, ge=2)
    windows_per_document: int = Field(default=200, ge=1)
    windows: int = Field(default=0, ge=0)

    def read(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Windows]:
        """The windows of each domain.

        Raises:
            ValueError: a domain has not one window of text.
        """
        return {
            name: held_out_windows(
                source, tokenizer, self.window, self.windows_per_document, self.windows
            )
            for name, source in self.sources.items()
        }


def held_out_windows(
    source: SourceConfig, tokenizer: PreTrainedTokenizerBase, size: int, count: int, most: int = 0
) -> Windows:
    """The first `count` windows of `size` tokens of every document of a source, no overlap.

    Documents shorter than a window are put end to end first. With `most`, windows are left out at
    even distances until no more than that many are left.

    Raises:
        ValueError: there is not one window of text.
    """
    rows: list[tuple[list[int], int]] = []
    for text in _at_least(read_texts(source), size):
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = encoded.input_ids, encoded.offset_mapping
        for start in range(0, min(len(ids) // size, count) * size, size):
            first, last = offsets[start + 1][0], offsets[start + size - 1][1]
            rows.append((ids[start : start + size], len(text[first:last].encode())))
    if not rows:
        raise ValueError(f"{source.name} does not hold one window of {size} tokens")
    taken = rows[:: -(-len(rows) // most)] if most else rows
    return Windows(torch.tensor([ids for ids, _ in taken]), sum(size for _, size in taken))


def _at_least(texts: Iterator[str], size: int) -> Iterator[str]:
    """Texts, short ones joined until a window of `size` tokens surely fills."""
    enough, joined = 8 * size, ""
    for text in texts:
        joined = f"{joined}\n\n{text}" if joined else text
        if len(joined) >= enough:
            yield joined
            joined = ""
    if joined:
        yield joined

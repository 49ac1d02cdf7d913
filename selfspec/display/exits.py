"""What every exit of a target would say of a text, token by token (nostalgebraist's logit lens).

Legend: rows = exits, the lowest first, and the whole model last; tokens = those of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.decoder import Decoder
from selfspec.display.pieces import Detokenizer
from selfspec.heads import ExitHead, SharedHead
from selfspec.heads.teacher_forcing import draft_states, target_states
from selfspec.model import SelfSpecModel

MODEL = "model"  # the kind of the last row


@dataclass(frozen=True)
class ExitReadings:
    """What exits would say after each token of a text; a slice of it is that part of the text.

    Attributes:
        kinds: kind of each row's head; `"model"` for the last row, the model's own answer.
        layers: number of layers below each row's exit.
        text: the text, one piece a token.
        said: per row, the likeliest next token behind each token, as text.
        ids: `[rows, tokens]` the same as token ids.
        probabilities: `[rows, tokens]` what the row gives it.
        entropies: `[rows, tokens]` bits of the row's distribution.
        overlaps: `[rows, tokens]` Σ min(p, q) with the model's distribution: how likely a draft
            that is drawn from the exit is to be accepted (Leviathan et al. 2023).
    """

    kinds: list[str]
    layers: list[int]
    text: list[str]
    said: list[list[str]]
    ids: Tensor
    probabilities: Tensor
    entropies: Tensor
    overlaps: Tensor

    @property
    def names(self) -> list[str]:
        """What displays call the rows."""
        return [f"{kind} {layer}" for kind, layer in zip(self.kinds, self.layers, strict=True)]

    @property
    def agrees(self) -> Tensor:
        """`[rows, tokens]` whether the row says what the model says."""
        return self.ids == self.ids[-1]

    @property
    def settled(self) -> Tensor:
        """`[tokens]` the lowest row from which on every row says what the model says."""
        return len(self.ids) - self.agrees.flip(0).cumprod(0).sum(0)

    def __getitem__(self, tokens: slice) -> ExitReadings:
        """A part of the text, read in the context of all of it."""
        return replace(
            self,
            text=self.text[tokens],
            said=[row[tokens] for row in self.said],
            ids=self.ids[:, tokens],
            probabilities=self.probabilities[:, tokens],
            entropies=self.entropies[:, tokens],
            overlaps=self.overlaps[:, tokens],
        )


@torch.no_grad()
def exit_readings(
    spec: SelfSpecModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    heads: Sequence[ExitHead] | None = None,
) -> ExitReadings:
    """Read a text once, and ask every exit what comes after each of its tokens.

    A head that feeds on its own output answers as at the first token of a draft.

    Args:
        spec: the target.
        tokenizer: the target's.
        text: what is read.
        heads: the exits to ask; `None` asks a `shared` one behind every layer.

    Raises:
        ValueError: the text has no token, or more than the model has positions.
    """
    decoder = spec.engine.decoder
    tokens = _encode(decoder, tokenizer, text)
    if heads is None:
        heads = [SharedHead.build(decoder, layer) for layer in range(1, decoder.depth)]
    heads = sorted(heads, key=lambda head: head.exit_layer)
    reading = target_states(
        decoder, tokens, None, [layer for head in heads for layer in head.input_layers]
    )
    target_probs = _probabilities(decoder.unembed(reading.normed))
    rows: list[list[Tensor]] = []
    for head in heads:
        state = next(draft_states(decoder, head, reading, steps=1))
        logits = head.expand_logits(head.logits(decoder, state), decoder)
        rows.append(_figures(_probabilities(logits), target_probs))
    rows.append(_figures(target_probs, target_probs))
    ids, *figures = (torch.stack(column).cpu() for column in zip(*rows, strict=True))
    shown, said = _in_words(tokenizer, tokens[0].tolist(), ids)
    kinds = [*(head.kind for head in heads), MODEL]
    layers = [*(head.exit_layer for head in heads), decoder.depth]
    return ExitReadings(kinds, layers, shown, said, ids, *figures)


def _encode(decoder: Decoder, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    ids = tokenizer(text).input_ids
    most = decoder.max_positions
    if not ids or (most is not None and len(ids) > most):
        limit = "" if most is None else f" and at most the model's {most}"
        raise ValueError(f"text must have at least one token{limit}, got {len(ids)}")
    return torch.tensor([ids], device=decoder.device)


def _probabilities(logits: Tensor) -> Tensor:
    return logits[0].softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _figures(probs: Tensor, target_probs: Tensor) -> list[Tensor]:
    """Per token: the likeliest, its probability, the entropy, and the overlap with the model."""
    top, ids = probs.max(-1)
    entropy = torch.special.entr(probs).sum(-1) / math.log(2)
    overlap = torch.minimum(probs, target_probs).sum(-1)
    return [ids, top, entropy, overlap]


def _in_words(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], ids: Tensor
) -> tuple[list[str], list[list[str]]]:
    """The text by tokens, and what each row says, as it would read in its place."""
    seen = Detokenizer(tokenizer)
    shown: list[str] = []
    columns: list[list[str]] = []
    for token, answers in zip(tokens, ids.T.tolist(), strict=True):
        shown.append(_next_piece(seen, token))
        seen.push(token)
        words = {answer: _next_piece(seen, answer) for answer in set(answers)}
        columns.append([words[answer] for answer in answers])
    return shown, [list(row) for row in zip(*columns, strict=True)]


def _next_piece(seen: Detokenizer, token: int) -> str:
    twin = seen.fork()
    return twin.push(token) or twin.flush()

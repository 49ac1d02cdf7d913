"""Heads that say something of their own, and what a reading of them must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec.decoder import Decoder
from selfspec.drafters.engine import State
from selfspec.drafters.readers import ContextReader, LayerReader, ParallelReader
from selfspec.heads import HEAD_KINDS, ExitHead, draft_states, target_states

COPIES = ["block", "fused"]  # whose layer starts as one of the target's
UNROLLED = ["fused", "eagle", "eagle3", "mtp"]  # which are fed their own output
_PARALLEL_COPY = {"parallel": True, "markov": 4, "confidence": True}
_PARALLEL = {
    "block parallel": _PARALLEL_COPY,
    "fused parallel": _PARALLEL_COPY,
    "eagle3 parallel": {"parallel": True, "num_hidden_layers": 2},
    "dflash rnn": {
        "num_hidden_layers": 2,
        "sample_from_anchor": True,
        "block_size": 5,
        "markov": 4,
        "markov_type": "rnn",
        "confidence": True,
        "confidence_with_markov": True,
    },
}
PARALLEL = [*_PARALLEL, "dflash"]  # which draft all positions in one pass
WITH_LAYER = ["block", *UNROLLED, *PARALLEL]
KINDS = [*HEAD_KINDS, *_PARALLEL]


def class_of(kind: str) -> type[ExitHead]:
    """The class of a kind, which may be one that drafts in parallel."""
    return HEAD_KINDS[kind.split()[0]]


def build(decoder: Decoder, kind: str, exit_layer: int, **options) -> ExitHead:
    """An untrained head of such a kind."""
    options = {**_PARALLEL.get(kind, {}), **options}
    return class_of(kind).build(decoder, exit_of(kind, exit_layer), **options)


def exit_of(kind: str, exit_layer: int) -> int:
    """The exit layer nearest to this one that the kind can have."""
    highest = class_of(kind).highest_exit
    return exit_layer if highest is None else min(exit_layer, highest)


def own_head(
    decoder: Decoder,
    kind: str,
    exit_layer: int,
    *,
    trimmed: bool = False,
    noise: float = 0.05,
    seed: int = 0,
    **options,
) -> ExitHead:
    """A head of `kind`, every parameter of it disturbed by `noise`, maybe over half the tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # what a kind adds to the target's own weights is drawn
        head = build(decoder, kind, exit_layer, **options)
    source = torch.Generator().manual_seed(seed)
    if trimmed:
        kept = torch.randperm(decoder.vocab_size, generator=source)[: decoder.vocab_size // 2]
        head.trim(decoder, kept.sort().values)
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_((noise * drawn).to(parameter))
    return head.eval().requires_grad_(False)


@dataclass
class Seen:
    """One row of one reading: its text up to the token read, its depth in the draft, its logits."""

    text: Tensor
    step: int
    logits: Tensor
    head: ExitHead


def record(monkeypatch) -> list[Seen]:
    """From now on, every row that a head with a layer reads while decoding."""
    seen: list[Seen] = []
    drafts: list[Tensor] = []
    reads = {kind: kind.read for kind in (LayerReader, ParallelReader, ContextReader)}

    def noting(reader, state: State, tokens: Tensor, place: int, tree=None, above=None):
        logits, hidden = reads[type(reader)](reader, state, tokens, place, tree, above)
        if place == 0:
            drafts.clear()
        else:
            drafts.append(tokens)
        for index, row in enumerate(state.context.rows):
            text = torch.tensor(state.context.text[row])
            read_so_far = torch.cat([text[:0], *(draft[index] for draft in drafts)])
            for i in range(tokens.shape[1]):
                way = slice(None) if tree is None else tree.ancestors[index, place + i, 1:]
                branch = read_so_far[way]
                whole = torch.cat([text, branch])
                spread = reader.vocabulary.spread(logits[index, i : i + 1].clone(), -torch.inf)
                seen.append(Seen(whole, len(branch), spread, reader.head))
        return logits, hidden

    for kind in reads:
        monkeypatch.setattr(kind, "read", noting)
    return seen


@torch.no_grad()
def forced_states(decoder: Decoder, head: ExitHead, texts: list[Tensor], step: int) -> Tensor:
    """`[rows, 1, hidden]` the head's states behind texts, of whose tokens `step` are drafts."""
    # No token sees what is behind it, and so not the padding.
    tokens = pad_sequence(texts, batch_first=True)
    reading = target_states(decoder, tokens, None, head.input_layers)
    *_, states = draft_states(decoder, head, reading, step + 1)
    return torch.stack([row[len(text) - 1, None] for row, text in zip(states, texts, strict=True)])


@torch.no_grad()
def forced(decoder: Decoder, head: ExitHead, texts: list[Tensor], step: int) -> Tensor:
    """`[rows, vocab]` what the head says behind texts, whose last `step` tokens are drafts."""
    states = forced_states(decoder, head, texts, step)
    logits = head.draft_logits(decoder, states, step, torch.stack([text[-1:] for text in texts]))
    return head.vocabulary(decoder).spread(logits, -torch.inf)[:, 0]


def assert_reads_as_forced(
    decoder: Decoder, head: ExitHead, seen: list[Seen], close: Callable[[Tensor, Tensor], None]
) -> None:
    """Decoding reads the head as fitting does, at every depth of every draft."""
    assert seen
    for step in {reading.step for reading in seen}:
        readings = [reading for reading in seen if reading.step == step]
        expected = forced(decoder, head, [reading.text for reading in readings], step)
        close(torch.cat([reading.logits for reading in readings]), expected)


def close_in_double(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

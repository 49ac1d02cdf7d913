"""Teacher forcing: target logits and draft states over a text that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.decoder import Decoder, Own, Packing, Span
from selfspec.decoder.cache import StepCache
from selfspec.heads import ExitHead


@dataclass
class Reading:
    """What a target made of a text.

    Attributes:
        tokens: `[rows, width]` the text.
        packing: which tokens belong together.
        streams: residual streams `[rows, width, hidden]` by the number of layers below.
        normed: `[rows, width, hidden]` inputs of the LM head.
    """

    tokens: Tensor
    packing: Packing
    streams: dict[int, Tensor]
    normed: Tensor


@torch.no_grad()
def read_text(
    decoder: Decoder, tokens: Tensor, documents: Tensor | None, keep: Sequence[int]
) -> Reading:
    """Run the whole target over packed text.

    Args:
        decoder: the target.
        tokens: `[rows, width]` token ids.
        documents: `[rows, width]` number of each token's document; `None` when a row is one.
        keep: residual streams to keep, by the number of layers below.
    """
    packing = Packing.of(tokens if documents is None else documents, whole=documents is None)
    wanted = sorted(set(keep))
    everything = Span(0, decoder.depth)
    left = decoder.run_packed(tokens, everything, packing, keep=wanted)
    return Reading(tokens, packing, dict(zip(wanted, left.kept, strict=True)), left.output)


def needs(head: ExitHead) -> tuple[int, ...]:
    """The residual streams that a head reads."""
    return (head.exit_layer, *head.feature_layers)


def draft_states(
    decoder: Decoder, head: ExitHead, reading: Reading, steps: int
) -> Iterator[Tensor]:
    """What a head makes of every position, for each depth of a draft.

    A head without feature layers says the same at every depth, and is read once.

    Args:
        decoder: the target.
        head: the exit head; gradients flow into it.
        reading: the target's view of the text, with the streams that `needs` names.
        steps: depths to unroll.

    Yields:
        `[rows, width, hidden]` inputs of `head.logits`. At depth s only positions s and beyond of
        a document mean anything.

    Raises:
        ValueError: more than one step for a family whose position bias counts keys.
    """
    hidden = reading.streams[head.exit_layer]
    if head.layer is None:
        yield hidden
        return
    if not head.feature_layers:
        yield _layer(decoder, head, hidden, reading, None, 0)
        return
    if steps > 1 and decoder.counts_keys:
        raise ValueError(
            f"{type(decoder.causal_lm).__name__} biases attention by the number of a key, which "
            "unrolled steps repeat; fit this head with one step"
        )
    memory = StepCache(decoder.windows, hidden.shape[0], hidden.device)
    known = head.join([reading.streams[layer] for layer in head.feature_layers])
    for step in range(steps):
        entered = head.enter(hidden, _after_first(known, reading.packing))
        known = _layer(decoder, head, entered, reading, memory, step)
        yield known


def _layer(
    decoder: Decoder,
    head: ExitHead,
    entered: Tensor,
    reading: Reading,
    memory: StepCache | None,
    step: int,
) -> Tensor:
    """The head's own layer over a text, in its `step`-th reading."""
    assert head.layer is not None  # or nobody would come here
    span = Span(head.place, head.place + 1)
    left = decoder.run_packed(
        reading.tokens,
        span,
        reading.packing,
        entered,
        own=Own(head.layer),
        memory=memory,
        step=step,
    )
    return left.hidden


def _after_first(states: Tensor, packing: Packing) -> Tensor:
    """Of each token the state of the token before; zero for a document's first."""
    moved = states.roll(1, dims=1)
    first = (packing.positions == 0).to(states.device)
    return moved.masked_fill(first[..., None], 0)

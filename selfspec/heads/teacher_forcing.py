"""Teacher forcing: hidden states of a target and its heads over tokens that are already known.

All positions are computed at once, so this is how heads are trained and measured. A head that reads
its own output is unrolled: step s gives its draft s tokens after the last verified token, if the
tokens in between are the known ones.

Legend: rows = sequences of packed documents; width = tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.decoder import Decoder, OwnLayer, Packing, Span, StandaloneLayer
from selfspec.decoder.cache import StepCache
from selfspec.heads.base import ExitHead


@dataclass
class TargetStates:
    """Hidden states of a target over known tokens.

    Attributes:
        tokens: `[rows, width]` the tokens.
        packing: which tokens are of one document.
        streams: residual streams `[rows, width, hidden]` by the number of layers below.
        normed: `[rows, width, hidden]` inputs of the LM head.
    """

    tokens: Tensor
    packing: Packing
    streams: dict[int, Tensor]
    normed: Tensor


@torch.no_grad()
def target_states(
    decoder: Decoder, tokens: Tensor, documents: Tensor | None, keep: Sequence[int]
) -> TargetStates:
    """Run the whole target over packed documents.

    Args:
        decoder: the target.
        tokens: `[rows, width]` token ids.
        documents: `[rows, width]` number of each token's document; `None` when each row is one
            document.
        keep: residual streams to keep, by the number of layers below; `ExitHead.input_layers` for
            what a head reads.
    """
    packing = Packing.of(tokens if documents is None else documents, whole=documents is None)
    wanted = sorted(set(keep))
    everything = Span(0, decoder.depth)
    left = decoder.run_packed(tokens, everything, packing, keep=wanted)
    return TargetStates(tokens, packing, dict(zip(wanted, left.kept, strict=True)), left.output)


def draft_states(
    decoder: Decoder, head: ExitHead, target: TargetStates, steps: int
) -> Iterator[Tensor]:
    """Inputs of `head.logits` at every position, for each depth of a draft.

    A head without feature layers drafts the same at every depth, so it gives one result.

    Args:
        decoder: the target.
        head: the exit head; gradients flow into it.
        target: the target's hidden states, with the streams in `head.input_layers`.
        steps: number of depths to unroll.

    Yields:
        `[rows, width, hidden]` for each depth. At depth s the first s positions of each document
        have no meaning; of a head that skips the first token, the first s + 1.

    Raises:
        ValueError: more than one step for a model whose attention bias counts keys.
    """
    hidden = target.streams[head.exit_layer]
    if head.drafts_at_once:
        features = head.join([target.streams[layer] for layer in head.feature_layers])
        for _ in range(min(steps, head.longest or steps)):
            features = _of_token_before(features, target.packing)
            yield features
        return
    if head.layer is None:
        yield hidden
        return
    if not head.feature_layers:
        yield _run_own_layer(decoder, head, hidden, target, None, 0)
        return
    if steps > 1 and decoder.counts_keys and runs_targets_layer(head):
        raise ValueError(
            f"{type(decoder.causal_lm).__name__} biases attention by the index of a key, which "
            "unrolled steps repeat; fit this head with one step"
        )
    memory = StepCache(decoder.windows, hidden.shape[0], hidden.device)
    features = head.join([target.streams[layer] for layer in head.feature_layers])
    if isinstance(head.layer, StandaloneLayer):
        hidden = head.embed(decoder, target.tokens)
    for step in range(steps):
        entered = head.enter(hidden, _of_token_before(features, target.packing))
        features = _run_own_layer(decoder, head, entered, target, memory, step)
        yield features


def runs_targets_layer(head: ExitHead) -> bool:
    """Whether a head that is fed its own output has a layer of the target's class."""
    own = head.layer is not None and not isinstance(head.layer, StandaloneLayer)
    return own and bool(head.feature_layers)


def _run_own_layer(
    decoder: Decoder,
    head: ExitHead,
    entered: Tensor,
    target: TargetStates,
    memory: StepCache | None,
    step: int,
) -> Tensor:
    """Output of the head's own layer at every position, in unrolled step `step`."""
    assert head.layer is not None
    span = Span(head.place, head.place + 1)
    own = OwnLayer(head.layer, skips_first=head.skips_first)
    left = decoder.run_packed(
        target.tokens, span, target.packing, entered, own=own, memory=memory, step=step
    )
    return left.hidden


def _of_token_before(states: Tensor, packing: Packing) -> Tensor:
    """For each token the state of the token before it; zero for the first of a document."""
    moved = states.roll(1, dims=1)
    first = (packing.positions == 0).to(states.device)
    return moved.masked_fill(first[..., None], 0)

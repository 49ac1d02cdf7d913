"""Teacher forcing: hidden states of a target and its heads over tokens that are already known.

All positions are computed in one pass, so this is how heads are trained and measured. A head that
reads its own output is unrolled: step s gives its draft s tokens after the last verified token, if
the tokens in between are the known ones.

Legend: rows = sequences of packed documents; width = tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from selfspec.decoder import Decoder, OwnLayer, Packing, Span, StandaloneLayer
from selfspec.decoder.cache import StepCache
from selfspec.heads.base import ExitHead
from selfspec.heads.dflash import DFlashHead, DFlashRunner


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
    out = decoder.run_packed(tokens, everything, packing, keep=wanted)
    return TargetStates(tokens, packing, dict(zip(wanted, out.kept, strict=True)), out.output)


def draft_states(
    decoder: Decoder, head: ExitHead, target: TargetStates, steps: int
) -> Iterator[Tensor]:
    """Inputs of `head.logits` at every position, for each depth of a draft.

    A head that is not unrolled drafts the same way at every depth, so it yields once.

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
    if isinstance(head, DFlashHead):
        yield from _block_states(decoder, head, target, steps)
        return
    hidden = target.streams[head.exit_layer]
    if head.layer is None:
        yield from _moved_features(head, target, steps) if head.drafts_at_once else [hidden]
        return
    if not is_unrolled(head):
        yield _run_own_layer(decoder, head, hidden, target, None, 0)
        return
    if steps > 1 and decoder.counts_keys and runs_targets_layer(head):
        raise ValueError(
            f"{type(decoder.causal_lm).__name__} biases attention by the index of a key, which "
            "unrolled steps repeat; fit this head with one step"
        )
    memory = StepCache(decoder.windows, hidden.shape[0], hidden.device)
    if isinstance(head.layer, StandaloneLayer):
        hidden = head.embed(decoder, target.tokens)
    before = None
    if head.feature_layers:
        joined = head.fuse_features([target.streams[layer] for layer in head.feature_layers])
        before = _of_token_before(joined, target.packing)
    features = _run_own_layer(decoder, head, head.enter(hidden, before), target, memory, 0)
    yield features
    if head.mask is not None:
        yield from _mask_states(decoder, head, target, memory, steps)
        return
    for step in range(1, steps):
        entered = head.enter(hidden, _of_token_before(features, target.packing))
        features = _run_own_layer(decoder, head, entered, target, memory, step)
        yield features


def _block_states(
    decoder: Decoder, head: DFlashHead, target: TargetStates, steps: int
) -> Iterator[Tensor]:
    """For each depth, the output of a block's row after every token, followed by the memory.

    The tokens before a draft are known to `DFlashHead.correct`, which makes the memory of them.
    """
    tokens = target.tokens
    context = head.fuse_features([target.streams[layer] for layer in head.feature_layers])
    hidden = DFlashRunner(decoder, head).run_packed(context, target.packing, tokens)
    memory = head.first_memory(hidden[:, :, 0], tokens)
    for step in range(min(steps, head.longest or steps)):
        state = torch.cat([hidden[:, :, step + head.first_row], memory], dim=-1)
        yield state.roll(step, dims=1)
        _, memory = head.correct(None, state, tokens.roll(-step, dims=1), memory)


def _moved_features(head: ExitHead, target: TargetStates, steps: int) -> Iterator[Tensor]:
    """For each depth, the features from which a head without a layer makes all drafts."""
    features = head.fuse_features([target.streams[layer] for layer in head.feature_layers])
    for _ in range(min(steps, head.longest or steps)):
        features = _of_token_before(features, target.packing)
        yield features


def _mask_states(
    decoder: Decoder,
    head: ExitHead,
    target: TargetStates,
    memory: StepCache,
    steps: int,
) -> Iterator[Tensor]:
    """Outputs of the head's own layer at masks 1, 2, ... after every token.

    In step s, each position has the mask number s after the token s positions before. `memory`
    holds the layer's keys and values of the tokens themselves.
    """
    shape = (*target.tokens.shape, -1)
    below = StepCache(decoder.windows, shape[0], target.tokens.device)
    span = Span(0, head.exit_layer)
    if head.exit_layer:
        with torch.no_grad():
            decoder.run_packed(target.tokens, span, target.packing, memory=below)
    embedding, fused = head.mask_inputs(decoder)
    embeds = embedding.expand(shape)
    features = fused.expand(shape) if head.feature_layers else None
    enter = partial(head.enter, features=features)
    for step in range(1, steps):
        if head.exit_layer:
            out = decoder.run_packed(
                target.tokens, span, target.packing, memory=below, step=step, embeds=embeds
            )
            yield _run_own_layer(decoder, head, enter(out.hidden), target, memory, step)
        else:
            yield _run_own_layer(decoder, head, None, target, memory, step, enter, embeds)


def is_unrolled(head: ExitHead) -> bool:
    """Whether a head with a layer drafts later tokens from its own output or from masks."""
    return bool(head.feature_layers) or head.drafts_at_once


def runs_targets_layer(head: ExitHead) -> bool:
    """Whether a head that is unrolled has a layer of the target's class."""
    others = isinstance(head.layer, StandaloneLayer) or isinstance(head, DFlashHead)
    return head.layer is not None and not others and is_unrolled(head)


def _run_own_layer(
    decoder: Decoder,
    head: ExitHead,
    entered: Tensor | None,
    target: TargetStates,
    memory: StepCache | None,
    step: int,
    enter: Callable[[Tensor], Tensor] | None = None,
    embeds: Tensor | None = None,
) -> Tensor:
    """Output of the head's own layer at every position, in unrolled step `step`.

    The input of the layer is `entered`, or `enter` of the layers below run over `embeds`.
    """
    assert head.layer is not None
    span = Span(head.place, head.place + 1)
    own = OwnLayer(head.layer, enter, skips_first=head.skips_first)
    out = decoder.run_packed(
        target.tokens,
        span,
        target.packing,
        entered,
        own=own,
        memory=memory,
        step=step,
        embeds=embeds,
    )
    return out.hidden


def _of_token_before(states: Tensor, packing: Packing) -> Tensor:
    """For each token the state of the token before it; zero for the first of a document."""
    moved = states.roll(1, dims=1)
    first = (packing.positions == 0).to(states.device)
    return moved.masked_fill(first[..., None], 0)

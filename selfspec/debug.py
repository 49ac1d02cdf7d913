"""Checks the invariants of every round of a model while it generates; see docs/debugging.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.decoder import Decoder
from selfspec.decoder.direct import Forward
from selfspec.drafters import Drafter
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.generation.loop import Session
from selfspec.heads import ExitHead
from selfspec.model import SelfSpecModel
from selfspec.sampling.draft import Draft


@dataclass
class Watched:
    """What was run in the last round, or in the prefill before the first one.

    Attributes:
        widths: per layer of the target, the number of tokens of each pass that ran it; in a round
            `apart`, those of the verification only.
        drafts: what was verified.
        rounds: rounds in all; the prefill is none.
        apart: whether passes drafted by approximate layers, or with sublayers skipped.
    """

    widths: list[list[int]]
    drafts: list[Draft] = field(default_factory=list)
    rounds: int = 0
    apart: bool = False

    def clear(self) -> None:
        """Forget the last round."""
        self.apart = False
        self.drafts.clear()
        for seen in self.widths:
            seen.clear()


@contextmanager
def watch(spec: SelfSpecModel) -> Iterator[Watched]:
    """Check every round of `spec` inside the `with` block.

    The prefill runs each layer once over each token. A round runs one verification: the layers
    below `Draft.depth` once over each draft, those above once over all of them; what drafts by
    approximate layers, or with sublayers skipped, is no part of it. Afterwards the KV cache holds
    all tokens but the pending one. Drafters and heads only read what they are given: the tokens so
    far, and hidden states. While it watches, other threads must not generate, and the target must
    not be its own draft model; the layers are seen only where Python calls them (kernels `eager`,
    `direct` or `prepacked`).

    Raises:
        AssertionError: in the `with` block, if an invariant does not hold; it says which.
    """
    decoder = spec.decoder
    watched = Watched([[] for _ in decoder.layers])
    verify, start, step, draft = Engine.verify, Session.start, Session.step, Drafter.draft

    def checked_draft(drafter: Drafter, state: State, limit: int, target: Decoder) -> Draft:
        if target is not decoder:
            return draft(drafter, state, limit, target)
        before = _tokens_so_far(state)
        drafted = draft(drafter, state, limit, target)
        assert _tokens_so_far(state) == before, (
            f"the drafter {drafter.name!r} changed the tokens so far, `state.context.text` or "
            "`state.pending`; change a copy"
        )
        return drafted

    def noting_verify(engine: Engine, state: State, draft: Draft) -> Verified:
        if engine.decoder is decoder:
            watched.drafts.append(draft)
            for seen in watched.widths if watched.apart else ():
                seen.clear()
        return verify(engine, state, draft)

    def checked_start(session: Session) -> State:
        watched.clear()
        state = start(session)
        if session.engine.decoder is decoder:
            _check_prefill(watched, session)
            _check_lengths(session, state)
        return state

    def checked_step(session: Session, state: State) -> None:
        watched.clear()
        step(session, state)
        if session.engine.decoder is decoder:
            watched.rounds += 1
            _check_passes(watched)
            _check_lengths(session, state)

    with ExitStack() as changes:
        for index, layer in enumerate(decoder.layers):
            _replace(changes, layer, "forward", _counting(decoder, layer.forward, watched, index))
        for head in spec.engine.heads:
            _replace(changes, head, "forward", _only_reading(head))
        _replace(changes, Drafter, "draft", checked_draft)
        _replace(changes, Engine, "verify", noting_verify)
        _replace(changes, Session, "start", checked_start)
        _replace(changes, Session, "step", checked_step)
        yield watched


def _replace(changes: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until `changes` are undone."""
    own = owner.__dict__.get(name)
    setattr(owner, name, value)
    if own is None:
        changes.callback(delattr, owner, name)
    else:
        changes.callback(setattr, owner, name, own)


def _counting(decoder: Decoder, forward: Forward, watched: Watched, index: int) -> Forward:
    def counted(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
        active = decoder.gates.current.mine
        skips = active is not None and active.skips is not None
        watched.apart = watched.apart or skips or decoder.approximates_layers
        watched.widths[index].append(hidden_states.shape[1])
        return forward(hidden_states, *args, **kwargs)

    return counted


def _only_reading(head: ExitHead) -> Callable[[Tensor], Tensor]:
    forward = head.forward

    def checked(hidden: Tensor) -> Tensor:
        before = hidden.clone()
        read = forward(hidden)
        assert torch.allclose(hidden, before, 0, 0, equal_nan=True), (
            f"the {head.kind} head changed its input in place; verification resumes from it"
        )
        return read

    return checked


def _tokens_so_far(state: State) -> tuple[list[list[int]], list[list[int]]]:
    return [[*state.context.text[row]] for row in state.context.rows], state.pending.tolist()


def _check_prefill(watched: Watched, session: Session) -> None:
    given = zip(session.prompt.lengths, session.prompt.known, strict=True)
    longest = max(length - known for length, known in given)
    for layer, seen in enumerate(watched.widths):
        assert sum(seen) == longest, (
            f"the prefill has {longest} tokens, and layer {layer} ran over {seen}"
        )


def _check_passes(watched: Watched) -> None:
    """One verification; a shallow pass for each level of drafts; one deep pass over all of them."""
    assert len(watched.drafts) == 1, f"a round verifies once, got {len(watched.drafts)} times"
    (draft,) = watched.drafts
    width = draft.length + 1
    levels = [1] * width if draft.tree is None else draft.tree.depths[0].bincount().tolist()
    below = levels[-1:] if watched.apart else levels  # verification begins with the last drafts
    for layer, seen in enumerate(watched.widths):
        expected = below if layer < draft.depth else [width]
        assert seen == expected, (
            f"layer {layer} ran over {seen} tokens, expected {expected}: {draft.length} drafts "
            f"with depth={draft.depth} were verified"
        )


def _check_lengths(session: Session, state: State) -> None:
    context, slots = state.context, state.slots
    for index, row in enumerate(context.rows):
        length = context.lengths[row]
        committed = session.prompt.lengths[row] + length - session.prompt.width - 1
        has, of_layers = slots.lengths[index], [layer.capacity for layer in slots.layers]
        assert has == committed, f"row {row} has KV of {has} tokens, expected {committed}"
        assert min(of_layers, default=has) >= has, f"row {row}: capacities {of_layers} for {has}"
        pending, last = int(state.pending[index]), int(context.tokens[row, length - 1])
        assert pending == last, f"row {row}: token {pending} is pending, the last one is {last}"
        emitted = [] if state.emitted is None else state.emitted[index].tolist()
        text = context.text[row][len(context.text[row]) - len(emitted) :]
        assert emitted == text, f"row {row}: {emitted} was emitted, the text ends with {text}"

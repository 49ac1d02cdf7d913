"""The engine that every drafter runs on: a target, its heads, and the passes of a round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.config import DraftConfig, Options
from selfspec.decoder import Decoder, OwnLayer, Pass, Ranks, Span
from selfspec.decoder.cache import SlotCache
from selfspec.decoder.devices import device_of
from selfspec.drafters.draft_models import DraftModels
from selfspec.drafters.text_store import TextStore
from selfspec.heads import ExitHead, check_distinct, head_class
from selfspec.sampling.context import Context
from selfspec.sampling.draft import Draft, Tree, Verdict
from selfspec.sampling.sampler import Sampler
from selfspec.schedule import Rounds
from selfspec.schedule.stats import Stats


@dataclass
class State:
    """A call in progress, for its unfinished rows.

    Between rounds each row has one *pending* token: it is emitted, but has no KV yet. Every layer
    has KV, or a recurrent state, of all tokens before it.

    Attributes:
        slots: the KV cache.
        context: the tokens so far, as processors and stopping criteria see them.
        pending: `[rows, 1]` the last emitted token of each row.
        sampler: turns scores into tokens.
        stats: counters and clocks of the call.
        keep: hidden states, by the number of layers below, that verification keeps.
        below: those of them that the round's shallow passes computed, one block per pass.
        emitted: `[rows, n]` the tokens of the last round, the pending token last; `None` before the
            first round, if rows emitted different numbers of tokens, and after a row has finished.
    """

    slots: SlotCache
    context: Context
    pending: Tensor
    sampler: Sampler
    stats: Stats = field(default_factory=Stats)
    keep: tuple[int, ...] = ()
    below: dict[int, list[Tensor]] = field(default_factory=dict)
    emitted: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of unfinished rows."""
        return self.pending.shape[0]

    def commit(self, verdict: Verdict) -> None:
        """Take the tokens of a round as emitted, in rows that go on.

        Such a row was not cut: its last token, now the pending one, is what the target added.
        """
        first, *others = verdict.accepted_counts
        if all(count == first for count in others):
            self.emitted = verdict.tokens.narrow(1, 0, first + 1)
            self.pending = self.emitted.narrow(1, first, 1)
        else:
            self.emitted = None
            self.pending = verdict.tokens.gather(1, verdict.accepted[:, None])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in the given order."""
        self.context.select(rows)
        if rows:
            self.slots.select(rows)
        self.pending, self.emitted = self.pending[list(rows)], None

    def join(self, other: State, room: int) -> None:
        """Append KV and pending tokens of other rows; the longest needs `room` more slots."""
        self.slots.join(other.slots, room)
        self.pending, self.emitted = torch.cat([self.pending, other.pending]), None


class Verified(NamedTuple):
    """Results of verification.

    Attributes:
        logits: `[rows, n + 1, vocab]` the target's logits after the pending token and every draft.
        hidden_states: `[rows, n + 1, hidden]` each, those that `State.keep` names.
    """

    logits: Tensor
    hidden_states: list[Tensor]

    def along(self, branch: Tensor) -> Verified:
        """The results at the pending token and at the drafts `[rows, levels]` of a branch."""
        index = torch.nn.functional.pad(branch, (1, 0))[..., None]
        logits, *hidden_states = (
            states.gather(1, index.expand(-1, -1, states.shape[2]).to(states.device))
            for states in (self.logits, *self.hidden_states)
        )
        return Verified(logits, hidden_states)


# Called after each block of a prefill with the results of the pass and its offset.
OnBlock = Callable[[Pass, int], None]


class Engine:
    """Runs the shallow and the deep part of a target.

    Args:
        decoder: the target.
        heads: exit heads fitted to it.
        draft_model: a smaller model, or the folder or id to load it from.

    Attributes:
        store: the texts of other calls that lookups read, or `None`.

    Raises:
        OSError: there is no checkpoint at `draft_model`.
        ValueError: the heads belong to another target, or `draft_model` cannot draft for it.
    """

    store: TextStore | None = None

    def __init__(
        self,
        decoder: Decoder,
        heads: Sequence[ExitHead] = (),
        draft_model: nn.Module | str | Path | None = None,
    ):
        self.decoder = decoder
        self.heads: list[ExitHead] = []
        # The target's dtype and device when each was made.
        self._made_for: dict[ExitHead, tuple[object, ...]] = {}
        self.ranks = Ranks(decoder.causal_lm)
        self._rounds: dict[tuple[object, ...], Rounds] = {}
        for head in heads:
            self.add(head)
        self.draft_models = DraftModels(decoder, draft_model)

    def add(self, head: ExitHead) -> None:
        """Add a head.

        Raises:
            TypeError: it is not an ExitHead.
            ValueError: it does not fit the target, or there is one of its kind at its exit.
        """
        check_distinct([*self.heads, head])
        head.check(self.decoder)
        self._made_for[head] = self._origin(head)
        self.decoder.include(*_parts(head))
        self.heads.append(head)

    def match_heads(self) -> None:
        """Bring heads to the target's dtype and devices, which may have changed since they came."""
        for head in self.heads:
            place = self._place(head)
            held, self._made_for[head] = self._made_for.get(head, place), place
            if held != place:
                changes = dict(zip(held, place, strict=True))
                for tensors, name, tensor in self._own_tensors(head):
                    tensors[name] = _cast_and_moved(tensor, changes)

    def _own_tensors(self, head: ExitHead) -> list[tuple[Any, str, Tensor]]:
        """A head's tensors, but for the target's own and calibrators: where they are, and names."""
        target = {id(weight) for weight in self.decoder.causal_lm.parameters()}
        return [
            (tensors, name, tensor)
            for part in _parts(head)
            for path, module in part.named_modules()
            if not path.startswith("calibrators")  # they are computed in float32
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None and id(tensor) not in target
        ]

    def _place(self, head: ExitHead) -> tuple[object, ...]:
        """What a head has from its target: dtypes and devices of its tensors."""
        norm = self.decoder.final_norm
        of_norm = next(iter(() if norm is None else norm.parameters()), None)
        dtype, device = self.decoder.dtype, self.decoder.device_at(head.exit_layer)
        normed = dtype if of_norm is None else of_norm.dtype
        return normed, dtype, device_of(self.decoder.lm_head), device

    def _origin(self, head: ExitHead) -> tuple[object, ...]:
        """The place that a head was made for, which may be another target's.

        Raises:
            ValueError: its tensors are on one device, and this target has two for it.
        """
        normed, dtype, of_lm_head, device = self._place(head)
        tensors = [tensor for _, _, tensor in self._own_tensors(head)]
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        devices = {tensor.device for tensor in tensors}
        if len(dtypes) == 1 and dtype not in dtypes:
            normed = dtype = dtypes.pop()
        if len(devices) == 1 and not devices & {of_lm_head, device}:
            if of_lm_head != device:
                raise ValueError(
                    f"a {head.kind} head on {devices.pop()} cannot be brought to a target whose "
                    f"exit is on {device} and whose LM head is on {of_lm_head}; load it for this "
                    "target from its folder"
                )
            of_lm_head = device = devices.pop()
        return normed, dtype, of_lm_head, device

    def beside(self, draft_model: nn.Module, tokenizers: Sequence[object] = (None, None)) -> Engine:
        """The same engine with another draft model, for one call; see `DraftModels.beside`."""
        other = copy.copy(self)
        other.draft_models = self.draft_models.beside(draft_model, tokenizers)
        return other

    @property
    def default_draft(self) -> DraftConfig:
        """The draft of a call without `draft=` and without a profile.

        It is the fastest of plain decoding, lookups and chains, round by round, as measured.
        Without heads a seed gives one output, whatever drafts; with heads that would cost too many
        sampled drafts, so `rule="coupled"` has to be asked for.
        """
        if self.heads:
            return DraftConfig(drafter="auto")
        if self.decoder.depth == 1:  # no exit
            return DraftConfig(drafter="none")
        return DraftConfig(drafter="auto", rule="coupled")

    def rounds(self, config: DraftConfig, *key: object, head: ExitHead | None = None) -> Rounds:
        """What is known of rounds with one drafter, kept from call to call.

        Args:
            config: how many drafts a chain has at most, and how its passes are approximated.
            key: identifies a drafter without an exit head.
            head: the exit head; drafters with the same head share what they learn.
        """
        if head is not None:
            key = head.kind, head.exit_layer
        longest, clock = config.most_tokens, self.ranks.clock
        key = (*key, longest, *config.approximated)
        if key not in self._rounds:
            self._rounds[key] = (
                Rounds(clock=clock, longest=longest)
                if head is None
                else Rounds.of_head(self.decoder, head, clock, longest)
            )
        return self._rounds[key]

    def head(self, config: DraftConfig) -> ExitHead:
        """The head that a config names; a kind that needs no fitting is made here."""
        exit_layer = self._exit_layer(config)
        if exit_layer == self.decoder.depth and config.approximates:
            return self._whole(config)
        fitted = [head for head in self.heads if head.exit_layer == exit_layer]
        kind = config.head or (fitted[0].kind if fitted else "shared")
        for head in fitted:
            if head.kind == kind:
                return head
        head_type, given = head_class(kind), config.exit_layer is not None
        if given or kind == "shared":
            head_type.check_exit(self.decoder, exit_layer)
        if kind != "shared":
            at = f" at exit_layer {exit_layer}" if given else ""
            have = ", ".join(f"{h.kind} at {h.exit_layer}" for h in self.heads) or "none"
            raise ValueError(
                f"no {kind!r} head was fitted{at} (fitted: {have}); "
                "pass heads=..., or use head='shared', which needs no fitting"
            )
        return head_type.build(self.decoder, exit_layer)

    def _whole(self, config: DraftConfig) -> ExitHead:
        """The head of the whole model, which drafts by approximate passes."""
        if config.head not in (None, "shared"):
            raise ValueError(
                f"exit_layer={self.decoder.depth} is the whole model, which drafts through its own "
                f"LM head; set head='shared' instead of {config.head!r}, or leave it out"
            )
        return head_class("shared").build(self.decoder, self.decoder.depth)

    def _exit_layer(self, config: DraftConfig) -> int:
        if config.exit_layer is not None:
            return config.exit_layer
        fitted = [h for h in self.heads if config.head in (None, h.kind)]
        return fitted[0].exit_layer if fitted else max(1, self.decoder.depth // 4)

    def prefill(
        self,
        state: State,
        tokens: Tensor,
        counts: Sequence[int],
        chunk: int | None = None,
        keep: Sequence[int] = (),
        on_block: OnBlock | None = None,
        prompt: Options | None = None,
    ) -> Tensor:
        """Write KV of new tokens in every layer; the caller commits the lengths.

        Args:
            state: the call.
            tokens: `[rows, width]` the tokens, left-aligned.
            counts: real tokens of each row.
            chunk: tokens per pass; `None` for all in one.
            keep: hidden states to keep for `on_block`.
            on_block: called after each pass with its results and its offset.
            prompt: see `Decoder.run`.

        Returns:
            `[rows, 1, vocab]` the target's logits after each row's last token.
        """
        everything = Span(0, self.decoder.depth)
        state.slots.will_commit = counts
        ends = torch.tensor(counts, device=tokens.device) - 1
        last: Tensor | None = None
        width = tokens.shape[1]
        for start in range(0, width, chunk or width):
            block = tokens[:, start : start + (chunk or width)]
            at_end = (ends - start).clamp(0, block.shape[1] - 1)
            slots = state.slots
            out = self.decoder.run(
                block, everything, slots, offset=start, keep=keep, prompt=prompt, ends=at_end
            )
            if on_block is not None:
                on_block(out, start)
            assert out.logits is not None
            here = (ends >= start)[:, None, None]
            last = out.logits if last is None else torch.where(here, out.logits, last)
        assert last is not None
        return last

    def prefill_again(self, state: State, chunk: int | None = None) -> None:
        """Write KV of all committed tokens anew."""
        texts = [state.context.text[row][:-1] for row in state.context.rows]
        counts = [len(text) for text in texts]
        rows = [text + [0] * (max(counts) - len(text)) for text in texts]
        state.slots.reset()
        self.prefill(state, torch.tensor(rows, device=state.pending.device), counts, chunk)
        state.slots.commit(counts)

    def shallow(
        self,
        state: State,
        tokens: Tensor,
        exit_layer: int,
        offset: int | Sequence[int],
        unembed: bool = False,
        tree: Tree | None = None,
        own: OwnLayer | None = None,
        embeds: Tensor | None = None,
    ) -> Pass:
        """Run the layers below an exit over `tokens`, at `offset` after the committed tokens.

        The `embeds` `[rows, width, hidden]`, if given, take the place of the tokens' embeddings.
        With a head's `own` layer, the same pass also runs that layer and returns its results; the
        exit's hidden states are then kept, unless the exit is at the embeddings.
        """
        if own is None:
            span = Span(0, exit_layer)
        else:
            span = Span(0 if exit_layer else own.place, own.place + 1)
        # From approximate states verification does not resume; it computes all of them anew.
        apart = not exit_layer or self.decoder.approximates_layers
        below = [] if apart else [layer for layer in state.keep if layer < exit_layer]
        keep = [*below, exit_layer] if own is not None and exit_layer else below
        slots, hidden, skips = state.slots, None, None
        out = self.decoder.run(
            tokens, span, slots, hidden, offset, unembed, keep, own, tree, skips, embeds
        )
        state.stats.seconds["shallow"] += out.layer_seconds
        state.stats.seconds["head"] += out.head_seconds
        if not below:
            return out
        for layer, kept in zip(below, out.kept, strict=False):
            state.below.setdefault(layer, []).append(kept)
        return out._replace(kept=out.kept[len(below) :])

    def verify(self, state: State, draft: Draft) -> Verified:
        """Run the target over the pending token and every draft.

        It resumes from the draft's hidden states: the layers below `draft.depth` run only over
        tokens that the drafter has not run (the last drafts), the others over all n + 1.
        """
        tokens = torch.cat([state.pending, draft.tokens], dim=1)
        hidden = draft.hidden
        if hidden is not None and hidden.shape[1] < tokens.shape[1]:
            # The last drafts have no KV until this pass.
            done = hidden.shape[1]
            rest = self.shallow(state, tokens[:, done:], draft.depth, done, tree=draft.tree)
            hidden = torch.cat([hidden, rest.hidden], dim=1)
        if tokens.shape[1] == 1:  # nothing was drafted: the pending token will be committed
            state.slots.will_commit = [1] * state.rows
        span = Span(draft.depth, self.decoder.depth)
        keep = [layer for layer in state.keep if layer >= draft.depth]
        full = self.decoder.run(
            tokens, span, state.slots, hidden, unembed=True, keep=keep, tree=draft.tree
        )
        state.stats.seconds["deep"] += full.layer_seconds
        state.stats.seconds["head"] += full.head_seconds
        if not state.below:
            return Verified(full.output, full.kept)
        kept = dict(zip(keep, full.kept, strict=True))
        kept |= {layer: torch.cat(blocks, dim=1) for layer, blocks in state.below.items()}
        state.below.clear()
        return Verified(full.output, [kept[layer] for layer in state.keep])


def _parts(head: ExitHead) -> list[nn.Module]:
    """The modules of a head; its LM head is not among its own."""
    return [part for part in (head, head.lm_head) if part is not None]


@torch.no_grad()
def _cast_and_moved(tensor: Tensor, changes: Mapping[Any, Any]) -> Tensor:
    """A tensor of a head with its dtype and device changed."""
    dtype = changes.get(tensor.dtype, tensor.dtype)
    with torch.inference_mode(False):
        moved = tensor.detach().to(changes.get(tensor.device, tensor.device), dtype)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved

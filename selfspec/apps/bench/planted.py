"""Drafts that are right with a given probability, for models with random weights.

The drafter runs its layers, its head and its LM head as usual. Then its logits are replaced, so
that its draft is the target's own next token with the given probability, else a wrong one. So time
and memory are measured, and acceptance is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec.apps.bench.prompts import Batch
from selfspec.config import DraftConfig, Options
from selfspec.decoder import CACHE
from selfspec.drafters import EarlyExit, ExitTree, make_drafter
from selfspec.drafters.engine import State
from selfspec.drafters.tree import SECOND_CHANCE
from selfspec.generation.loop import Call, Session, speculate
from selfspec.model import SelfSpecModel
from selfspec.sampling.draft import Tree

_CANDIDATES = 8  # candidates of a position; more than a tree has siblings

Read = Callable[..., tuple[Tensor, Tensor | None]]


class GreedyTexts:
    """The target's own greedy continuations, generated once per batch and mode.

    They have `new_tokens` tokens, however many a call asks for.
    """

    def __init__(self, spec: SelfSpecModel, new_tokens: int):
        self._spec, self._new_tokens = spec, new_tokens
        # By the prompts, which are hashed by identity, and the options.
        self._found: dict[tuple[Tensor, frozenset[tuple[str, Any]]], Tensor] = {}

    def __call__(self, batch: Batch, options: Options) -> Tensor:
        """`[rows, new_tokens]` the new tokens of each row."""
        options = {**options, "max_new_tokens": self._new_tokens}
        key = batch.tokens, frozenset(options.items())
        if key not in self._found:
            generate: Any = self._spec.model.generate
            cache = {CACHE: self._spec.decoder.own_cache()}
            output = generate(batch.tokens, attention_mask=batch.mask, **cache, **options)
            self._found[key] = output[:, batch.width :]
        return self._found[key]


def planted_ranks(rows: int, length: int, acceptance: float, seed: int) -> Tensor:
    """`[rows, length]` index of the right candidate at each position; `_CANDIDATES` if none is.

    The first is right with probability `acceptance`; each further one, if those before are wrong,
    with half of that. A seed gives the same random numbers to every method. Those of a row are
    spread evenly, so that the share of right drafts is close to `acceptance` in a short text, too.
    """
    again = (1 - acceptance) * SECOND_CHANCE  # of a sibling, as the tree drafter expects
    reached = acceptance * (again ** torch.arange(_CANDIDATES)).cumsum(0)
    order = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    coins = (order + 0.5) / length
    return (coins[..., None] >= reached).sum(-1)


class PlantedRead:
    """Calls an exit head by `read` of its reader, and replaces its logits by planted ones.

    `text` is `[rows, n]`, the target's own next tokens of each row after `width` tokens of prompts,
    padding included.
    """

    def __init__(
        self, read: Read, text: Tensor, width: int, acceptance: float, vocab: int, seed: int
    ):
        self._read, self._width = read, width
        rows, length = text.shape
        ranks = planted_ranks(rows, length, acceptance, seed).to(text.device)[..., None]
        order = torch.arange(_CANDIDATES, device=text.device)
        wrong = (text[..., None] + 1 + order) % vocab
        self._candidates = torch.where(order == ranks, text[..., None], wrong)
        # An unfitted calibrator turns the margin of the first two scores into a probability.
        margin = max(math.log(acceptance / (1 - acceptance)), 0.01)
        self._scores = torch.where(order == 0, 0.0, 1.0 - margin - order)
        self._at = self._rows = text.new_empty(0)
        self._level = 0

    def __call__(
        self,
        state: State,
        tokens: Tensor,
        place: int,
        tree: Tree | None = None,
        parents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `ExitReader.read`."""
        logits, at_exit = self._read(state, tokens, place, tree, parents)
        if not place:
            self._begin(state)
        ids = self._candidates[self._rows, self._at + self._level]  # [rows, candidates]
        self._level += 1
        ids = ids[:, None].expand(-1, logits.shape[1], -1)
        scores = self._scores.to(logits.dtype).expand(ids.shape)
        return torch.full_like(logits, -30.0).scatter_(2, ids, scores), at_exit

    def _begin(self, state: State) -> None:
        """Find each row's position in its text, with one copy to the device per round."""
        context = state.context
        written = [context.lengths[row] - self._width for row in context.rows]
        both = torch.tensor([context.rows, written], device=self._candidates.device)
        self._rows, self._at = both
        self._level = 0


def generate_planted(
    spec: SelfSpecModel,
    draft: DraftConfig,
    batch: Batch,
    text: Tensor,
    acceptance: float,
    seed: int,
    **options: Any,
) -> tuple[Tensor, Session]:
    """`SelfSpecModel.generate` with planted drafts: its output, and the session with statistics.

    Args:
        spec: the target.
        draft: how to draft, by `early_exit` or `tree`; ValueError for another drafter.
        batch: the prompts.
        text: `[rows, n]` the target's own continuations.
        acceptance: probability that a draft after right ones is right.
        seed: seed of the random numbers.
        **options: of transformers' `generate`, greedy, with `max_new_tokens`.
    """
    drafter = make_drafter(spec.engine, draft)
    if not isinstance(drafter, EarlyExit | ExitTree) or options.get("do_sample"):
        raise ValueError(
            "acceptance is planted in greedy drafts of early_exit and tree, got "
            f"drafter={draft.drafter!r}, do_sample={bool(options.get('do_sample'))}"
        )
    reader: Any = drafter.reader
    room = max(0, options["max_new_tokens"] - text.shape[1]) + draft.most_tokens
    padded = torch.nn.functional.pad(text, (0, room))
    vocab = spec.decoder.vocab_size
    reader.read = PlantedRead(reader.read, padded, batch.width, acceptance, vocab, seed)
    opened: list[Session] = []
    streamer = options.get("streamer")
    call = Call(spec.engine, drafter, mask=batch.mask, streamer=streamer, opened=opened.append)
    generate: Any = spec.causal_lm.generate
    run = partial(speculate, call=call)
    output = generate(batch.tokens, attention_mask=batch.mask, custom_generate=run, **options)
    return output, opened[0]

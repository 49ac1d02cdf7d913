"""A chain of drafts from the target itself, with sublayers left out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from selfspec.config import DraftConfig
from selfspec.decoder import Span
from selfspec.drafters.base import Drafter
from selfspec.drafters.chain import draft_chain
from selfspec.drafters.engine import Engine, State, Verified
from selfspec.drafters.skipped_layers import FixedSkips, make_skips
from selfspec.sampling.draft import Draft, Verdict
from selfspec.schedule import Schedule, make_schedule, plain_judge


class SkipLayers(Drafter):
    """Drafts with attention and MLP sublayers skipped (Draft & Verify, Zhang et al. 2024).

    The layers below the first skipped sublayer run exactly, and verification resumes above them.
    The others write approximate KV behind the settled tokens; verification overwrites it, so that
    there is nothing to roll back.

    Args:
        engine: the target and its passes.
        chooser: what says which sublayers to skip.
        longest: the most tokens drafted in a round.
        schedule: when to stop earlier.
    """

    name = "layer_skip"
    takes_schedule = True

    def __init__(self, engine: Engine, chooser: FixedSkips, longest: int, schedule: Schedule):
        self.decoder, self.chooser = engine.decoder, chooser
        self.longest, self.schedule, self._judge = longest, schedule, plain_judge()

    @classmethod
    def from_config(cls, engine: Engine, config: DraftConfig) -> SkipLayers:
        """Take the sublayers that the config names, or search for some.

        Raises:
            ValueError: it skips everything or what is not there, or the target is none to search.
        """
        chooser = make_skips(engine.decoder, config.skip)
        schedule = make_schedule(config, engine.round_model(cls.name, config.skip))
        return cls(engine, chooser, config.most_tokens, schedule)

    def propose(self, state: State, limit: int) -> Draft:
        """Draft token by token."""
        self.chooser.begin(state)
        state.keep = self.chooser.keep
        depth = 0 if state.keep else self._exact
        return draft_chain(
            state,
            min(self.longest, limit),
            self.schedule,
            self._judge,
            lambda token, step: self._read(state, token, step, depth),
            depth,
        )

    @property
    def _exact(self) -> int:
        """Layers below the first skipped sublayer; the last layer is always verification's."""
        last = self.decoder.depth - 1
        return min((last, *self.chooser.skips.attention, *self.chooser.skips.mlp))

    def _read(
        self, state: State, token: Tensor, step: int, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        everything, keep = Span(0, self.decoder.depth), (depth,) if depth else ()
        skips = self.chooser.skips
        left = self.decoder.run(
            token, everything, state.slots, offset=step, unembed=True, keep=keep, skips=skips
        )
        state.stats.seconds["shallow"] += left.layer_seconds
        state.stats.seconds["head"] += left.head_seconds
        return left.output, left.kept[0] if depth else None

    def commit(self, state: State, draft: Draft, verified: Verified, verdict: Verdict) -> None:
        """Learn what was accepted, and what verification left for a search."""
        self.chooser.verified(verified, verdict)
        if draft.length:
            self.schedule.end(draft.length, verdict.kept)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows only."""
        self.chooser.select(rows)

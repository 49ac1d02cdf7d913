"""What a page lets one choose for a model."""

from __future__ import annotations

from selfspec.config import DraftConfig
from selfspec.drafters import DRAFTERS
from selfspec.model import SelfSpecModel

# Drafters that draft behind the exit they are told, and those that have no length to be told.
_AT_AN_EXIT = ("early_exit", "tree", "cascade")
_OWN_LENGTH = ("auto", "lookahead")
# Plain decoding is what the page compares with; a draft model is named on the command line.
_UNLESS_NAMED = ("none", "two_model")

LONGEST_DRAFT = 16


class Offer:
    """The choices of how to draft, and the draft that they make.

    Args:
        spec: the target.
        base: the draft to begin with. What a page has no control for stays as it is there, as long
            as its drafter is chosen.

    Attributes:
        drafters: names of the drafters.
        exits: the layers behind which an exit may be.
        exit_layer: the one to begin with.
        num_draft_tokens: the draft length to begin with.

    Raises:
        ValueError: the model has no such exit.
    """

    def __init__(self, spec: SelfSpecModel, base: DraftConfig):
        self.spec, self.base = spec, base
        self.drafters = [
            name for name in DRAFTERS if name not in _UNLESS_NAMED or name == base.drafter
        ]
        fitted = [head.exit_layer for head in spec.heads]
        self.exits = sorted({*range(1, spec.engine.decoder.depth), *fitted})
        self._first = spec.engine.head(base if self.at_an_exit(base.drafter) else DraftConfig())
        self.exit_layer = self._first.exit_layer
        self.num_draft_tokens = self.length_of(base.drafter)

    def heads(self, exit_layer: int) -> list[str]:
        """Kinds of the heads behind that layer, the one to begin with first."""
        kinds = [head.kind for head in self.spec.heads if head.exit_layer == exit_layer]
        if exit_layer == self._first.exit_layer:
            kinds.insert(0, self._first.kind)
        if exit_layer > 0:
            kinds.append("shared")
        return list(dict.fromkeys(kinds))

    def at_an_exit(self, drafter: str) -> bool:
        """Whether it drafts behind an exit that can be chosen."""
        return drafter in _AT_AN_EXIT

    def takes_length(self, drafter: str) -> bool:
        """Whether the length of its drafts can be chosen."""
        return drafter not in _OWN_LENGTH

    def length_of(self, drafter: str) -> int:
        """The draft length to begin with, where it can be chosen."""
        base = self.base if drafter == self.base.drafter else DraftConfig(drafter=drafter)
        return min(base.most_tokens, LONGEST_DRAFT)

    def draft(self, drafter: str, exit_layer: int, head: str, num_draft_tokens: int) -> DraftConfig:
        """The draft that was chosen; what the drafter would not heed is left out.

        Raises:
            ValueError: there can be no such draft.
        """
        chosen = self.base.model_dump(exclude_unset=True) if drafter == self.base.drafter else {}
        chosen["drafter"] = drafter
        if self.at_an_exit(drafter):
            chosen |= {"exit_layer": exit_layer, "head": head}
        if self.takes_length(drafter):
            chosen["num_draft_tokens"] = num_draft_tokens
        return DraftConfig.of(chosen)

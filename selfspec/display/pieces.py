"""Tokens as pieces of text, each with where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from selfspec.schedule.stats import Origin, Round, Trace

Kind = Literal[Origin, "rejected"]

_LONGEST = 8  # tokens that may be held for one character; UTF-8 takes at most four bytes
_CONTEXT = 4  # tokens decoded again in front of a new one, for the space between words
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """A stretch of text that one token completed.

    Attributes:
        text: may be empty: a token that holds only part of a character shows nothing.
        kind: where the token came from; `"rejected"` for drafts that did not stand.
    """

    text: str
    kind: Kind


class Detokenizer:
    """Turns tokens into text as they come, without a second look at what was shown.

    A character that is split over tokens comes with the last of them. Joined, the pieces are what
    decoding all tokens at once gives.

    Args:
        tokenizer: the target's.
        context: tokens in front of the first one.
        skip_special_tokens: leave out end-of-text marks and the like.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: Sequence[int] = (),
        skip_special_tokens: bool = False,
    ):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.context = list(context)[-_CONTEXT:]
        self.held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self.held.append(token)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self.held) < _LONGEST:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """What is held of a character that never got its last token."""
        return self._release(self._new_text()) if self.held else ""

    def fork(self) -> Detokenizer:
        """Another one that goes on from here."""
        twin = Detokenizer(self.tokenizer, self.context, self.skip_special_tokens)
        twin.held = list(self.held)
        return twin

    def _release(self, text: str) -> str:
        self.context = [*self.context, *self.held][-_CONTEXT:]
        self.held = []
        return text

    def _new_text(self) -> str:
        before = self._decode(self.context)
        return self._decode([*self.context, *self.held])[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(tokens),
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # one sequence in, one text out
        return text


def kinds(step: Round) -> list[Kind]:
    """The kind of every token of a round, of drafts that did not stand too."""
    dropped: list[Kind] = ["rejected"] * (len(step.drafted) - step.accepted)
    return [*step.origins, *dropped]


class RoundPieces:
    """Cuts the rounds of one row into pieces, as they come.

    Args:
        tokenizer: the target's.
        context: tokens in front of the first one.
        rejected: show drafts that did not stand too, in front of what the target wrote instead.
        skip_special_tokens: leave out end-of-text marks and the like.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: Sequence[int] = (),
        *,
        rejected: bool = False,
        skip_special_tokens: bool = False,
    ):
        self.text = Detokenizer(tokenizer, context, skip_special_tokens)
        self.rejected = rejected
        self.last: Kind = "plain"

    def push(self, step: Round) -> Iterator[Piece]:
        """The pieces of a round; take them all before the next."""
        for position, (token, kind) in enumerate(zip(step.tokens, step.origins, strict=True)):
            if self.rejected and position == step.accepted:
                yield from _rejected(step.drafted[position:], self.text.fork())
            self.last = kind
            yield Piece(self.text.push(token), kind)

    def flush(self) -> Piece:
        """What is held of a character that never got its last token."""
        return Piece(self.text.flush(), self.last)


def pieces(
    trace: Trace,
    tokenizer: PreTrainedTokenizerBase,
    row: int = 0,
    *,
    rejected: bool = False,
    skip_special_tokens: bool = False,
) -> Iterator[Piece]:
    """The text of a row, token by token.

    Args:
        trace: every round of a call.
        tokenizer: the target's.
        row: the row of the call.
        rejected: show drafts that did not stand too, in front of what the target wrote instead.
        skip_special_tokens: leave out end-of-text marks and the like.
    """
    cut = RoundPieces(tokenizer, rejected=rejected, skip_special_tokens=skip_special_tokens)
    for step in trace.rows[row]:
        yield from cut.push(step)
    yield cut.flush()


def _rejected(drafts: Sequence[int], text: Detokenizer) -> Iterator[Piece]:
    for token in drafts:
        yield Piece(text.push(token), "rejected")
    yield Piece(text.flush(), "rejected")

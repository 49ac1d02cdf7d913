"""How much of the KV of a head's own layer is final."""

from __future__ import annotations

from collections.abc import Sequence


class OwnKV:
    """Per row, the number of first tokens whose KV of the head's own layer is final.

    KV is final if the layer made it of what the target computed for the token. What it made of
    masks, or of its own output in place of the target's features, is made again once the tokens
    are verified. All of this is about positions only; the KV itself is in the slots.
    """

    def __init__(self) -> None:
        self._final: list[int] = []

    def written(self, lengths: Sequence[int]) -> None:
        """The KV of the first `lengths` tokens is final: after a prompt, or a verification."""
        self._final = list(lengths)

    def rejected(self, lengths: Sequence[int]) -> None:
        """What follows the first `lengths` tokens came from rejected drafts."""
        self._final = [min(final, n) for final, n in zip(self._final, lengths, strict=True)]

    def missing(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """What the layer has to run over before it can draft.

        Args:
            lengths: per row, the position of the pending token.

        Returns:
            Per row, the position of the first token without final KV, and the number of tokens
            from it to the pending token.
        """
        starts = [min(final, n) for final, n in zip(self._final, lengths, strict=True)]
        return starts, [n - start for n, start in zip(lengths, starts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._final = [self._final[row] for row in rows]

    def join(self, other: OwnKV) -> None:
        """Append the rows of another."""
        self._final += other._final

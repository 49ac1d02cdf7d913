"""The token trace as HTML, for notebooks and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from transformers import PreTrainedTokenizerBase

from selfspec.display.pieces import Kind, Piece, kinds, pieces
from selfspec.schedule.stats import Trace

# Transparent fills (Okabe and Ito's colours) read on light and dark pages alike.
_STYLES: dict[Kind, str] = {
    "accepted": "background: rgba(0, 158, 115, .25)",
    "corrected": "background: rgba(230, 159, 0, .45)",
    "bonus": "background: rgba(0, 114, 178, .35)",
    "rejected": "opacity: .55; text-decoration: line-through",
    "plain": "",
}
_MEANINGS: dict[Kind, str] = {
    "accepted": "drafted and accepted",
    "corrected": "the target's, where a draft was rejected",
    "bonus": "the target's, after a draft that stood as a whole",
    "rejected": "drafted and rejected",
    "plain": "the target's, without a draft",
}


@dataclass(frozen=True)
class TraceHTML:
    """A piece of HTML that notebooks show by itself."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def trace_html(trace: Trace, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> TraceHTML:
    """A row's text with every token marked: accepted, rejected, corrected or bonus.

    Args:
        trace: every round of a call (`SelfSpecModel.last_trace`).
        tokenizer: the target's.
        row: the row of the call.
    """
    text = pieces_html(pieces(trace, tokenizer, row, rejected=True))
    counts: Counter[Kind] = Counter()
    for step in trace.rows[row]:
        counts.update(kinds(step))
    return TraceHTML(
        '<div style="white-space: pre-wrap; line-height: 1.7; max-width: 50em">'
        f"{text}</div>{legend_html(counts)}"
    )


def pieces_html(shown: Iterable[Piece]) -> str:
    """Pieces one behind the other, each marked with where it came from."""
    return "".join(_span(piece) for piece in shown if piece.text)


def _span(piece: Piece) -> str:
    style = _STYLES[piece.kind]
    # A line break that was never written must not break the line.
    text = escape(piece.text.replace("\n", "↵") if piece.kind == "rejected" else piece.text)
    return f'<span style="{style}" title="{piece.kind}">{text}</span>' if style else text


def legend_html(counts: Mapping[Kind, int]) -> str:
    """What the marks mean, and how many tokens have each; kinds without tokens are left out."""
    entries = (
        f'<span style="{_STYLES[kind]}">{kind}</span> {counts[kind]} ({meaning})'
        for kind, meaning in _MEANINGS.items()
        if counts.get(kind)
    )
    return f'<div style="font-size: .85em; margin-top: .6em">{"<br>".join(entries)}</div>'

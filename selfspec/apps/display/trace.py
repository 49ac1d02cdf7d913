"""The token trace as text pieces with their origin, in HTML and in terminals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.generation.streaming import RoundStreamer
from selfspec.schedule.stats import Origin, Round, Stats, Trace

Kind = Literal[Origin, "rejected"]

_CONTEXT = 4  # tokens decoded again before a new one, for the space between words
_BROKEN = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """The text of one token; empty if the token is only part of a character."""

    text: str
    kind: Kind


class Detokenizer:
    """Decodes tokens one by one.

    A character that is split over tokens comes with the last of them. The joined pieces equal the
    text of all tokens decoded together.
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
        """The text that a token completes."""
        self.held.append(token)
        text = self._new_text()
        # A character has at most four bytes; after twice as many tokens it stays broken.
        if text.endswith(_BROKEN) and len(self.held) < 8:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """The held part of an incomplete character."""
        return self._release(self._new_text()) if self.held else ""

    def fork(self) -> Detokenizer:
        """A copy that continues independently."""
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
    """The kind of every token of a round, rejected drafts included."""
    dropped: list[Kind] = ["rejected"] * (len(step.drafted) - step.accepted)
    return [*step.origins, *dropped]


class RoundPieces:
    """Turns the rounds of one row into pieces.

    With `rejected`, rejected drafts are among them, before the target's correction.
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
        """The pieces of a round; consume them before the next call."""
        for position, (token, kind) in enumerate(zip(step.tokens, step.origins, strict=True)):
            if self.rejected and position == step.accepted:
                yield from _rejected(step.drafted[position:], self.text.fork())
            self.last = kind
            yield Piece(self.text.push(token), kind)

    def flush(self) -> Piece:
        """The held part of an incomplete character."""
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

    With `rejected`, rejected drafts are in it, before the target's correction; with
    `skip_special_tokens`, end-of-text marks and the like are left out.
    """
    cut = RoundPieces(tokenizer, rejected=rejected, skip_special_tokens=skip_special_tokens)
    for step in trace.rows[row]:
        yield from cut.push(step)
    yield cut.flush()


def _rejected(drafts: Sequence[int], text: Detokenizer) -> Iterator[Piece]:
    for token in drafts:
        yield Piece(text.push(token), "rejected")
    yield Piece(text.flush(), "rejected")


_STYLES: dict[Kind, str] = {
    "accepted": "green",
    "corrected": "yellow",
    "bonus": "bright_cyan",
    "plain": "",
    "rejected": "dim strike",
}
_MARKERS: dict[Kind, tuple[str, str]] = {"corrected": ("[", "]"), "bonus": ("<", ">")}
_SPECIAL = re.compile(r"[\\\[\]<>]")
# Control codes in the output must not reach the terminal.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def marked(piece: Piece) -> str:
    r"""A piece in plain text: accepted as it is, corrected `[so]`, bonus `<so>`.

    Brackets and backslashes in the text are escaped with a backslash.
    """
    if not piece.text:
        return ""
    start, end = _MARKERS.get(piece.kind, ("", ""))
    return start + _SPECIAL.sub(r"\\\g<0>", piece.text) + end


def in_colour(console: Console) -> bool:
    """Whether the console shows colours."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def write_piece(console: Console, piece: Piece) -> None:
    """Write a piece without a newline, in colour or with markers."""
    if in_colour(console):
        console.print(_coloured(piece), end="", soft_wrap=True)
        return
    # Not through rich, which would wrap lines and expand tabs.
    console.file.write(marked(piece))
    console.file.flush()


def trace_text(trace: Trace, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> Text:
    """A row's text in colours: accepted, corrected and bonus tokens.

    Args:
        trace: every round of a call (`SelfSpecModel.last_trace`).
        tokenizer: the target's.
        row: the row of the call.
    """
    return Text().join(_coloured(piece) for piece in pieces(trace, tokenizer, row))


def legend(console: Console) -> Text:
    """The legend of colours or markers."""
    kinds: list[tuple[Kind, str]] = [
        ("accepted", "drafted and accepted"),
        ("corrected", "corrected by the target"),
        ("bonus", "bonus of the target"),
    ]
    if in_colour(console):
        return Text(" · ").join(Text(meaning, _STYLES[kind]) for kind, meaning in kinds)
    return Text(" · ".join(marked(Piece(meaning, kind)) for kind, meaning in kinds))


def _coloured(piece: Piece) -> Text:
    return Text(piece.text.translate(_VISIBLE), _STYLES[piece.kind])


class OriginStreamer(RoundStreamer):
    """Streams one row's text, each token in the colour of its origin."""

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase):
        self.console, self.tokenizer = console, tokenizer
        self.cut: RoundPieces | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt."""
        context = value.flatten().tolist()
        self.cut = RoundPieces(self.tokenizer, context, skip_special_tokens=True)

    def put_round(self, steps: Sequence[Round]) -> None:
        """Write the tokens of a round."""
        assert self.cut is not None, "the prompt comes first"
        (step,) = steps
        for piece in self.cut.push(step):
            write_piece(self.console, piece)

    def end(self) -> None:
        """Write what is left, and end the line."""
        if self.cut is not None:
            write_piece(self.console, self.cut.flush())
        self.console.file.write("\n")
        self.console.file.flush()


# Fills that read on white, for pictures.
_SVG_STYLES: dict[Kind, str] = {
    "accepted": "on #bfe7db",
    "corrected": "on #f7dc9c",
    "bonus": "on #b3d4ea",
    "plain": "",
    "rejected": "#a8a8a8 strike",
}


def trace_svg(
    trace: Trace,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    title: str = "",
    row: int = 0,
    width: int = 64,
) -> str:
    """A row's text as a picture (SVG) with every token marked, as `trace_html` marks them.

    Args:
        trace: every round of a call (`SelfSpecModel.last_trace`).
        tokenizer: the target's.
        prompt: the text in front.
        title: stands above.
        row: the row of the call.
        width: characters of a line.
    """
    shown = [piece for piece in pieces(trace, tokenizer, row, rejected=True) if piece.text]
    text = Text().append(prompt, "#666666")
    for piece in shown:
        plain = piece.text.replace("\n", "↵") if piece.kind == "rejected" else piece.text
        text.append(plain.translate(_VISIBLE), _SVG_STYLES[piece.kind])
    present = {piece.kind for piece in shown}
    named = [Text(kind, style) for kind, style in _SVG_STYLES.items() if kind in present]
    paper = Console(
        record=True, width=width, file=StringIO(), color_system="truecolor", force_terminal=True
    )
    paper.print(text, Text("  ").join(named), sep="\n\n")
    svg = paper.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME)
    # rich's fonts would be fetched from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def stats_table(stats: Stats, title: str | None = None) -> Table:
    """The statistics of a call as a small table."""
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.1f}")
    table.add_row("tokens", str(stats.emitted))
    table.add_row("rounds", str(stats.rounds))
    table.add_row("acceptance rate", f"{stats.acceptance_rate:.3f}")
    table.add_row("mean accepted length", f"{stats.mean_accepted_length:.2f}")
    for part, share in stats.time_split.items():
        table.add_row(f"time in {part}", f"{share:.1%}")
    return table


# Transparent fills (Okabe and Ito's colours) read on light and dark pages alike.
_HTML_STYLES: dict[Kind, str] = {
    "accepted": "background: rgba(0, 158, 115, .25)",
    "corrected": "background: rgba(230, 159, 0, .45)",
    "bonus": "background: rgba(0, 114, 178, .35)",
    "rejected": "opacity: .55; text-decoration: line-through",
    "plain": "",
}
_MEANINGS: dict[Kind, str] = {
    "accepted": "drafted and accepted",
    "corrected": "the target's, where a draft was rejected",
    "bonus": "the target's, after a fully accepted draft",
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
    counts: Counter[Kind] = Counter(kind for step in trace.rows[row] for kind in kinds(step))
    return TraceHTML(
        '<div style="white-space: pre-wrap; line-height: 1.7; max-width: 50em">'
        f"{text}</div>{legend_html(counts)}"
    )


def pieces_html(shown: Iterable[Piece]) -> str:
    """Pieces as HTML, each marked with its origin."""
    return "".join(_span(piece) for piece in shown if piece.text)


def _span(piece: Piece) -> str:
    style = _HTML_STYLES[piece.kind]
    # The line break of a rejected token must not break the line.
    text = escape(piece.text.replace("\n", "↵") if piece.kind == "rejected" else piece.text)
    return f'<span style="{style}" title="{piece.kind}">{text}</span>' if style else text


def legend_html(counts: Mapping[Kind, int]) -> str:
    """The legend with the number of tokens of each kind."""
    entries = (
        f'<span style="{_HTML_STYLES[kind]}">{kind}</span> {counts[kind]} ({meaning})'
        for kind, meaning in _MEANINGS.items()
        if counts.get(kind)
    )
    return f'<div style="font-size: .85em; margin-top: .6em">{"<br>".join(entries)}</div>'

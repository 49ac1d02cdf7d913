"""The token trace on a terminal, in colours, and off it, with markers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.display.pieces import Kind, Piece, RoundPieces, pieces
from selfspec.generation.streaming import RoundStreamer
from selfspec.schedule.stats import Round, Stats, Trace

_STYLES: dict[Kind, str] = {
    "accepted": "green",
    "corrected": "yellow",
    "bonus": "bright_cyan",
    "plain": "",
    "rejected": "dim strike",
}
_MARKERS: dict[Kind, tuple[str, str]] = {"corrected": ("[", "]"), "bonus": ("<", ">")}
_SPECIAL = re.compile(r"[\\\[\]<>]")
_MARK = re.compile(r"\\(.)|[\[\]<>]", re.DOTALL)
# A model may write control codes; a terminal must not obey them.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def marked(piece: Piece) -> str:
    r"""A piece in plain text: accepted as it is, corrected `[so]`, bonus `<so>`.

    Brackets and backslashes of the text itself get a backslash, so nothing is ambiguous.
    """
    if not piece.text:
        return ""
    start, end = _MARKERS.get(piece.kind, ("", ""))
    return start + _SPECIAL.sub(r"\\\g<0>", piece.text) + end


def unmarked(text: str) -> str:
    """The text without its markers: undoes `marked`."""
    return _MARK.sub(lambda match: match[1] or "", text)


def in_colour(console: Console) -> bool:
    """Whether colours can be seen there."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def write_piece(console: Console, piece: Piece) -> None:
    """Write a piece where the last one ended, in colour or with markers."""
    if in_colour(console):
        console.print(_coloured(piece), end="", soft_wrap=True)
        return
    # As it is: rich would fold long lines and expand tabs.
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
    """What the colours, or the markers, mean on that console."""
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
    """Streams one row's text, each token in the colour of its origin.

    Args:
        console: where to write.
        tokenizer: the target's.
    """

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase):
        self.console, self.tokenizer = console, tokenizer
        self.cut: RoundPieces | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt."""
        tokens = [int(token) for token in value.flatten()]
        self.cut = RoundPieces(self.tokenizer, tokens, skip_special_tokens=True)

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


def stats_table(stats: Stats, title: str | None = None) -> Table:
    """What a call did, as a small table for terminals and notebooks."""
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.1f}")
    table.add_row("tokens", f"{stats.emitted}")
    table.add_row("rounds", f"{stats.rounds}")
    table.add_row("acceptance rate", f"{stats.acceptance_rate:.3f}")
    table.add_row("mean accepted length", f"{stats.mean_accepted_length:.2f}")
    for part, share in stats.time_split.items():
        table.add_row(f"time in {part}", f"{share:.1%}")
    return table

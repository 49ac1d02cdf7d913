"""Plots and tables: predictions of every exit (logit lens), acceptance, profiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.apps.display.trace import Detokenizer
from selfspec.config import unknown_name
from selfspec.decoder import Decoder
from selfspec.heads import ExitHead, SharedHead
from selfspec.heads.teacher_forcing import draft_states, target_states
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import Profile
from selfspec.schedule.stats import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NameT = TypeVar("NameT")
MODEL = "model"  # the kind of the last row


@dataclass(frozen=True)
class ExitReadings:
    """Predictions of exits after each token of a text; it can be sliced by tokens.

    Attributes:
        kinds: kind of each row's head; `"model"` for the last row, the model itself.
        layers: number of layers below each row's exit.
        text: the text, one piece a token.
        said: per row, the most likely next token after each token, as text.
        ids: `[rows, tokens]` the same as token ids.
        probabilities: `[rows, tokens]` their probabilities.
        entropies: `[rows, tokens]` entropy of the row's distribution, in bits.
        overlaps: `[rows, tokens]` Σ min(p, q) with the model's distribution: how likely a draft
            that is drawn from the exit is to be accepted (Leviathan et al. 2023).
    """

    kinds: list[str]
    layers: list[int]
    text: list[str]
    said: list[list[str]]
    ids: Tensor
    probabilities: Tensor
    entropies: Tensor
    overlaps: Tensor

    @property
    def names(self) -> list[str]:
        """Names of the rows."""
        return [f"{kind} {layer}" for kind, layer in zip(self.kinds, self.layers, strict=True)]

    @property
    def agrees(self) -> Tensor:
        """`[rows, tokens]` whether the row predicts the model's token."""
        return self.ids == self.ids[-1]

    @property
    def settled(self) -> Tensor:
        """`[tokens]` the lowest row from which on all rows predict the model's token."""
        return len(self.ids) - self.agrees.flip(0).cumprod(0).sum(0)

    def __getitem__(self, tokens: slice) -> ExitReadings:
        """The predictions for a part of the text."""
        return replace(
            self,
            text=self.text[tokens],
            said=[row[tokens] for row in self.said],
            ids=self.ids[:, tokens],
            probabilities=self.probabilities[:, tokens],
            entropies=self.entropies[:, tokens],
            overlaps=self.overlaps[:, tokens],
        )


@torch.no_grad()
def exit_readings(
    spec: SelfSpecModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    heads: Sequence[ExitHead] | None = None,
) -> ExitReadings:
    """Predict the next token after each token of a text at every exit.

    A head that uses its own output predicts as for the first token of a draft.

    Args:
        spec: the target.
        tokenizer: the target's.
        text: the text.
        heads: the exit heads; `None` takes a `shared` head after every layer.

    Raises:
        ValueError: the text has no token, or more than the model has positions.
    """
    decoder = spec.decoder
    tokens = _encode(decoder, tokenizer, text)
    if heads is None:
        heads = [SharedHead.build(decoder, layer) for layer in range(1, decoder.depth)]
    heads = sorted(heads, key=lambda head: head.exit_layer)
    ids, *figures = read_exits(decoder, tokens, heads)
    shown, said = _in_words(tokenizer, tokens[0].tolist(), ids)
    kinds = [*(head.kind for head in heads), MODEL]
    layers = [*(head.exit_layer for head in heads), decoder.depth]
    return ExitReadings(kinds, layers, shown, said, ids, *figures)


def read_exits(decoder: Decoder, tokens: Tensor, heads: Sequence[ExitHead]) -> list[Tensor]:
    """What heads, and after them the model, predict after each token of `tokens` `[1, n]`.

    Returns:
        On the CPU, `[rows, n]` each: the most likely token, its probability, the entropy, the
        overlap with the model's distribution.
    """
    layers = [layer for head in heads for layer in head.input_layers]
    reading = target_states(decoder, tokens, None, layers)
    target_probs = _probabilities(decoder.unembed(reading.normed))
    rows: list[list[Tensor]] = []
    for head in heads:
        state = next(draft_states(decoder, head, reading, steps=1))
        logits = head.vocabulary(decoder).spread(head.logits(decoder, state), -torch.inf)
        rows.append(_figures(_probabilities(logits), target_probs))
    rows.append(_figures(target_probs, target_probs))
    return [torch.stack(column).cpu() for column in zip(*rows, strict=True)]


def _encode(decoder: Decoder, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    ids = tokenizer(text).input_ids
    most = decoder.max_positions
    if not ids or (most is not None and len(ids) > most):
        limit = "" if most is None else f" and at most the model's {most}"
        raise ValueError(f"text must have at least one token{limit}, got {len(ids)}")
    return torch.tensor([ids], device=decoder.device)


def _probabilities(logits: Tensor) -> Tensor:
    return logits[0].softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _figures(probs: Tensor, target_probs: Tensor) -> list[Tensor]:
    """Per token: the most likely one, its probability, the entropy, the overlap with the model."""
    top, ids = probs.max(-1)
    entropy = torch.special.entr(probs).sum(-1) / math.log(2)
    overlap = torch.minimum(probs, target_probs).sum(-1)
    return [ids, top, entropy, overlap]


def _in_words(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], ids: Tensor
) -> tuple[list[str], list[list[str]]]:
    """The text by tokens, and each row's predictions as text."""
    seen = Detokenizer(tokenizer)
    shown: list[str] = []
    columns: list[list[str]] = []
    for token, answers in zip(tokens, ids.T.tolist(), strict=True):
        shown.append(_next_piece(seen, token))
        seen.push(token)
        words = {answer: _next_piece(seen, answer) for answer in set(answers)}
        columns.append([words[answer] for answer in answers])
    return shown, [list(row) for row in zip(*columns, strict=True)]


def _next_piece(seen: Detokenizer, token: int) -> str:
    twin = seen.fork()
    return twin.push(token) or twin.flush()


Measure = Literal["agreement", "overlap", "entropy"]

# Okabe and Ito's colours, which colour-blind readers tell apart. Their number and that of the
# markers have no common divisor, so a pair comes again only after the 42nd line.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vP"
_LABELS: dict[Measure, str] = {
    "agreement": "predicts the model's token",
    "overlap": "overlap with the model, Σ min(p, q)",
    "entropy": "entropy (bits)",
}
_LONGEST = 9  # characters that a cell of the heat map holds
_CELL: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "parse_math": False}
_MARKS = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥"})


def acceptance_plot(by_exit: Mapping[int, Stats], ax: Axes | None = None) -> Axes:
    """Draw acceptance rate and tokens per round over the exit layer.

    Args:
        by_exit: counters of a call, or of several, per exit layer.
        ax: where to draw; `None` opens a figure, or raises ImportError without matplotlib.
    """
    ax = ax or new_axes("acceptance_plot", 6, 3.5)
    layers = sorted(by_exit)
    rates = [by_exit[layer].acceptance_rate for layer in layers]
    lengths = [by_exit[layer].mean_accepted_length for layer in layers]
    (left,) = ax.plot(layers, rates, "o-", color="#009e73", label="acceptance rate (left)")
    ax.set(xlabel="exit layer", ylabel="accepted / drafted", ylim=(0, 1))
    ax.set_xticks(layers)
    other = ax.twinx()
    (right,) = other.plot(layers, lengths, "s--", color="#0072b2", label="tokens per round (right)")
    other.set(ylabel="mean accepted length", ylim=(1, None))
    ax.legend(handles=[left, right], loc="upper left", frameon=False)
    return ax


def exits_plot(
    readings: ExitReadings, measure: Measure = "agreement", ax: Axes | None = None
) -> Axes:
    """Draw a mean over the text against the exit layer, one line per kind of head.

    Args:
        readings: predictions of the exits.
        measure: `"agreement"`, how often an exit predicts the model's token; `"overlap"`, how
            likely sampled drafts are accepted; `"entropy"`, of the exit's distribution. Another
            one is a ValueError.
        ax: where to draw; `None` opens a figure, or raises ImportError without matplotlib.
    """
    ax = ax or new_axes("exits_plot", 5, 3.5)
    means = _values(readings, measure).double().mean(1).tolist()
    rows = list(zip(readings.kinds, readings.layers, means, strict=True))
    kinds = [kind for kind in dict.fromkeys(readings.kinds) if kind != MODEL]
    for kind, style in line_styles(kinds):
        layers, values = zip(*[row[1:] for row in rows if row[0] == kind], strict=True)
        ax.plot(layers, values, **style, label=kind)
    if measure == "entropy":
        ax.axhline(means[-1], color="0.5", linestyle=":", label="the model")
    ax.set(xlabel="exit layer", ylabel=_LABELS[measure])
    ax.margins(y=0.15)
    ax.set_ylim(0, None if measure == "entropy" else 1)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    return ax


def exits_heatmap(readings: ExitReadings, ax: Axes | None = None) -> Axes:
    """Draw the predictions of every exit: one row per exit, the model on top.

    A cell shows the exit's most likely token, `·` for a space: green if the model predicts the
    same, orange if not, darker if more probable. Above the black line all rows agree.

    Args:
        readings: predictions of the exits; about twenty tokens are easy to read.
        ax: where to draw; `None` opens one that fits, or raises ImportError without matplotlib.
    """
    rows, tokens = readings.ids.shape
    ax = ax or new_axes("exits_heatmap", 2.2 + 0.66 * tokens, 1.1 + 0.28 * rows)
    _colour_cells(ax, readings)
    for row, pieces in enumerate(readings.said):
        for token, piece in enumerate(pieces):
            colour = "white" if readings.probabilities[row, token] > 0.6 else "black"
            ax.text(token, row, _short(piece), color=colour, **_CELL)
    edges = [token - 0.5 for token in range(tokens + 1)]
    ax.stairs(readings.settled.numpy() - 0.5, edges, baseline=None, color="black", linewidth=1.8)
    ax.set_yticks(range(rows), readings.names)
    words = [_short(piece) for piece in readings.text]
    ax.set_xticks(range(tokens), words, parse_math=False)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="the text; above each token, what comes next, the darker the more probable")
    return ax


def line_styles(names: Iterable[NameT]) -> Iterator[tuple[NameT, dict[str, Any]]]:
    """Every name with the colour and the marker of its line."""
    for name, colour, marker in zip(names, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
        yield name, {"color": colour, "marker": marker, "markersize": 5}


def new_axes(what: str, width: float, height: float) -> Axes:
    """Axes of a new figure of that size in inches; ImportError if matplotlib is missing."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib; pip install 'selfspec[plots]'") from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def _values(readings: ExitReadings, measure: Measure) -> Tensor:
    if measure not in _LABELS:
        raise ValueError(unknown_name("measure", measure, list(_LABELS)))
    values = {"agreement": readings.agrees, "overlap": readings.overlaps}
    return values.get(measure, readings.entropies)


def _colour_cells(ax: Axes, readings: ExitReadings) -> None:
    """Colour the cells, and draw the colour bars."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    agreeing, differing = colormaps["Greens"], colormaps["Oranges"]
    probabilities, agrees = readings.probabilities.numpy(), readings.agrees.numpy()[..., None]
    cells = np.where(agrees, agreeing(probabilities), differing(probabilities))
    ax.imshow(cells, origin="lower", aspect="auto")
    meanings = {"differs": differing, "agrees": agreeing}
    for label, colours in meanings.items():
        ax.figure.colorbar(
            ScalarMappable(cmap=colours), ax=ax, label=label, pad=0.01, fraction=0.02
        )


def _short(piece: str) -> str:
    """A piece that fits in a cell, with visible whitespace."""
    marked = piece.translate(_MARKS)
    seen = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in marked)
    return seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}…"


_SLOWER, _FASTER = COLOURS[1:3]


def speedup_table(profile: Profile) -> Table:
    """The map of speedups: a line per exit head, a column per number of drafts."""
    table = Table(
        title="speedup over plain decoding",
        caption="exit head × drafts a round; plain decoding is 1.00",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    names, lengths, speedups = _grid(profile)
    table.add_column("exit", style="bold")
    for length in lengths:
        table.add_column(f"{length} ", justify="right")
    best = max(max(row) for row in speedups)
    for name, row in zip(names, speedups, strict=True):
        table.add_row(name, *(_cell(speedup, speedup == best) for speedup in row))
    return table


def _cell(speedup: float, best: bool) -> Text:
    red, green, blue = _colour(speedup)
    style = f"black on rgb({red},{green},{blue}){' bold underline' if best else ''}"
    return Text(f" {speedup:.2f} ", style)


def _colour(speedup: float) -> tuple[int, int, int]:
    """From grey, for equal speed, to green or orange, for speeds that differ by 0.6 or more."""
    share, even = min(1.0, abs(speedup - 1) / 0.6), 235
    end = bytes.fromhex((_FASTER if speedup >= 1 else _SLOWER).removeprefix("#"))
    red, green, blue = (round(even + share * (far - even)) for far in end)
    return red, green, blue


def validation_table(profile: Profile) -> Table:
    """Drafts on held-out prompts, the fastest first."""
    table = Table(
        title="on held-out prompts",
        caption="→ is what generate() takes",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    table.add_column("draft", style="bold")
    for name in ("tokens/s", "speedup", "accepted", "tokens a round", "output"):
        table.add_column(name, justify="right")
    chosen = next((ran for ran in profile.validation if ran.draft == profile.draft), None)
    for ran in profile.validation:
        table.add_row(
            "→" if ran is chosen else "",
            ran.name,
            f"{ran.tokens_per_second:.1f}",
            f"{ran.speedup:.2f}x",
            f"{ran.acceptance_rate:.3f}",
            f"{ran.mean_accepted_length:.2f}",
            {True: "equal", False: "NOT EQUAL", None: ""}[ran.equal],
        )
    return table


def speedup_map(profile: Profile, ax: Axes | None = None) -> Axes:
    """Draw the map of speedups: an exit head in each row, numbers of drafts across.

    Without `ax` it opens a figure that fits; raises ImportError if matplotlib is missing.
    """
    names, lengths, speedups = _grid(profile)
    ax = ax or new_axes("speedup_map", 2.5 + 0.6 * len(lengths), 1.2 + 0.35 * len(names))
    cells = [[[part / 255 for part in _colour(speedup)] for speedup in row] for row in speedups]
    ax.imshow(cells, aspect="auto")
    best = max(max(row) for row in speedups)
    for y, row in enumerate(speedups):
        for x, speedup in enumerate(row):
            weight = "bold" if speedup == best else "normal"
            ax.text(x, y, f"{speedup:.2f}", ha="center", va="center", fontsize=8, weight=weight)
    ax.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    ax.set_yticks(range(len(names)), names)
    place = profile.place
    ax.set_title(f"speedup over plain decoding, {place.device}, {place.dtype}", fontsize="medium")
    ax.set(xlabel="drafts a round", ylabel="exit head")
    return ax


def _grid(profile: Profile) -> tuple[list[str], list[int], list[list[float]]]:
    """Rows, columns and values of the map; ValueError if the profile holds no measured chains."""
    speedups = {
        (ran.name.partition(" × ")[0], ran.draft.most_tokens): ran.speedup
        for ran in profile.screening
    }
    if not speedups:
        raise ValueError("the profile holds no measured chains to show; tune again")
    names = list(dict.fromkeys(name for name, _ in speedups))
    lengths = sorted({length for _, length in speedups})
    nan = float("nan")
    return names, lengths, [[speedups.get((name, k), nan) for k in lengths] for name in names]

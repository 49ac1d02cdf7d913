"""Frames of the page as HTML."""

from __future__ import annotations

from html import escape

from selfspec import DEMO_MODEL
from selfspec.apps.display.app.side_by_side import Frame, Pane, State
from selfspec.apps.display.trace import Kind, legend_html, pieces_html

CSS = (DEMO_MODEL.parent / "page.css").read_text(encoding="utf-8")

_STATES: dict[State, str] = {
    "waiting": "warming up, or waiting for another generation",
    "plain": "plain decoding",
    "speculative": "self-speculation",
    "done": "stopped",
}
_NOTHING = "–"


def figures(frame: Frame) -> str:
    """Speeds, speedup and acceptance so far."""
    ours = frame.speculative
    shown = (
        ("plain", "plain decoding, tokens/s", frame.plain.rate, "{:.1f}"),
        ("speculative", "self-speculation, tokens/s", ours.rate, "{:.1f}"),
        ("speedup", "speedup", frame.speedup, "{:.2f}x"),
        ("acceptance", "acceptance rate", ours.stats.acceptance_rate, "{:.3f}"),
        ("length", "tokens a round", ours.stats.mean_accepted_length, "{:.2f}"),
    )
    cards = (
        f'<div class="{name}{" best" if name == "speedup" and value > 1 else ""}">'
        f"<dt>{label}</dt><dd>{form.format(value) if value else _NOTHING}</dd></div>"
        for name, label, value, form in shown
    )
    return f'<dl class="side-figures">{"".join(cards)}</dl>'


def line(frame: Frame) -> str:
    """The state, or the comparison at the end."""
    ending = frame.ending
    if ending is None:
        return message(_STATES[frame.state])
    kind = "equal" if ending.equal else "wrong" if ending.exact else ""
    return message(ending.line, kind)


def message(text: str, kind: str = "") -> str:
    """A line of text; `"wrong"` marks an error."""
    return f'<div class="side-line {kind}">{escape(" ".join(text.split()))}</div>'


def pane(title: str, what: str, prompt: str, shown: Pane) -> str:
    """The output of one method after the prompt, with a legend."""
    written = pieces_html(shown.pieces)
    text = f'<span class="prompt">{escape(prompt)}</span><span class="text">{written}</span>'
    marked: dict[Kind, int] = {k: count for k, count in shown.counts.items() if k != "plain"}
    return (
        f'<div class="side-title">{title} <small>{what}</small></div>'
        f'<div class="side-pane" tabindex="0"><div>{text}</div></div>'
        f'<div class="side-legend">{legend_html(marked)}</div>'
    )

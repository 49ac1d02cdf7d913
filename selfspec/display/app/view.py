"""Frames of the page as HTML."""

from __future__ import annotations

from html import escape

from selfspec.display import Kind, legend_html, pieces_html
from selfspec.display.app.side_by_side import Frame, Pane, State

CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
.html-container { padding: 0 !important; }
.prose h2 { margin: 0 0 .1em; }
.ways-figures { display: flex; flex-wrap: wrap; gap: .8em; margin: 0; }
.ways-figures > div { flex: 1 1 8em; padding: .4em .9em; border-radius: .5em;
  border: 1px solid var(--border-color-primary); background: var(--background-fill-secondary); }
.ways-figures dt { font-size: .8em; opacity: .75; }
.ways-figures dd { margin: 0; font-size: 1.55em; font-variant-numeric: tabular-nums; }
.ways-figures .best dd { color: #009e73; font-weight: 600; }
.ways-line { min-height: 3.2em; }
.ways-line.equal::before { content: "✓ "; color: #009e73; font-weight: 700; }
.ways-line.wrong { color: #d55e00; font-weight: 600; }
.ways-pane { display: flex; flex-direction: column-reverse; height: 22em; overflow-y: auto;
  border: 1px solid var(--border-color-primary); border-radius: .5em; padding: .7em .9em;
  background: var(--background-fill-primary); }
.ways-pane > div { margin-bottom: auto !important; white-space: pre-wrap; line-height: 1.7;
  overflow-wrap: anywhere; font-family: var(--font-mono); font-size: .88em; }
.ways-pane .prompt { opacity: .55; }
.ways-title { font-weight: 600; margin-bottom: .3em; }
.ways-title small { font-weight: 400; opacity: .75; }
.ways-legend { min-height: 5em; }
"""

_STATES: dict[State, str] = {
    "waiting": "warming up, or waiting for another text to end",
    "plain": "plain decoding writes",
    "speculative": "self-speculation writes",
    "done": "stopped",
}
_NOTHING = "–"


def figures(frame: Frame | None) -> str:
    """Speeds, speedup and acceptance, as far as they can be told."""
    plain = frame.plain if frame else Pane()
    ours = frame.speculative if frame else Pane()
    speedup = frame.speedup if frame else 0.0
    shown = (
        ("plain", "plain decoding, tokens/s", plain.rate, "{:.1f}"),
        ("speculative", "self-speculation, tokens/s", ours.rate, "{:.1f}"),
        ("speedup", "speedup", speedup, "{:.2f}x"),
        ("acceptance", "acceptance rate", ours.acceptance_rate, "{:.3f}"),
        ("length", "tokens a round", ours.mean_accepted_length, "{:.2f}"),
    )
    cards = (
        f'<div class="{name}{" best" if name == "speedup" and value > 1 else ""}">'
        f"<dt>{label}</dt><dd>{form.format(value) if value else _NOTHING}</dd></div>"
        for name, label, value, form in shown
    )
    return f'<dl class="ways-figures">{"".join(cards)}</dl>'


def line(frame: Frame) -> str:
    """What is under way, or how it ended."""
    ending = frame.ending
    if ending is None:
        return message(_STATES[frame.state])
    kind = "equal" if ending.equal else "wrong" if ending.exact else ""
    return message(ending.line, kind)


def message(text: str, kind: str = "") -> str:
    """A line of text; `"wrong"` for what went wrong."""
    return f'<div class="ways-line {kind}">{escape(" ".join(text.split()))}</div>'


def pane(title: str, what: str, prompt: str = "", shown: Pane | None = None) -> str:
    """A way's text after the prompt, and what its colours mean.

    Args:
        title: the way's name.
        what: what it is, in a few words.
        prompt: the text that it goes on from.
        shown: how far it has come.
    """
    shown = shown or Pane()
    written = pieces_html(shown.pieces)
    text = f'<span class="prompt">{escape(prompt)}</span><span class="text">{written}</span>'
    marked: dict[Kind, int] = {k: count for k, count in shown.counts.items() if k != "plain"}
    return (
        f'<div class="ways-title">{title} <small>{what}</small></div>'
        f'<div class="ways-pane" tabindex="0"><div>{text}</div></div>'
        f'<div class="ways-legend">{legend_html(marked)}</div>'
    )

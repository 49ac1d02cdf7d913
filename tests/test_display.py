"""What is shown of a call is what the call wrote: traces, streams, tables, figures."""

import html
import io
import re

import pytest
from conftest import EXIT, prompt, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.display import (
    Detokenizer,
    OriginStreamer,
    Piece,
    acceptance_plot,
    marked,
    pieces,
    stats_table,
    trace_html,
    trace_text,
    unmarked,
)
from selfspec.stats import Round, Stats, Trace

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=3)
NOVELS = AutoTokenizer.from_pretrained(DEMO_MODEL)
KINDS = ("accepted", "corrected", "bonus", "plain", "rejected")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def traced(text):
    """A trace whose tokens are those of a text, drafted three at a time, all but the last kept."""
    ids = NOVELS.encode(text, add_special_tokens=False)
    blocks = [ids[i : i + 3] for i in range(0, len(ids), 3)]
    return Trace([[Round((*block[:-1], 5), len(block) - 1, block[-1]) for block in blocks]])


def written(streamer=None, rows=1):
    """A tiny target that has written something: sometimes its exit agrees with it."""
    spec = SelfSpecModel(tiny_llama("sometimes"))
    ids, mask = prompt(*[5] * rows)
    spec.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=24,
        do_sample=False,
        draft=DRAFT,
        streamer=streamer,
    )
    return spec


# Text, token by token


@given(st.text())
@settings(deadline=None)
def test_pieces_of_a_text_joined_are_the_text(text):
    ids = NOVELS.encode(text, add_special_tokens=False)
    shown = Detokenizer(NOVELS)
    assert "".join([*map(shown.push, ids), shown.flush()]) == NOVELS.decode(ids)


@given(st.lists(st.integers(0, 4095)))
@settings(deadline=None)
def test_no_token_is_held_for_ever(ids):
    shown = Detokenizer(NOVELS)
    for token in ids:
        shown.push(token)
        assert len(shown.held) < 8
    shown.flush()
    assert not shown.held


def test_a_split_character_comes_with_its_last_token():
    ids = NOVELS.encode("🦉", add_special_tokens=False)
    shown = Detokenizer(NOVELS)
    assert [shown.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🦉"]
    assert len(ids) > 1


@pytest.mark.parametrize(
    "text", ["one two  three\n\nfour", "naïve 🦉🦉 – «quoted»", "a < b & c > d"]
)
def test_a_trace_shows_its_text_with_and_without_rejected_drafts(text):
    trace = traced(text)
    plain = list(pieces(trace, NOVELS))
    every = list(pieces(trace, NOVELS, rejected=True))
    assert "".join(piece.text for piece in plain) == text
    assert [piece for piece in every if piece.kind != "rejected"] == plain
    assert [piece.kind for piece in plain[:-1]] == trace.origins()
    assert trace_text(trace, NOVELS).plain == text


# Markers and colours


@given(st.lists(st.builds(Piece, st.text(), st.sampled_from(KINDS))))
def test_markers_can_be_taken_away_again(shown):
    assert unmarked("".join(map(marked, shown))) == "".join(piece.text for piece in shown)


def test_each_origin_has_its_marker():
    assert [marked(Piece("so", kind)) for kind in KINDS[:4]] == ["so", "[so]", "<so>", "so"]
    assert marked(Piece("a[0]", "accepted")) == r"a\[0\]"


def test_a_stream_shows_every_token_with_the_origin_that_the_trace_gives_it(tokenizer):
    paper = io.StringIO()
    spec = written(OriginStreamer(Console(file=paper), tokenizer))
    shown = "".join(map(marked, pieces(spec.last_trace, tokenizer)))
    assert paper.getvalue() == shown + "\n"
    assert {"accepted", "corrected", "bonus"} <= set(spec.last_trace.origins())


def test_a_terminal_gets_the_same_text_in_colours(tokenizer):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=20)
    spec = written(OriginStreamer(console, tokenizer))
    text = tokenizer.decode(spec.last_trace.tokens(), clean_up_tokenization_spaces=False)
    assert ANSI.sub("", screen.getvalue()) == text + "\n"
    assert {"\x1b[32m", "\x1b[33m", "\x1b[96m"} <= set(ANSI.findall(screen.getvalue()))


def test_a_terminal_obeys_no_control_code_of_the_text():
    assert trace_text(traced("a\x1b[2Jb"), NOVELS).plain == "a␛[2Jb"


# HTML


@pytest.mark.parametrize(
    "text", ["line one\n  line two", "<script>alert('&amp;')</script>", "🦉 ï"]
)
def test_html_shows_the_text_and_nothing_of_it_is_markup(text):
    page = trace_html(traced(text), NOVELS)._repr_html_()
    body = page[page.index(">") + 1 : page.index("</div>")]
    kept = re.sub(r'<span [^>]*title="rejected">.*?</span>', "", body, flags=re.DOTALL)
    assert html.unescape(re.sub(r"</?span[^>]*>", "", kept)) == text


def test_the_legend_counts_what_the_trace_holds():
    spec = written()
    page = trace_html(spec.last_trace, NOVELS).html
    counts = dict(re.findall(r">(\w+)</span> (\d+) \(", page))
    origins = spec.last_trace.origins()
    expected = {kind: origins.count(kind) for kind in ("accepted", "corrected", "bonus", "plain")}
    expected["rejected"] = spec.last_stats.drafted - spec.last_stats.accepted
    assert counts == {kind: str(n) for kind, n in expected.items() if n}


def test_any_row_can_be_shown(tokenizer):
    trace = written(rows=3).last_trace
    texts = [trace_text(trace, tokenizer, row).plain for row in range(3)]
    assert texts == [tokenizer.decode(trace.tokens(row)) for row in range(3)]


# Tables and figures


def test_the_table_shows_the_counters():
    stats = written().last_stats
    paper = io.StringIO()
    Console(file=paper).print(stats_table(stats, "tiny"))
    for figure in (f"{stats.acceptance_rate:.3f}", f"{stats.mean_accepted_length:.2f}", "24"):
        assert figure in paper.getvalue()


def test_the_plot_draws_what_the_counters_say(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    by_exit = {4: Stats(2, 8, 6, 10), 1: Stats(5, 10, 2, 10)}
    ax = acceptance_plot(by_exit)
    (line,) = ax.lines
    assert line.get_xydata().tolist() == [[1, 0.2], [4, 0.75]]

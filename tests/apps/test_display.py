"""What is shown of a call is what the call wrote: traces, streams, tables, figures."""

import html
import io
import math
import re

import pytest
import torch
from cli_tools import unmarked
from conftest import EXIT, VOCAB, prompt, tiny_llama
from families import build
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.apps.display import (
    OriginStreamer,
    acceptance_plot,
    exit_readings,
    exits_heatmap,
    exits_plot,
    stats_table,
    trace_html,
    trace_text,
)
from selfspec.apps.display.trace import Detokenizer, Piece, marked, pieces
from selfspec.heads import FusedHead, LensHead, SharedHead
from selfspec.schedule.stats import Round, Stats, Trace

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


# Exits over a text

TEXT = "the cat sat on the mat; a dog barks"
BODIES = {"llama": ("model", "norm"), "gpt2": ("transformer", "ln_f")}


def exits_of(tokenizer, text=TEXT, family="llama", heads=None, **options):
    model = build(family, "eager", **options).double().eval()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    spec = SelfSpecModel(model)
    made = [make(spec.decoder) for make in heads] if heads else None
    return spec, exit_readings(spec, tokenizer, text, made)


@pytest.mark.parametrize("family", BODIES)
def test_rows_are_what_a_norm_and_the_lm_head_make_of_each_layer(family, tokenizer):
    spec, readings = exits_of(tokenizer, family=family)
    model, (body, norm) = spec.model, BODIES[family]
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        normed = [getattr(getattr(model, body), norm)(h) for h in output.hidden_states[1:-1]]
        logits = torch.cat([*map(model.lm_head, normed), output.logits])
    assert readings.ids.equal(logits.argmax(-1))
    assert readings.layers == [1, 2, 3, 4, 5]
    probs, target = logits.softmax(-1), output.logits.softmax(-1)
    bits = torch.distributions.Categorical(probs).entropy() / math.log(2)
    torch.testing.assert_close(readings.probabilities, probs.amax(-1))
    torch.testing.assert_close(readings.entropies, bits)
    torch.testing.assert_close(readings.overlaps, torch.minimum(probs, target).sum(-1))


def test_a_row_agrees_wherever_the_layers_above_add_nothing(tokenizer):
    _, readings = exits_of(tokenizer, agreement=0.0)
    assert readings.agrees[1:].all() and not readings.agrees[0].all()
    assert readings.settled.tolist() == [0 if agrees else 1 for agrees in readings.agrees[0]]
    torch.testing.assert_close(readings.overlaps[1:], torch.ones_like(readings.overlaps[1:]))


def test_from_the_settled_row_on_all_rows_agree_and_the_one_below_does_not(tokenizer):
    _, readings = exits_of(tokenizer, agreement=0.3)
    for token, row in enumerate(readings.settled.tolist()):
        assert readings.agrees[row:, token].all()
        assert row == 0 or not readings.agrees[row - 1, token]
    assert len(readings.settled.unique()) > 1


def test_fitted_heads_stand_at_their_exits_and_start_as_the_shared_one(tokenizer):
    kept = torch.arange(0, VOCAB, 2)
    heads = [
        lambda decoder: LensHead.build(decoder, 3),
        lambda decoder: SharedHead.build(decoder, 3),
        lambda decoder: FusedHead.build(decoder, 0, feature_layers=[1, 2]),
        lambda decoder: trimmed(SharedHead.build(decoder, 2), decoder, kept),
    ]
    _, readings = exits_of(tokenizer, heads=heads)
    assert readings.names == ["fused 0", "shared 2", "lens 3", "shared 3", "model 5"]
    assert readings.ids[2].equal(readings.ids[3])
    assert torch.isin(readings.ids[1], kept).all()
    assert readings.entropies[1].max() <= math.log2(len(kept)) and readings.overlaps[1].max() < 1


def trimmed(head, decoder, kept):
    head.trim(decoder, kept)
    return head


@pytest.mark.parametrize("text", ["naïve 🦉🦉 – «quoted»", "one  two\n\nthree"])
def test_the_text_comes_in_pieces_and_what_is_said_reads_on_from_it(text):
    spec = SelfSpecModel(tiny_llama(vocab_size=len(NOVELS)))
    readings = exit_readings(spec, NOVELS, text)
    ids = NOVELS.encode(text)
    decoded = [NOVELS.decode(ids[: n + 1]) for n in range(len(ids))]
    for n, said in enumerate(readings.said[-1]):
        assert NOVELS.decode([*ids[: n + 1], int(readings.ids[-1, n])]).endswith(said)
        assert decoded[n].endswith(readings.text[n])
    if text.isascii():
        assert "".join(readings.text) == text


def test_a_slice_is_a_part_of_the_text_read_in_all_of_it(tokenizer):
    _, readings = exits_of(tokenizer)
    part = readings[3:7]
    assert part.text == readings.text[3:7] and part.names == readings.names
    assert part.said == [row[3:7] for row in readings.said]
    for name in ("ids", "probabilities", "entropies", "overlaps", "agrees"):
        assert getattr(part, name).equal(getattr(readings, name)[:, 3:7])


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a" * 97, 97)])
def test_a_text_that_cannot_be_read_is_refused(text, count, tokenizer):
    with pytest.raises(ValueError, match=f"at most the model's 96, got {count}"):
        exits_of(tokenizer, text)


# Tables and figures


def test_the_table_shows_the_counters():
    stats = written().last_stats
    paper = io.StringIO()
    Console(file=paper).print(stats_table(stats, "tiny"))
    for figure in (f"{stats.acceptance_rate:.3f}", f"{stats.mean_accepted_length:.2f}", "24"):
        assert figure in paper.getvalue()


@pytest.fixture
def paper(monkeypatch):
    """Where figures are drawn without a screen, and go when the test ends."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")


@pytest.mark.usefixtures("paper")
def test_the_plot_draws_what_the_counters_say():
    by_exit = {4: Stats(2, 8, 6, 10), 1: Stats(5, 10, 2, 10)}
    ax = acceptance_plot(by_exit)
    (line,) = ax.lines
    assert line.get_xydata().tolist() == [[1, 0.2], [4, 0.75]]


@pytest.mark.usefixtures("paper")
def test_the_heat_map_shows_what_every_exit_says(tokenizer):
    _, readings = exits_of(tokenizer, agreement=0.3)
    ax = exits_heatmap(readings)
    shown = [cell.get_text().replace("·", " ").replace("↵", "\n") for cell in ax.texts]
    assert shown == [piece for row in readings.said for piece in row]
    assert [label.get_text() for label in ax.get_yticklabels()] == readings.names
    (image,) = ax.images
    green = image.get_array()[..., 1] > image.get_array()[..., 0]
    sure = readings.probabilities > 0.1  # the palest shades are all but white
    assert (torch.from_numpy(green) == readings.agrees)[sure].all()
    ax.figure.canvas.draw()


@pytest.mark.usefixtures("paper")
def test_the_heat_map_makes_every_token_visible():
    spec = SelfSpecModel(tiny_llama(vocab_size=len(NOVELS)))
    ax = exits_heatmap(exit_readings(spec, NOVELS, "$x$\n\x1b[0m $y$ incomprehensibilities"))
    words = [label.get_text() for label in ax.get_xticklabels()]
    assert all(word.isprintable() and 0 < len(word) <= 9 for word in words)
    assert {"↵", r"\x1b"} <= set(words)
    ax.figure.canvas.draw()


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(
    ("measure", "figures"),
    [("agreement", "agrees"), ("overlap", "overlaps"), ("entropy", "entropies")],
)
def test_the_plot_of_exits_draws_means_over_the_text(measure, figures, tokenizer):
    heads = [lambda d, e=e: SharedHead.build(d, e) for e in (1, 2, 3)]
    heads.append(lambda d: LensHead.build(d, 2))
    _, readings = exits_of(tokenizer, heads=heads)
    ax = exits_plot(readings, measure)
    means = getattr(readings, figures).double().mean(1)
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert list(lines["shared"]) == [means[0], means[1], means[3]]
    assert list(lines["lens"]) == [means[2]]


def test_an_unknown_measure_is_named(tokenizer):
    _, readings = exits_of(tokenizer)
    with pytest.raises(ValueError, match="unknown measure: 'entropi'; did you mean 'entropy'"):
        exits_plot(readings, "entropi")

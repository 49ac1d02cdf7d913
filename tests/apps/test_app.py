"""What the page of `selfspec app` shows, without Gradio: frames, choices, their HTML."""

import re
import sys
import threading
from itertools import pairwise

import pytest
from cli_tools import PROMPT, TOKENS, altered, call
from conftest import EXIT, greedy, tiny_llama

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.display.app import DraftMenu, SideBySide, view
from selfspec.apps.display.app.side_by_side import LONGEST_DRAFT, Frame, Pane
from selfspec.apps.display.demo import Comparison, DemoOptions
from selfspec.apps.display.trace import pieces
from selfspec.heads import head_class

DRAFT = DraftConfig(exit_layer=EXIT, num_draft_tokens=3)


@pytest.fixture
def side(tokenizer):
    found = SideBySide(SelfSpecModel(tiny_llama("sometimes")), tokenizer, interval=0.002)
    yield found
    found.close()


def options(**given):
    return DemoOptions(**{"draft": DRAFT, "max_new_tokens": TOKENS} | given)


def frames(side, prompt=PROMPT, stop=None, rejected=False, **given):
    return list(side.write(prompt, options(**given), stop or threading.Event(), rejected))


def text(pane):
    return "".join(piece.text for piece in pane.pieces)


# Frames


def test_both_ways_are_shown_as_they_go_one_behind_the_other(side, tokenizer):
    seen = frames(side)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    written = greedy(side.spec.model, ids, max_new_tokens=TOKENS)[0, ids.shape[1] :]
    last = seen[-1]
    assert text(last.plain) == text(last.speculative) == tokenizer.decode(written)
    assert last.ending == (f"both outputs are equal, all {TOKENS} tokens", True, True)
    assert list(dict.fromkeys(frame.state for frame in seen)) == [
        "waiting",
        "plain",
        "speculative",
        "done",
    ]
    for before, after in pairwise(seen):
        assert text(after.plain).startswith(text(before.plain))
        assert text(after.speculative).startswith(text(before.speculative))
        assert after.state not in ("waiting", "plain") or not after.speculative.pieces


@pytest.mark.parametrize("rejected", [False, True])
def test_figures_and_colours_are_those_of_the_call(side, tokenizer, rejected):
    ours = frames(side, rejected=rejected)[-1].speculative
    stats, trace = side.spec.last_stats, side.spec.last_trace
    assert ours.stats.emitted == stats.emitted == TOKENS
    assert ours.stats.acceptance_rate == stats.acceptance_rate
    assert ours.stats.mean_accepted_length == stats.mean_accepted_length
    assert ours.counts["accepted"] == stats.accepted > 0
    assert ours.counts["rejected"] == stats.drafted - stats.accepted > 0
    traced = pieces(trace, tokenizer, rejected=rejected, skip_special_tokens=True)
    assert [piece.kind for piece in ours.pieces] == [piece.kind for piece in traced]


def lasting(write, seconds):
    """A way to write that says it took so long."""
    return lambda *args, **options: write(*args, **options)._replace(seconds=seconds)


def test_the_speedup_is_that_of_the_whole_calls(side, monkeypatch):
    monkeypatch.setattr(Comparison, "plain", lasting(Comparison.plain, 6.0))
    monkeypatch.setattr(Comparison, "speculative", lasting(Comparison.speculative, 2.0))
    last = frames(side)[-1]
    assert (last.plain.rate, last.speculative.rate) == (TOKENS / 6, TOKENS / 2)
    assert last.speedup == pytest.approx(3)
    shown = view.figures(last)
    assert "<dd>2.0</dd>" in shown and "<dd>6.0</dd>" in shown and "<dd>3.00x</dd>" in shown
    assert f"<dd>{last.speculative.stats.acceptance_rate:.3f}</dd>" in shown
    assert view.figures(Frame("waiting", "")).count("<dd>–</dd>") == 5


@pytest.mark.parametrize("drafter", DraftMenu(SelfSpecModel(tiny_llama()), DraftConfig()).drafters)
def test_whatever_can_be_chosen_writes_the_same_text(side, drafter):
    offer = DraftMenu(side.spec, DRAFT)
    draft = offer.draft(drafter, EXIT, "shared", offer.length_of(drafter))
    assert frames(side, draft=draft)[-1].ending.equal is True


def test_sampled_texts_are_not_compared(side):
    last = frames(side, temperature=1.0)[-1]
    assert last.ending.equal is None
    assert last.plain.stats.emitted == last.speculative.stats.emitted == TOKENS
    assert 'class="side-line "' in view.line(last)


def test_texts_that_differ_where_they_must_not_are_said_to_be_wrong(side, monkeypatch):
    plain = Comparison.plain
    changed = altered(lambda self, count=None: plain(self, count))
    monkeypatch.setattr(Comparison, "plain", lambda self, count=None, **_: changed(self, count))
    last = frames(side)[-1]
    assert last.ending.equal is False
    assert 'class="side-line wrong">NOT EQUAL: the outputs differ' in view.line(last)


# Stopping, and others who ask


@pytest.mark.parametrize("way", ["plain", "speculative"])
def test_a_stop_ends_a_text_where_it_is(side, way):
    stop, seen = threading.Event(), []
    for frame in side.write(PROMPT, options(max_new_tokens=100), stop):
        seen.append(frame)
        if getattr(frame, way).stats.emitted >= 5:
            stop.set()
    last = seen[-1]
    assert last.ending is None and "stopped" in view.line(last)
    assert 5 <= getattr(last, way).stats.emitted < 100
    other, count = (last.speculative, 0) if way == "plain" else (last.plain, 100)
    assert other.stats.emitted == count
    assert frames(side)[-1].ending.equal is True


def test_whoever_leaves_stops_the_text(side):
    stop = threading.Event()
    watching = side.write(PROMPT, options(max_new_tokens=100), stop)
    next(watching)
    watching.close()
    assert stop.is_set()
    assert frames(side)[-1].ending.equal is True


def test_texts_are_written_one_after_the_other(side, monkeypatch):
    order = []

    def noted(write):
        def noting(self, *args, **kwargs):
            order.append((self.prompt, "begins"))
            try:
                return write(self, *args, **kwargs)
            finally:
                order.append((self.prompt, "ends"))

        return noting

    for name in ("plain", "speculative"):
        monkeypatch.setattr(Comparison, name, noted(getattr(Comparison, name)))
    prompts = ["the cat", "on the mat"]
    readers = [threading.Thread(target=frames, args=(side, prompt)) for prompt in prompts]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    first, second = order[0][0], order[-1][0]
    turn = ["begins", "ends"] * 4  # both ways warm up
    assert {first, second} == set(prompts)
    assert order == [(who, what) for who in (first, second) for what in turn]


def test_a_reader_who_waits_can_leave(side, monkeypatch):
    plain, go_on = Comparison.plain, threading.Event()

    def held(self, *args, **kwargs):
        go_on.wait(60)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Comparison, "plain", held)
    first = side.write("the cat", options(), threading.Event())
    assert next(first).state == "waiting"
    stop = threading.Event()
    stop.set()
    states = [frame.state for frame in side.write(PROMPT, options(), stop)]
    assert states[-1] == "done" and set(states[:-1]) == {"waiting"}
    go_on.set()
    *_, last = first
    assert last.ending.equal is True


def test_a_closed_page_writes_no_more(side):
    watching = side.write(PROMPT, options(max_new_tokens=100), threading.Event())
    next(watching)
    side.close()
    *_, last = watching
    assert last.state == "done" and last.ending is None


# Mistakes


@pytest.mark.parametrize(
    ("prompt", "given", "says"),
    [
        (" \n", {}, "an empty prompt"),
        (PROMPT, {"max_new_tokens": 120}, r"has \d+ tokens, with 120 new ones it outgrows .* 128"),
        (PROMPT, {"draft": {"exit_layer": 9}}, r"exit_layer must be in \[1, 3\], got 9"),
        (PROMPT, {"draft": {"head": "block", "exit_layer": 1}}, "no 'block' head was fitted"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(side, prompt, given, says):
    seen = []
    with pytest.raises(ValueError, match=says):
        seen.extend(side.write(prompt, options(**given), threading.Event()))
    assert all(frame.state == "waiting" for frame in seen)
    assert frames(side)[-1].ending.equal is True


# Choices


@pytest.fixture
def fitted():
    """A target with heads at 2 and at 1."""
    model = tiny_llama("sometimes")
    decoder = SelfSpecModel(model).decoder
    heads = [head_class(kind).build(decoder, at) for kind, at in [("lens", 2), ("block", 2)]]
    return SelfSpecModel(model, heads=[*heads, head_class("lens").build(decoder, 1)])


def test_heads_are_offered_where_they_were_fitted_and_shared_everywhere(fitted):
    offer = DraftMenu(fitted, DraftConfig())
    assert (offer.exits, offer.exit_layer) == ([1, 2, 3], 2)
    kinds = {layer: offer.heads(layer) for layer in offer.exits}
    assert kinds == {1: ["lens", "shared"], 2: ["lens", "block", "shared"], 3: ["shared"]}
    assert DraftMenu(fitted, DraftConfig(exit_layer=2, head="block")).heads(2)[0] == "block"


def test_a_draft_has_what_its_drafter_heeds(fitted):
    offer = DraftMenu(fitted, DraftConfig(schedule="confidence", confidence=0.7))
    assert offer.draft("early_exit", 2, "block", 5) == DraftConfig(
        exit_layer=2, head="block", num_draft_tokens=5, schedule="confidence", confidence=0.7
    )
    lookup = DraftConfig(drafter="prompt_lookup", num_draft_tokens=5)
    assert offer.draft("prompt_lookup", 2, "block", 5) == lookup
    assert offer.draft("auto", 2, "block", 5) == DraftConfig(drafter="auto")
    assert offer.length_of("prompt_lookup") == LONGEST_DRAFT


def test_a_draft_model_is_offered_where_it_was_named(fitted):
    assert not {"two_model", "none"} & set(DraftMenu(fitted, DraftConfig()).drafters)
    named = DraftConfig(drafter="two_model", draft_model="smaller")
    offer = DraftMenu(fitted, named)
    assert "two_model" in offer.drafters
    assert offer.draft("two_model", 2, "lens", 4).draft_model == "smaller"
    assert offer.draft("tree", 2, "lens", 4).draft_model is None


# HTML


def test_what_was_typed_is_text(side):
    prompt = "<b>the</b> & the"
    shown = view.pane("plain", "it", prompt, Pane())
    assert "&lt;b&gt;the&lt;/b&gt; &amp; the" in shown and "<b>the" not in shown
    assert "&lt;i&gt; a" in view.message("<i>\n a")


def test_accepted_tokens_are_coloured(side):
    last = frames(side)[-1]
    shown = view.pane("ours", "it", last.prompt, last.speculative)
    written = shown.partition('class="text">')[2].partition("</div>")[0]
    marked = re.findall(r'<span style="[^"]+" title="(\w+)">', written)
    assert marked == [
        piece.kind for piece in last.speculative.pieces if piece.kind != "plain" and piece.text
    ]
    assert f"{last.speculative.counts['accepted']} (drafted and accepted)" in shown


# Without Gradio


def test_a_missing_gradio_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "selfspec.apps.display.app.page", raising=False)
    result = call("app", "--no-open", "--json", code=1)
    said = "selfspec: the page needs Gradio: pip install 'selfspec[app]'\n"
    assert (result.stdout, result.stderr) == ("", said)

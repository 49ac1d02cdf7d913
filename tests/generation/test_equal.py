"""Equality: greedy text is the model's own, over drafter x head x batch x cache x processor.

Lookups foresee most of the text, so that their drafts are right in most places and wrong in some.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from conftest import EXIT, VOCAB, ContraryHead, equal_to_generate, gates, greedy, prompt, tiny_llama
from drafter_tools import BRANCHING, CHAINS, DRAFTS, FAMILIES, STEADY, draft, tree
from families import ALL_ROWS, CASES_BY_FAMILY, LONG_ROW, model_of, own_text, prompts
from head_tools import KINDS, own_head
from lookup_tools import foresee, foresee_ngrams
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from selfspec import SelfSpecModel

IDS, MASK = prompt(4, 9, 6)
ONE, ONES = IDS[1:2], MASK[1:2]
NEW = 12
PROCESSORS = {
    "one row": ("none", "penalties", "first token ends", "rows end apart", "stop strings"),
    "ragged": ("none", "penalties", "first token ends", "rows end apart"),
    "padded on the right": ("rows end apart",),
}
HEADS = {
    f"{drafter} {kind}{' trimmed' if trimmed else ''}": (drafter, kind, trimmed)
    for drafter in ("early_exit", "tree")
    for kind in KINDS
    for trimmed in (False, True)
}
HOW = [*DRAFTS, *HEADS, "contrary"]


@cache
def model():
    return tiny_llama("sometimes")


@cache
def small():
    """The target's first layers: sometimes right."""
    made = tiny_llama(num_hidden_layers=2)
    made.load_state_dict(model().state_dict(), strict=False)
    return made


@pytest.fixture(scope="session")
def drafting():
    """`drafting(how)`: the target, wrapped once for each way to draft, and the draft."""

    @cache
    def made(how):
        if how in DRAFTS:
            other = {"two_model": small, "itself": model}.get(how)
            return SelfSpecModel(model(), draft_model=other and other()), DRAFTS[how]
        spec = SelfSpecModel(model())
        if how == "contrary":
            spec.engine.add(ContraryHead.build(spec.decoder, EXIT))
            return spec, draft("early_exit", exit_layer=EXIT, head="contrary", num_draft_tokens=4)
        drafter, kind, trimmed = HEADS[how]
        head = own_head(spec.decoder, kind, EXIT, trimmed=trimmed)
        spec.engine.add(head)
        options = {"head": head.kind, "exit_layer": head.exit_layer}
        four = draft("early_exit", num_draft_tokens=4, **options)
        return spec, four if drafter == "early_exit" else tree(9, **options)

    return made


class Heard(BaseStreamer):
    """Keeps every token that it is shown."""

    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@cache
def free(rows):
    """What the model goes on with when nothing stops it."""
    ids, mask = (IDS, MASK) if rows == 3 else (ONE, ONES)
    return greedy(model(), ids, mask, max_new_tokens=NEW)[:, ids.shape[1] :]


def options_of(processor, rows, tokenizer):
    text = free(rows)
    unused = min(set(range(1, VOCAB)) - set(text.flatten().tolist()))
    return {"max_new_tokens": NEW} | {
        "none": {},
        "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        "first token ends": {"eos_token_id": int(text[0, 0])},
        "rows end apart": {"eos_token_id": [int(text[0, 4]), int(text[-1, 7])]},
        # With an end that no row writes, plain decoding pads rows that ended.
        "stop strings": {
            "stop_strings": [tokenizer.decode(text[0, 5:7]), tokenizer.decode(text[-1, 6:8])],
            "tokenizer": tokenizer,
            "eos_token_id": unused,
        },
    }[processor]


@pytest.fixture(scope="session")
def own_texts():
    """The model's own texts, by processor and number of rows."""
    return {}


def padded_on_the_right(ids, mask):
    """The same rows, with their padding behind them."""
    shifts = (mask == 0).sum(-1).tolist()
    moved = [[row.roll(-by) for row, by in zip(p, shifts, strict=True)] for p in (ids, mask)]
    return [torch.stack(rows) for rows in moved]


@pytest.mark.matrix(share=3)
@pytest.mark.parametrize("batch", PROCESSORS)
@pytest.mark.parametrize("how", HOW)
def test_with_any_processor(drafting, own_texts, how, batch, tokenizer, monkeypatch):
    spec, draft = drafting(how)
    rows = 1 if batch == "one row" else 3
    ids, mask = given = (ONE, ONES) if rows == 1 else (IDS, MASK)
    width, rates = ids.shape[1], []
    if batch == "padded on the right":
        ids, mask = padded_on_the_right(ids, mask)
    for processor in PROCESSORS[batch]:
        options, heard = options_of(processor, rows, tokenizer), Heard()
        if (processor, rows) not in own_texts:
            own_texts[processor, rows] = greedy(model(), *given, **options)
        expected = own_texts[processor, rows]
        options |= {"streamer": heard} if rows == 1 else {}
        with monkeypatch.context() as patch:
            foresee(patch, expected.tolist(), wrong=7)
            foresee_ngrams(patch, expected.tolist(), wrong=7)
            text = spec.generate(ids, attention_mask=mask, do_sample=False, draft=draft, **options)
        assert torch.equal(text[:, width:], expected[:, width:]), processor
        assert torch.equal(text[:, :width], ids)
        assert rows > 1 or (heard.tokens == text[0].tolist() and heard.ended == 1)
        rates += [spec.last_stats.acceptance_rate] if spec.last_stats.drafted else []
    assert gates(model()) == []
    assert batch == "one row" or 0 in expected[:, width:], "rows should end apart"
    assert how != "itself" or set(rates) <= {1}
    assert how != "contrary" or (set(rates) == {0} and spec.last_stats.mean_accepted_length == 1)


@pytest.mark.matrix(share=3)
@pytest.mark.parametrize("how", [*STEADY, *HEADS, "contrary"])
def test_a_prompt_in_chunks(drafting, how):
    """Drafts, too, are what they would be."""
    (spec, draft), traces = drafting(how), []
    for chunk in (None, 1, 4):
        text = spec.generate(
            IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft, prefill_chunk_size=chunk
        )
        assert torch.equal(text[:, IDS.shape[1] :], free(3))
        traces.append(spec.last_trace)
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.matrix(share=3)
@pytest.mark.parametrize("cache", ["SlotCache", "DynamicCache"])
@pytest.mark.parametrize("how", HOW)
def test_a_cache_goes_from_one_drafter_to_the_next(drafting, how, cache):
    """A drafter that has not seen the earlier turn starts in the middle of the text."""
    spec, own = drafting(how)
    ids, mask = (IDS, MASK) if cache == "SlotCache" else (ONE, ONES)
    kept = DynamicCache(config=model().config) if cache == "DynamicCache" else None
    new = ids
    for turn, how in enumerate((own, draft("early_exit", exit_layer=1, head="shared"), own, own)):
        out = spec.generate(
            new,
            attention_mask=mask,
            max_new_tokens=5,
            draft=how,
            past_key_values=kept,
            return_dict_in_generate=True,
        )
        expected = greedy(model(), ids, mask, max_new_tokens=5)
        assert torch.equal(out.sequences[:, -5:], expected[:, -5:]), turn
        kept = out.past_key_values
        more = prompt(*[3] * len(ids), seed=turn)[0]
        ids = torch.cat([expected, more], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
        # In the third turn only what the cache does not hold is given.
        new = ids[:, -4:] if turn == 1 else ids


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["fixed", "confidence", "optimal"])
@pytest.mark.parametrize("drafter", CHAINS)
@pytest.mark.parametrize("agreement", ["seldom", "sometimes", "always"])
def test_under_any_schedule(drafter, schedule, agreement):
    spec = SelfSpecModel(tiny_llama(agreement), draft_model=tiny_llama(agreement, seed=1))
    equal_to_generate(spec, IDS, MASK, max_new_tokens=24, draft=draft(drafter, schedule=schedule))


@cache
def family(name):
    target = model_of(name, CASES_BY_FAMILY[name], 0.3)
    return target, own_text(target, *prompts("left"))


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("how", DRAFTS)
def test_on_any_family(how, name, monkeypatch):
    target, expected = family(name)
    near = model_of(name, CASES_BY_FAMILY[name], 0.5) if how == "two_model" else target
    spec = SelfSpecModel(target, draft_model=near if DRAFTS[how].drafter == "two_model" else None)
    if spec.decoder.counts_keys and how in BRANCHING:
        with pytest.raises(ValueError, match=r"index of a key|name the sublayers"):
            spec.generate(prompts("left")[0][LONG_ROW], draft=DRAFTS[how], max_new_tokens=2)
        return
    foresee(monkeypatch, expected.tolist(), wrong=6)
    foresee_ngrams(monkeypatch, expected.tolist())
    (tokens, mask), count, accepted, drafted = prompts("left"), expected.shape[1], 0, 0
    for rows in (LONG_ROW, ALL_ROWS):
        out = spec.generate(
            tokens[rows],
            attention_mask=mask[rows],
            max_new_tokens=count,
            do_sample=False,
            draft=DRAFTS[how],
        )
        assert torch.equal(out[:, -count:], expected[rows])
        accepted += spec.last_stats.accepted
        drafted += spec.last_stats.drafted
    assert gates(target) == []
    assert how != "itself" or accepted == drafted
    assert how == "none" or how not in STEADY or 0 < accepted < drafted

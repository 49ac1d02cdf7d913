"""The earliest stop inside a block of accepted drafts wins, and only kept tokens count."""

import time

import pytest
import torch
from conftest import EXIT, VOCAB, equal_to_generate, greedy, prompt, tiny_llama
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import SelfSpecModel

DRAFT = {"exit_layer": EXIT, "num_draft_tokens": 6}
LENGTH = 24
always = tiny_llama("always")
sometimes = tiny_llama("sometimes")
TARGETS = pytest.mark.parametrize("target", [always, sometimes], ids=["always", "sometimes"])
BATCHES = pytest.mark.parametrize("lengths", [(5,), (3, 9, 6)], ids=["one", "three"])


class StopAt(StoppingCriteria):
    """Stops a row where its text has some length, and notes every call."""

    def __init__(self, *lengths, sums=None):
        self.lengths, self.sums, self.calls = lengths, sums, []

    def __call__(self, input_ids, scores, **kwargs):
        seen = None if scores is None else torch.stack(scores)
        self.calls.append((input_ids.clone(), seen))
        if self.sums is not None:
            return (input_ids[:, -3:].sum(-1) % self.sums) == 0
        limits = torch.tensor(self.lengths).expand(input_ids.shape[0])
        return input_ids.shape[1] >= limits


def both(target, lengths, seed=1, **options):
    """(the model's own output, ours, the wrapper) of the same call."""
    ids, mask = prompt(*lengths, seed=seed)
    options = {"max_new_tokens": LENGTH, **options}
    own = greedy(target, ids, mask, **options)
    spec = SelfSpecModel(target)
    ours = spec.generate(ids, attention_mask=mask, do_sample=False, draft=DRAFT, **options)
    return own, ours, spec


def written(target, lengths):
    """What each row goes on with when nothing stops it."""
    ids, mask = prompt(*lengths)
    return greedy(target, ids, mask, max_new_tokens=LENGTH)[:, max(lengths) :]


def only_kept(spec, lengths, sequences):
    """Counters and trace say what the output says, row by row."""
    stats, trace = spec.last_stats, spec.last_trace
    rows = [trace.tokens(row) for row in range(len(lengths))]
    for row, tokens in enumerate(rows):
        assert tokens == sequences[row, max(lengths) :][: len(tokens)].tolist()
        assert bool((sequences[row, max(lengths) + len(tokens) :] == 0).all())
        assert len(trace.origins(row)) == len(tokens)
    rounds = [step for row in trace.rows for step in row]
    # Prefill writes a row's first token, and is no round.
    assert stats.prefilled == len(rows) and stats.rounds == len(rounds) - len(rows)
    assert stats.emitted == sum(map(len, rows))
    assert stats.accepted == sum(step.accepted for step in rounds) == sum(stats.accepted_at)
    assert stats.drafted == sum(len(step.drafted) for step in rounds) == sum(stats.drafted_at)
    for step in rounds:
        # A draft behind a stop was never asked for.
        assert step.target is not None or len(step.drafted) == step.accepted == len(step.tokens)
    assert stats.emitted == stats.accepted + sum(step.target is not None for step in rounds)


def criteria(*given):
    return {"stopping_criteria": StoppingCriteriaList(given)}


def unused(text):
    """A token that no row writes: with it as end of sequence, plain decoding pads ended rows too.

    Without any, it goes on writing them until all have ended.
    """
    return {"eos_token_id": min(set(range(1, VOCAB)) - set(text.flatten().tolist()))}


def strings(text, place):
    """Stop strings inside a block: one of the first row, one of the last."""
    ends = text[0, place : place + 2], text[-1, place + 1 : place + 3]
    return {"stop_strings": ends, **unused(text)}


# What stops a text, by what is written when nothing does.
STOPS = {
    **{f"eos at {n}": lambda t, n=n: {"eos_token_id": int(t[0, n])} for n in (0, 3, 6, 7, 12)},
    "several eos": lambda t: {"eos_token_id": [int(t[-1, 8]), int(t[0, 4]), int(t[0, 10])]},
    **{f"{n} new tokens": lambda t, n=n: {"max_new_tokens": n} for n in (1, 2, 7, 7.5, 8, 15)},
    "max_length": lambda t: {"max_new_tokens": None, "max_length": 17},
    **{
        f"a length of {n} by the caller": lambda t, n=n: {
            "max_new_tokens": None,
            "generation_config": GenerationConfig(max_length=60),
            **criteria(MaxLengthCriteria(n)),
        }
        for n in (4, 12, 15)  # one is shorter than the prompts: it ends them after a token
    },
    "the shorter of two lengths": lambda t: {
        "max_new_tokens": None,
        "max_length": 40,
        **criteria(MaxLengthCriteria(30), MaxLengthCriteria(14)),
    },
    **{f"strings at {n}": lambda t, n=n: strings(t, n) for n in (1, 5, 6)},
    "strings of a config": lambda t: {
        "generation_config": GenerationConfig(max_new_tokens=LENGTH),
        **strings(t, 7),
    },
    **{f"a criterion at {n}": lambda t, n=n: criteria(StopAt(n)) for n in (10, 13, 20)},
    **{f"rows apart by {n}": lambda t, n=n: criteria(StopAt(sums=n)) | unused(t) for n in (3, 7)},
}


@pytest.mark.matrix
@TARGETS
@BATCHES
@pytest.mark.parametrize("stop", STOPS)
def test_a_text_ends_where_plain_decoding_ends_it(target, lengths, stop, tokenizer):
    options = STOPS[stop](written(target, lengths))
    if "stop_strings" in options:
        texts = [tokenizer.decode(tokens) for tokens in options["stop_strings"]]
        options |= {"stop_strings": texts, "tokenizer": tokenizer}
        if "generation_config" in options:
            options["generation_config"].stop_strings = options.pop("stop_strings")
    own, ours, spec = both(target, lengths, **options)
    assert torch.equal(own, ours)
    only_kept(spec, lengths, ours)
    shortest = min(len(spec.last_trace.tokens(row)) for row in range(len(lengths)))
    assert shortest < LENGTH
    # An exit that is always right has acceptance 1, wherever the text ends.
    stats = spec.last_stats
    assert target is sometimes or not stats.drafted or stats.acceptance_rate == 1


# End of sequence


def test_token_zero_is_an_end_like_any_other():
    found = None
    for seed in range(200):
        ids, mask = prompt(4, seed=seed)
        text = greedy(always, ids, mask, max_new_tokens=LENGTH)[0, 4:].tolist()
        if 0 in text[1:6]:
            found = seed
            break
    assert found is not None
    own, ours, _ = both(always, (4,), seed=found, eos_token_id=0)
    assert torch.equal(own, ours) and ours.shape[1] < 4 + LENGTH


# Stop strings


@pytest.mark.parametrize("given", ["", ["", "the"]])
@pytest.mark.parametrize("where", ["model", "config", "call"])
def test_an_empty_stop_string_ends_a_text_after_one_token(tokenizer, monkeypatch, given, where):
    options = {"tokenizer": tokenizer}
    if where == "model":
        monkeypatch.setattr(sometimes.generation_config, "stop_strings", given)
    elif where == "config":
        options["generation_config"] = GenerationConfig(stop_strings=given, pad_token_id=0)
    else:
        options["stop_strings"] = given
    own, ours, _ = both(sometimes, (5,), **options)
    assert torch.equal(own, ours) and ours.shape[1] == 5 + 1


def test_a_list_without_stop_strings_is_an_error_as_in_generate(tokenizer):
    for write in (sometimes.generate, SelfSpecModel(sometimes).generate):
        with pytest.raises(ValueError, match="unable to identify tokens matching"):
            write(prompt(5)[0], stop_strings=[], tokenizer=tokenizer, max_new_tokens=2)


def test_stop_strings_of_the_model(tokenizer, monkeypatch):
    string = tokenizer.decode(written(sometimes, (5,))[0, 7:9])
    monkeypatch.setattr(sometimes.generation_config, "stop_strings", [string])
    own, ours, _ = both(sometimes, (5,), tokenizer=tokenizer)
    assert torch.equal(own, ours) and ours.shape[1] < 5 + LENGTH
    assert sometimes.generation_config.stop_strings == [string]


def test_stop_strings_of_the_model_hold_for_calls_at_the_same_time(tokenizer, monkeypatch):
    string = tokenizer.decode(written(sometimes, (5,))[0, 7:9])
    monkeypatch.setattr(sometimes.generation_config, "stop_strings", [string])
    spec = SelfSpecModel(sometimes)
    ids, _ = prompt(5)
    options = {"max_new_tokens": LENGTH, "tokenizer": tokenizer}
    expected, texts = spec.generate(ids, **options), []

    class Other(BaseStreamer):
        """Writes a text of its own when another one has begun."""

        def put(self, value):
            if not texts:
                texts.append(spec.generate(ids, **options))

        def end(self):
            pass

    texts.append(spec.generate(ids, streamer=Other(), **options))
    assert expected.shape[1] < ids.shape[1] + LENGTH
    assert all(torch.equal(text, expected) for text in texts)


# A criterion of the caller


@TARGETS
def test_rows_that_a_criterion_ended_stay_ended_without_an_eos(target):
    """Plain decoding writes such rows on until all have ended; up to there the texts agree."""
    lengths = (3, 9, 6)
    own, ours, spec = both(target, lengths, **criteria(StopAt(sums=3)))
    assert ours.shape == own.shape
    for row in range(3):
        tokens = spec.last_trace.tokens(row)
        assert own[row, 9 : 9 + len(tokens)].tolist() == tokens
        sums = [int(own[row, place - 2 : place + 1].sum()) for place in range(9, own.shape[1])]
        assert len(tokens) == [total % 3 for total in sums].index(0) + 1
    only_kept(spec, lengths, ours)


@TARGETS
def test_a_user_criterion_is_asked_what_plain_decoding_asks(target):
    """Token by token, with the text so far and the scores that led to it."""
    ids, mask = prompt(5)
    notes = []
    for generate in (target.generate, SelfSpecModel(target).generate):
        criterion = StopAt(19)
        options = {} if generate == target.generate else {"draft": DRAFT}
        generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=LENGTH,
            return_dict_in_generate=True,
            output_scores=True,
            **criteria(criterion),
            **options,
        )
        notes.append(criterion.calls)
    own, ours = notes
    assert len(own) == len(ours) == 14
    for (own_text, own_scores), (text, scores) in zip(own, ours, strict=True):
        assert torch.equal(own_text, text)
        torch.testing.assert_close(own_scores, scores)


def test_every_criterion_is_asked_at_every_token():
    """Also the one behind the criterion that says stop, as in plain decoding."""
    ids, mask = prompt(5)
    calls = []
    for generate, extra in (
        (sometimes.generate, {"do_sample": False}),
        (SelfSpecModel(sometimes).generate, {"draft": DRAFT}),
    ):
        behind = StopAt(999)
        stops = criteria(StopAt(12), behind)
        generate(ids, attention_mask=mask, max_new_tokens=LENGTH, **stops, **extra)
        calls.append([text.tolist() for text, _ in behind.calls])
    assert calls[0] == calls[1]


@BATCHES
def test_the_earliest_of_many_stops_wins(lengths, tokenizer):
    text = written(always, lengths)
    string = tokenizer.decode(text[0, 9:11])
    for eos_place, length in ((3, 30), (12, 16 + max(lengths)), (21, 4 + max(lengths))):
        own, ours, spec = both(
            always,
            lengths,
            eos_token_id=int(text[0, eos_place]),
            stop_strings=[string],
            tokenizer=tokenizer,
            max_new_tokens=None,
            max_length=length,
            **criteria(StopAt(max(lengths) + 20)),
        )
        assert torch.equal(own, ours)
        only_kept(spec, lengths, ours)


# Time


class Clock:
    """Time that passes only when a layer is asked to."""

    def __init__(self):
        self.now = time.time()

    def __call__(self):
        return self.now


@BATCHES
def test_max_time_ends_after_the_round_in_which_it_passes(lengths, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    target = tiny_llama("always")
    last = target.model.layers[-1].mlp
    last.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 1))
    ids, mask = prompt(*lengths)
    spec = SelfSpecModel(target)
    ours = spec.generate(ids, attention_mask=mask, max_new_tokens=LENGTH, max_time=2.5, draft=DRAFT)
    # Prefill and two rounds: the deadline passes in the second, whose first token stands.
    assert ours.shape[1] == max(lengths) + 1 + 7 + 1
    assert torch.equal(ours, greedy(target, ids, mask, max_new_tokens=9))
    only_kept(spec, lengths, ours)


# Streaming and drafters


@BATCHES
def test_without_drafts_every_token_is_plain(lengths):
    ids, mask = prompt(*lengths)
    spec = SelfSpecModel(sometimes)
    equal_to_generate(spec, ids, mask, max_new_tokens=9, draft="none")
    for row in range(len(lengths)):
        assert spec.last_trace.origins(row) == ["plain"] * 9
    assert spec.last_stats.drafted == 0 and spec.last_stats.acceptance_rate == 0


class LateEnd(EosTokenCriteria):
    """The end token ends a text from some length on only."""

    def __call__(self, input_ids, scores, **kwargs):
        late = input_ids.shape[1] >= 12
        return super().__call__(input_ids, scores, **kwargs) & late


class EarlyEnd(MaxLengthCriteria):
    """Ends sooner than its length says."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length // 2)


@TARGETS
@pytest.mark.parametrize("kind", [LateEnd, EarlyEnd])
def test_a_subclass_of_a_known_criterion_is_asked_itself(target, kind):
    criterion = LateEnd(int(written(target, (5,))[0, 2])) if kind is LateEnd else EarlyEnd(28)
    own, ours, _ = both(target, (5,), stopping_criteria=StoppingCriteriaList([criterion]))
    assert torch.equal(own, ours)


@BATCHES
@pytest.mark.parametrize("least", [{"min_new_tokens": 6}, {"min_length": 14}])
def test_an_end_token_of_minus_one_is_none(lengths, least):
    """As in configs that turn ends off."""
    own, ours, _ = both(sometimes, lengths, eos_token_id=-1, **least)
    assert torch.equal(own, ours)

"""The cascade looks up where every row has a long match, and drafts from its exit elsewhere."""

import itertools

import distribution_tools as distribution
import pytest
import torch
from conftest import EXIT, greedy, prompt, tiny_llama
from distribution_tools import WARPED, draws, exact, p_values
from distribution_tools import target as target
from head_tools import assert_reads_as_forced, close_in_double, own_head, record
from lookup_tools import collect, foresee

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.drafters import Cascade
from selfspec.drafters.engine import Engine
from selfspec.schedule import Schedule

IDS, MASK = prompt(3, 8, 5)
TOKENS = 48
DRAFT = {"drafter": "cascade", "exit_layer": EXIT, "lookup": {"confident": 3}}


@pytest.fixture(scope="module")
def model():
    return tiny_llama("sometimes")


@pytest.fixture(scope="module")
def own(model):
    """The model's own text behind the prompts."""
    return greedy(model, IDS, MASK, max_new_tokens=TOKENS)


def written(spec, **draft):
    return spec.generate(IDS, attention_mask=MASK, max_new_tokens=TOKENS, draft=DRAFT | draft)


def looked_up(drafts):
    """Whether each draft is a copy; rounds without one left out."""
    return [draft.counts is not None for draft in drafts if draft.length]


def test_a_text_that_every_row_foresees_is_looked_up(model, own, monkeypatch):
    foresee(monkeypatch, own.tolist())
    spec, drafts = SelfSpecModel(model), collect(monkeypatch)
    assert torch.equal(written(spec), own)
    assert all(looked_up(drafts)) and spec.last_stats.acceptance_rate == 1
    assert max(draft.length for draft in drafts) >= 10  # as `prompt_lookup` has it


@pytest.mark.parametrize("lookup", [{"confident": 20}, {"shortest": 20}], ids=str)
def test_one_row_that_finds_nothing_sends_all_to_the_exit(model, own, lookup, monkeypatch):
    foresee(monkeypatch, own[:2].tolist())
    spec, drafts = SelfSpecModel(model), collect(monkeypatch)
    assert torch.equal(written(spec, lookup=lookup), own)
    together = [draft for draft in drafts if len(draft.tokens) == 3]
    assert len(together) > 5 and not any(looked_up(together))
    assert max(draft.length for draft in together) == 4  # as `early_exit` has it


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "exit_layer"), [("shared", EXIT), ("block", EXIT), ("fused", EXIT), ("fused", 0)]
)
@pytest.mark.parametrize("foreseen", ["now and then", "for long"])
def test_the_head_reads_on_behind_drafts_that_were_not_its_own(
    model, own, kind, exit_layer, foreseen, monkeypatch
):
    if foreseen == "for long":
        foresee(monkeypatch, own[:, :-6].tolist())
    else:
        foresee(monkeypatch, own.tolist(), wrong=8)
    decoder = Decoder(model)
    heads = [] if kind == "shared" else [own_head(decoder, kind, exit_layer, noise=0.02)]
    spec, drafts = SelfSpecModel(model, heads=heads), collect(monkeypatch)
    seen = record(monkeypatch)
    draft = {"head": kind, "exit_layer": exit_layer, "num_draft_tokens": 3}
    assert torch.equal(written(spec, **draft), own)
    assert {True, False} == set(looked_up(drafts))
    if heads:
        assert_reads_as_forced(decoder, heads[0], seen[::3], close_in_double)


@pytest.mark.parametrize("schedule", ["fixed", "confidence", "optimal"])
def test_a_schedule_times_the_rounds_of_the_exit_only(model, own, schedule, monkeypatch):
    """What was timed ends with its round: the next begins whoever drafts."""
    events = []
    for made in (Schedule, *Schedule.__subclasses__()):
        for name in {"begin", "pause", "end"} & set(vars(made)):
            monkeypatch.setattr(made, name, noting(vars(made)[name], name, events))
    monkeypatch.setattr(Engine, "verify", noting(Engine.verify, "verify", events))
    foresee(monkeypatch, own.tolist(), wrong=8)
    spec = SelfSpecModel(model)
    assert torch.equal(written(spec, schedule=schedule), own)
    if events[-2:] == ["end", "verify"]:  # room for one token: nobody drafts, and no round follows
        events.pop()
    ends = [place for place, event in enumerate(events) if event == "end"]
    assert ends and all(events[place : place + 2] != ["end", "verify"] for place in ends)
    assert events.count("begin") == len(ends) and "pause" in events


def noting(method, name, events):
    def noted(*args, **kwargs):
        events.append(name)
        return method(*args, **kwargs)

    return noted


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["shared", "block"])
def test_sampled_text_follows_the_target(target, kind, monkeypatch):
    """Rounds of lookups and of the exit in turn."""
    most_tokens = torch.arange(11)[None] * 7 % 11 + 1  # so that lookups often find something
    monkeypatch.setattr(distribution, "PROMPT", most_tokens)
    propose, rounds = Cascade.propose, itertools.count()

    def alternating(self, state, limit):
        self.confident = 99 if next(rounds) % 2 else 0
        return propose(self, state, limit)

    monkeypatch.setattr(Cascade, "propose", alternating)
    drafts = collect(monkeypatch)
    head = own_head(Decoder(target), "block", 1, noise=0.1)
    draft = DraftConfig(
        drafter="cascade", exit_layer=1, head=kind, num_draft_tokens=2, lookup={"shortest": 1}
    )
    counts, acceptance = draws(target, WARPED, draft, total=6_000, heads=[head])
    assert {True, False} == set(looked_up(drafts)) and 0.05 < acceptance < 0.95
    assert min(p_values(counts, exact(target, WARPED))) > 1e-3


def test_a_lookup_that_could_never_be_confident_is_refused(model):
    lookup = {"index": "ngram", "longest": 3, "confident": 4}
    with pytest.raises(ValueError, match=r"lookup\.confident=4 is more than lookup\.longest=3"):
        SelfSpecModel(model).generate(IDS, draft=DRAFT | {"lookup": lookup})
    assert DraftConfig(drafter="prompt_lookup", lookup=lookup).lookup.longest == 3

"""Processors that have a state are called exactly as the model's own generate calls them."""

import itertools

import pytest
import torch
from conftest import EXIT, VOCAB, greedy, prompt, tiny_llama
from law_tools import VOCAB as FEW
from law_tools import Pair, distributions, p_value
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig

from selfspec import DraftConfig, SelfSpecModel
from selfspec.sampling.context import Context
from selfspec.sampling.draft import Draft, Tree
from selfspec.sampling.forks import fork
from selfspec.sampling.sampler import Sampler
from selfspec.sampling.walk import walk

DRAFTS = {
    "default": None,
    "none": "none",
    "early exit": DraftConfig(exit_layer=EXIT),
    "cascade": DraftConfig(drafter="cascade", exit_layer=EXIT),
    "auto": DraftConfig(drafter="auto", exit_layer=EXIT),
    "tree": DraftConfig(drafter="tree", exit_layer=EXIT),
    "lookahead": "lookahead",
    "prompt lookup": "prompt_lookup",
    "skip sublayers": {"drafter": "skip_sublayers", "skip": {"attention": [2], "mlp": [3]}},
    "clasp": {"drafter": "skip_sublayers", "skip": {"layers": 2, "every": 4}},
    "two models": "two_model",
}
EVERY_DRAFT = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
NEW, EOS = 24, [5, 6]


class Matcher(LogitsProcessor):
    """Follows the text by itself, token by token, and fails if it is shown a forbidden one."""

    def __init__(self):
        self.seen = None

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1].tolist()
        if self.seen is None:
            self.seen = [[] for _ in last]
        else:
            for row, token in zip(self.seen, last, strict=True):
                ended = any(token in EOS for token in row)
                assert ended or not self.forbids(row, token), "token rejected"
                row.append(token)
        tokens = torch.arange(scores.shape[1])
        banned = torch.stack([self.forbids(row, tokens) for row in self.seen])
        return scores.masked_fill(banned, -torch.inf)

    @staticmethod
    def forbids(row, token):
        return (token + len(row) + sum(row)) % 3 == 0


class ForkedMatcher(Matcher):
    """The same, with copies that drafts may be shown to."""

    def fork(self):
        other = type(self)()
        other.seen = None if self.seen is None else [list(row) for row in self.seen]
        return other


class Record(ForkedMatcher):
    """After a token 1 (mod 4) the grammar forces the next three, one by one."""

    @staticmethod
    def forbids(row, token):
        since = next((i for i, old in enumerate(reversed(row)) if old % 4 == 1), 9)
        return token != 10 + since if since < 3 else (token + len(row)) % 5 == 0


class Counter(LogitsProcessor):
    """Prefers another token in every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % VOCAB] += 4  # in place, as processors may
        return scores


class Previous(LogitsProcessor):
    """Keeps the last text it was shown, and expects it with one more token."""

    def __init__(self):
        self.last = None

    def __call__(self, input_ids, scores):
        if self.last is not None:
            assert torch.equal(input_ids[:, :-1], self.last)
            scores = scores + 2 * ((torch.arange(VOCAB) + self.last[:, -1:]) % 7 == 0)
        self.last = input_ids
        return scores


class Budget(LogitsProcessor):
    """Takes the length at its first call for the prompt's; forces a token after some more."""

    def __init__(self):
        self.start = None

    def __call__(self, input_ids, scores):
        self.start = input_ids.shape[1] if self.start is None else self.start
        if (input_ids.shape[1] - self.start) % 6 == 5:
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([9]), 0.0)
        return scores


def allowed_by_turns():
    """A `prefix_allowed_tokens_fn` that counts its calls for each row."""
    calls = {}

    def allowed(row, tokens):
        calls[row] = calls.get(row, 0) + 1
        return [token for token in range(VOCAB) if (token + calls[row]) % 3]

    return {"prefix_allowed_tokens_fn": allowed}


class Log(LogitsProcessor):
    """Notes every text it is shown."""

    def __init__(self):
        self.texts = []

    def __call__(self, input_ids, scores):
        assert input_ids.is_contiguous()
        self.texts.append(input_ids)
        return scores


def listed(*kinds):
    return lambda: {"logits_processor": LogitsProcessorList([kind() for kind in kinds])}


STATEFUL = {
    "matcher": listed(Matcher),
    "fork": listed(ForkedMatcher),
    "record": listed(Record),
    "counter": listed(Counter),
    "previous": listed(Previous),
    "budget": listed(Budget),
    "allowed tokens": allowed_by_turns,
    "many": lambda: listed(Counter, Previous, Record)() | {"repetition_penalty": 1.2},
    "guidance": lambda: {"guidance_scale": 1.6},
    "watermark": lambda: {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    },
}
EVERY_KIND = pytest.mark.parametrize("name", STATEFUL)


@pytest.fixture(scope="module")
def spec():
    return SelfSpecModel(tiny_llama(), draft_model=tiny_llama("always"))


def logged(make):
    """The options of a case, and what its processors will be shown."""
    options, log = make(), Log()
    own = options.pop("logits_processor", [])
    return options | {"logits_processor": LogitsProcessorList([*own, log])}, log.texts


def same(texts, others):
    return len(texts) == len(others) and all(map(torch.equal, texts, others))


@pytest.mark.matrix
@EVERY_KIND
@EVERY_DRAFT
@pytest.mark.parametrize("lengths", [(6,), (4, 7, 3)], ids=["one row", "three rows"])
def test_output_and_calls_are_those_of_plain_decoding(spec, name, lengths, draft):
    """Rows end at different times, and are then shown with padding."""
    ids, mask = prompt(*lengths)
    options = {"max_new_tokens": NEW, "eos_token_id": EOS, "output_scores": True}
    options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    (own_case, own_calls), (case, calls) = logged(STATEFUL[name]), logged(STATEFUL[name])
    own = spec.model.generate(ids, attention_mask=mask, **options, **own_case)
    got = spec.generate(ids, attention_mask=mask, draft=draft, **options, **case)
    assert torch.equal(got.sequences, own.sequences)
    assert same(calls, own_calls)
    assert len(got.scores) == len(own.scores) == len(got.logits)
    for step, (scores, expected) in enumerate(zip(got.scores, own.scores, strict=True)):
        real = ~torch.isin(own.sequences[:, ids.shape[1] :][:, :step], torch.tensor(EOS)).any(1)
        torch.testing.assert_close(scores[real], expected[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["fork", "record"])
def test_a_fork_prunes_drafts(spec, name):
    """With a copy that knows what is forbidden, more drafts are accepted."""
    ids, _ = prompt(6)
    options = {"max_new_tokens": 60, "do_sample": False, "draft": DRAFTS["early exit"]}

    class Closed(STATEFUL[name]()["logits_processor"][0].__class__):
        fork = None

    spec.generate(ids, logits_processor=[Closed()], **options)
    without = spec.last_stats.rounds
    spec.generate(ids, **STATEFUL[name](), **options)
    assert spec.last_stats.rounds < without


@EVERY_DRAFT
def test_what_a_grammar_forces_is_drafted_without_the_model(spec, draft):
    """One token chosen, three forced: even a drafter that is never right has long rounds."""
    ids, mask = prompt(6)

    class Forced(Record):
        @staticmethod
        def forbids(row, token):
            place = len(row) % 4
            return token != 10 + place if place else token % 4 != 1

    options = {"attention_mask": mask, "max_new_tokens": 41, "do_sample": False, "draft": draft}
    text = spec.generate(ids, logits_processor=[Forced()], **options)
    assert text[0, 7:].view(10, 4)[:, :3].tolist() == [[11, 12, 13]] * 10
    plain = draft == "none"
    assert (spec.last_stats.rounds == 40) if plain else (spec.last_stats.rounds <= 20)


class ForcedInSome(ForkedMatcher):
    """Forces three tokens after each chosen one, if the prompt has an even length."""

    length = None

    def __call__(self, input_ids, scores):
        self.length = input_ids.shape[1] if self.length is None else self.length
        return super().__call__(input_ids, scores)

    def fork(self):
        other = super().fork()
        other.length = self.length
        return other

    def forbids(self, row, token):
        index = len(row) % 4
        return token != 10 + index if index and self.length % 2 == 0 else token % 4 == 1


@pytest.mark.matrix(share=3)
@EVERY_DRAFT
def test_rows_that_a_grammar_forces_wait_for_no_other_row(spec, draft):
    """Two requests of four are forced; the others take plain steps in these rounds."""
    prompts = [prompt(length, seed=length)[0][0].tolist() for length in (4, 7, 6, 5)]
    options = {"max_new_tokens": 41}
    found = spec.generate_batch(
        prompts, batch_size=4, draft=draft, logits_processor=[ForcedInSome()], **options
    )
    for text, output in zip(prompts, found.values(), strict=True):
        own = greedy(spec.model, torch.tensor([text]), logits_processor=[ForcedInSome()], **options)
        assert output.generated_tokens == own[0, len(text) :].tolist()
        if len(text) % 2 == 0:
            new = torch.tensor(output.generated_tokens[1:]).view(10, 4)
            assert new[:, :3].tolist() == [[11, 12, 13]] * 10
            assert output.stats.rounds == (40 if draft == "none" else 10)


@pytest.mark.matrix
@EVERY_KIND
@EVERY_DRAFT
def test_each_request_of_a_batch_has_processors_of_its_own(spec, name, draft):
    """Requests join and leave; each is written as by itself."""
    prompts = [prompt(length, seed=length)[0][0].tolist() for length in (4, 7, 3, 5)]
    options = {"max_new_tokens": NEW, "eos_token_id": EOS}
    if name == "allowed tokens":
        pytest.skip("a function is shared by all requests, with what it remembers")
    found = spec.generate_batch(prompts, batch_size=3, draft=draft, **options, **STATEFUL[name]())
    for text, output in zip(prompts, found.values(), strict=True):
        own = greedy(spec.model, torch.tensor([text]), **options, **STATEFUL[name]())
        assert output.error is None
        assert output.generated_tokens == own[0, len(text) :].tolist()


def test_a_processor_that_cannot_be_copied_for_each_request_is_refused_by_name(spec):
    class Held(Matcher):
        def __deepcopy__(self, memo):
            raise TypeError("it holds a lock")

    with pytest.raises(ValueError, match=r"Held cannot be copied .*lock.* method fork\(\)"):
        spec.generate_batch([[3, 4]], logits_processor=[Held()], max_new_tokens=4)


@pytest.mark.matrix
@EVERY_KIND
@EVERY_DRAFT
def test_a_seed_gives_one_coupled_text_with_every_drafter(spec, name, draft):
    ids, mask = prompt(4, 7, 3)

    def sample(draft):
        generator = torch.Generator().manual_seed(3)
        options = {"max_new_tokens": NEW, "do_sample": True, "generator": generator, "top_k": 0}
        text = spec.generate(ids, attention_mask=mask, **options, **STATEFUL[name](), draft=draft)
        return text, spec.last_stats.lossless

    config = DraftConfig.of(draft) if draft is not None else DraftConfig(drafter="auto")
    text, lossless = sample(config.model_copy(update={"rule": "coupled"}))
    assert torch.equal(text, sample({"drafter": "none", "rule": "coupled"})[0]) and lossless


@pytest.mark.matrix
@pytest.mark.parametrize("rule", ["block", "token", "coupled", "typical_lossy"])
@EVERY_DRAFT
def test_sampled_texts_satisfy_a_matcher_under_every_rule(spec, rule, draft):
    config = DraftConfig.of(draft) if draft is not None else DraftConfig(drafter="auto")
    if rule == "typical_lossy" and config.drafter in ("tree", "lookahead"):
        rule = "block"  # trees have no other
    ids, mask = prompt(4, 7, 3)
    case, calls = logged(STATEFUL["matcher"])
    draft = config.model_copy(update={"rule": rule})
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": True, "draft": draft}
    text = spec.generate(ids, generator=torch.Generator().manual_seed(1), **options, **case)
    assert spec.last_stats.lossless
    assert [seen.shape[1] for seen in calls] == list(range(7, 7 + NEW))
    assert all(torch.equal(seen, text[:, : seen.shape[1]]) for seen in calls)


@pytest.mark.parametrize("lengths", [(6,), (4, 7, 3)], ids=["one row", "three rows"])
def test_criteria_are_asked_between_two_calls_of_a_processor(spec, lengths):
    """One object that is both sees calls and questions in turn, once a step."""

    class Both(Counter):
        def __init__(self):
            super().__init__()
            self.log = []

        def __call__(self, input_ids, scores):
            self.log.append(("processor", input_ids.shape[1]))
            return super().__call__(input_ids, scores)

        def stops(self, input_ids, scores, **kwargs):
            self.log.append(("criterion", input_ids.shape[1]))
            return input_ids[:, -1] % 16 == 3

    ids, mask = prompt(*lengths)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    options["eos_token_id"] = EOS
    own, both = Both(), Both()
    expected = spec.model.generate(
        ids, **options, logits_processor=[own], stopping_criteria=[own.stops]
    )
    options |= {"logits_processor": [both], "stopping_criteria": [both.stops]}
    assert torch.equal(spec.generate(ids, draft=DRAFTS["early exit"], **options), expected)
    assert both.log == own.log


# The distribution


class Turns(LogitsProcessor):
    """The target itself: its distribution depends on the number of calls and on the last token."""

    def __init__(self, tables):
        self.tables, self.calls = tables, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return self.tables[self.calls - 1][input_ids[:, -1]].log().float()


def walked(tables, drafts, rows, seed):
    """Texts `[rows, places]` that rows write in step, with drafts from other tables."""
    source = torch.Generator().manual_seed(seed)
    sampler = Sampler(LogitsProcessorList([Turns(tables)]), True, source)
    start = torch.zeros(rows, 1, dtype=torch.long)
    context = Context(start, [1] * rows, list(range(rows)), start.tolist())
    places = len(tables)
    while context.lengths[0] <= places:
        done = context.lengths[0] - 1
        draft = drafts(context.tokens[:, done], done, min(2, places - done - 1), source)
        logits = torch.zeros(rows, draft.length + 1, FEW)
        verdict = walk(draft, logits, sampler, context, lambda *step: [False] * rows)
        context.write(verdict.tokens)
        assert len(set(verdict.accepted_counts)) == 1  # rows move in step
        for row, kept in enumerate(verdict.accepted_counts):
            context.commit(row, verdict.tokens[row, : kept + 1].tolist(), written=True)
    return context.tokens[:, 1 : places + 1]


def chains(tables):
    def propose(last, done, length, source):
        tokens, probs = [], []
        for place in range(done, done + length):
            probs.append(tables[place][last].float())
            last = torch.multinomial(probs[-1], 1, generator=source)[:, 0]
            tokens.append(last)
        if not tokens:
            return Draft.empty(len(last), last.device)
        return Draft(torch.stack(tokens, 1), torch.stack(probs, 1))

    return propose


def certain(tables):
    """Chains that were not sampled; the second row has one draft only."""

    def propose(last, done, length, source):
        draft = chains(tables)(last, done, length, source)
        counts = torch.full((len(last),), length)
        counts[1:2] = min(1, length)
        tokens = [tables[done + place][last].argmax(-1) for place in range(length)]
        tokens = torch.stack(tokens, 1) if tokens else draft.tokens
        return Draft(tokens, counts=counts)

    return propose


def trees(tables):
    """Two candidates without replacement, each with one more behind it."""

    def propose(last, done, length, source):
        if length < 2:
            return chains(tables)(last, done, length, source)
        q = tables[done][last].float()
        first = torch.multinomial(q, 2, generator=source)
        below = tables[done + 1][first].float()
        second = torch.multinomial(below.flatten(0, 1), 1, generator=source).view_as(first)
        tokens, probs = torch.cat([first, second], 1), torch.cat([q[:, None], below], 1)
        parents = torch.tensor([[0, 0, 1, 2]]).expand(len(last), -1)
        return Draft(tokens, probs, tree=Tree(parents, 2, 2))

    return propose


@pytest.mark.matrix
@pytest.mark.parametrize("propose", [chains, certain, trees], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_walked_texts_follow_the_target(propose, rows):
    target, draft = distributions(3, FEW), distributions(3, FEW, seed=1)
    counts = torch.zeros(FEW**3)
    for seed in range(1200 // rows):
        words = walked(target, propose(draft), rows, seed)
        counts += torch.bincount((words * FEW ** torch.arange(2, -1, -1)).sum(-1), minlength=FEW**3)
    assert p_value(counts, Pair(target, draft[:2]).joint) > 1e-3
    flipped = Pair(target.flip(0), draft[:2]).joint  # the test would see another target
    assert p_value(counts, flipped) < 1e-3


# Forks


def test_processors_without_a_fork_have_none():
    assert fork(Counter()) is None
    assert isinstance(fork(ForkedMatcher()), ForkedMatcher)


def test_a_fork_is_shown_only_what_it_allows(spec):
    """It sees no draft that it forbade, and nothing behind the end of a text."""
    shown = []

    class Watched(ForkedMatcher):
        def __call__(self, input_ids, scores):
            if self.seen is not None:
                shown.extend(input_ids[:, -2].tolist())
            return super().__call__(input_ids, scores)

    for draft, lengths in itertools.product(DRAFTS.values(), [(6,), (4, 7, 3)]):
        ids, mask = prompt(*lengths)
        options = {"max_new_tokens": NEW, "eos_token_id": EOS, "draft": draft, "top_k": 0}
        generator = torch.Generator().manual_seed(0)
        spec.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            generator=generator,
            **options,
            logits_processor=[Watched()],
        )
        shown = [token for token in shown if token]
        if len(lengths) == 1:
            assert not {*shown} & {*EOS}
        shown.clear()

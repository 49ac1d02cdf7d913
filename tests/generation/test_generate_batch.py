"""`generate_batch`: what a request gives does not depend on the requests beside it."""

import inspect
import itertools
import random
import time
from functools import cache

import numpy as np
import pytest
import torch
from conftest import (
    AGREEMENT,
    BIASES_IN_BLOCKS,
    EXIT,
    VOCAB,
    greedy,
    requests_equal_to_generate,
    tiny_llama,
)
from drafter_tools import FAMILIES, SKIP, TREES
from families import CASES_BY_FAMILY, RECURRENT, build, model_of
from families import VOCAB as FAMILY_VOCAB
from head_tools import KINDS, WITH_LAYER, assert_reads_as_forced, close_in_double, own_head, record
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.decoder.gates import Gates
from selfspec.drafters import DRAFTERS, Drafter, register_drafter
from selfspec.drafters.engine import Engine
from selfspec.generation.batch import Batch
from selfspec.generation.loop import Session
from selfspec.sampling import sampler
from selfspec.schedule import Rounds

CLASP = {"drafter": "skip_sublayers", "skip": {"search": "clasp", "every": 4}}
DRAFTS = [
    *(pytest.param({"drafter": name, "skip": SKIP}, id=name) for name in sorted(DRAFTERS)),
    pytest.param(CLASP, id="clasp"),
]


def some_prompts(count, *, longest=9, vocab=VOCAB, seed=0):
    source = random.Random(seed)
    lengths = [source.randint(1, longest) for _ in range(count)]
    return [[source.randrange(1, vocab) for _ in range(length)] for length in lengths]


def some_lengths(count, low=1, high=12):
    return random.Random(1).choices(range(low, high + 1), k=count)


def own_text(model, prompt, length, **options):
    ids = torch.tensor([prompt])
    return greedy(model, ids, max_new_tokens=length, **options)[0, len(prompt) :].tolist()


def texts(outputs):
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


def assert_as_alone(model, prompts, lengths, draft, rows, **options):
    spec = SelfSpecModel(model, draft_model=model)
    outputs = requests_equal_to_generate(spec, prompts, lengths, rows, draft=draft, **options)
    assert list(outputs) == [f"req_{number}" for number in range(len(prompts))]
    assert [output.prompt_ids for output in outputs.values()] == prompts
    assert spec.last_stats.emitted == sum(lengths)
    assert spec.last_stats.prefilled == len(prompts)


@cache
def family(name):
    model = model_of(name, CASES_BY_FAMILY[name])
    return model, some_prompts(7, longest=12, vocab=FAMILY_VOCAB), some_lengths(7, high=10)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_request_is_as_alone_on_any_family(draft, name, rows):
    if name == "bloom" and (draft["drafter"] in TREES or draft is CLASP):
        pytest.skip("no trees")
    model, prompts, lengths = family(name)
    assert_as_alone(model, prompts, lengths, draft, rows)


@pytest.mark.matrix
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("draft", ["early_exit", "prompt_lookup", "none"])
def test_every_request_is_as_alone_with_recurrent_layers(draft, name):
    model = build(name, "sdpa", 0.1)
    prompts, lengths = some_prompts(6, vocab=FAMILY_VOCAB), some_lengths(6, high=8)
    assert_as_alone(model, prompts, lengths, draft, 3)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("drafter", "how"),
    [("early_exit", {}), ("tree", {"tree": {"nodes": 6}}), ("cascade", {}), ("auto", {})],
)
def test_every_head_goes_on_with_rows_that_join(kind, drafter, how, monkeypatch):
    model = tiny_llama()
    head = own_head(Decoder(model), kind, EXIT)
    spec, prompts, lengths = SelfSpecModel(model, [head]), some_prompts(7), some_lengths(7)
    readings = record(monkeypatch)
    draft = {"drafter": drafter, "head": head.kind, "exit_layer": head.exit_layer, **how}
    requests_equal_to_generate(spec, prompts, lengths, 3, draft=draft)
    if kind in WITH_LAYER and drafter != "auto":  # which may have decoded plainly
        assert_reads_as_forced(spec.decoder, head, readings, close_in_double)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "drafter", ["early_exit", "tree", "prompt_lookup", "two_model", "skip_sublayers"]
)
def test_what_is_drafted_does_not_depend_on_other_rows(drafter):
    model, small = tiny_llama(), tiny_llama(seed=1)
    spec, prompts, length = SelfSpecModel(model, draft_model=small), some_prompts(7), 16
    draft = {"drafter": drafter, "num_draft_tokens": 3, "skip": SKIP}
    options = {"max_new_tokens": length, "do_sample": False, "draft": draft}
    outputs = spec.generate_batch(prompts, batch_size=3, **options)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        spec.generate(torch.tensor([prompt]), **options)
        emitted = 0
        for own, joined in zip(spec.last_trace.rows[0], output.trace.rows[0], strict=False):
            emitted += len(own.tokens)
            if emitted > length - 4:  # alone, fewer tokens are drafted at the end
                break
            assert joined == own
        assert output.trace.tokens() == output.generated_tokens == spec.last_trace.tokens()
        assert output.stats.emitted == length
        assert output.stats.prefilled == 1


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["early_exit", "tree", "prompt_lookup", "none", "lookahead"])
def test_a_request_has_a_seed_of_its_own(draft):
    spec, prompts, lengths = SelfSpecModel(tiny_llama()), some_prompts(8), some_lengths(8)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    options["draft"] = {"drafter": draft, "rule": "coupled"}
    outputs = spec.generate_batch(prompts, batch_size=3, seed=5, max_new_tokens=lengths, **options)
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        source = torch.Generator().manual_seed(5 + number)
        ids = torch.tensor([prompt])
        alone = spec.generate(ids, max_new_tokens=length, generator=source, **options)
        assert texts(outputs)[number] == alone[0, len(prompt) :].tolist()
    again = spec.generate_batch(
        prompts[::-1], batch_size=5, seed=range(12, 4, -1), max_new_tokens=lengths[::-1], **options
    )
    assert texts(again) == texts(outputs)[::-1]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_sampling_with_shared_draws(rule):
    spec = SelfSpecModel(tiny_llama())
    options = {"do_sample": True, "draft": {"rule": rule}, "max_new_tokens": 8, "batch_size": 3}
    runs = [texts(spec.generate_batch(some_prompts(8), seed=seed, **options)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


class Forbid(LogitsProcessor):
    """Forbids the successor of the last token, and of the first; looks at one request at a time."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        scores = scores.clone()
        scores[0, [(input_ids[0, -1] + 1) % VOCAB, (input_ids[0, 0] + 1) % VOCAB]] = -torch.inf
        return scores


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["early_exit", "tree", "prompt_lookup"])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": [3, 5, 8, 13, 21]},
        {"logits_processor": LogitsProcessorList([Forbid()])},
        {"exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 7},
        {"suppress_tokens": [2, 4], "begin_suppress_tokens": [6]},
        {
            "min_new_tokens": 9,
            "forced_eos_token_id": 5,
            "bad_words_ids": [[7], [8, 9]],
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "eos_token_id": [5, 13, 21],
        },
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_one_request(draft, options):
    prompts, lengths = some_prompts(9), some_lengths(9, low=9, high=20)
    spec = SelfSpecModel(tiny_llama())
    requests_equal_to_generate(spec, prompts, lengths, 4, draft=draft, **options)


class EndsAt(StoppingCriteria):
    """Stops after a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **options):
        return input_ids[:, -1] == self.token


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["early_exit", "tree", "none"])
@pytest.mark.parametrize("criteria", [[], [EndsAt(9)]], ids=["", "criterion"])
def test_processors_of_all_requests_are_applied_at_once(draft, criteria, monkeypatch):
    rows, run = [], sampler.process

    def counted(processors, before, logits):
        rows.append(len({*before.rows}))
        return run(processors, before, logits)

    monkeypatch.setattr(sampler, "process", counted)
    spec, prompts, lengths = SelfSpecModel(tiny_llama()), some_prompts(10), [12, 20] * 5
    options = {"repetition_penalty": 1.2, "min_new_tokens": 8, "eos_token_id": [5, 13, 21]}
    options["stopping_criteria"] = criteria
    # All requests share it, and the first call fills it in.
    bias = SequenceBiasLogitsProcessor([[[7], -3.0], [[8, 9], 2.0]])
    if BIASES_IN_BLOCKS:
        options["logits_processor"] = LogitsProcessorList([bias])
    requests_equal_to_generate(spec, prompts, lengths, 5, draft=draft, **options)
    assert max(rows) == 5 and sum(rows) > 3 * len(rows)


def test_stop_strings_and_end_tokens(tokenizer):
    options = {"stop_strings": ["a", "be"], "tokenizer": tokenizer, "eos_token_id": [9, 10, 11]}
    spec, prompts = SelfSpecModel(tiny_llama()), some_prompts(12)
    outputs = requests_equal_to_generate(spec, prompts, 30, 4, **options)
    assert len({*map(len, texts(outputs))}) > 2


def test_results_come_as_they_finish_and_prompts_are_read_when_rows_are_free():
    read = []

    def prompts():
        for number, one in enumerate(some_prompts(6)):
            read.append(number)
            yield one

    lengths = [9, 2, 3, 1, 2, 2]
    outputs = SelfSpecModel(tiny_llama()).generate_batch_iter(
        prompts(), batch_size=2, max_new_tokens=lengths, do_sample=False, draft="none"
    )
    assert read == []
    order = [next(outputs).request_id]
    assert read == [0, 1]
    order += [output.request_id for output in outputs]
    assert order == [f"req_{number}" for number in (1, 2, 3, 4, 5, 0)]


# Errors


class Breaks(LogitsProcessor):
    def __init__(self, first):
        self.first = first

    def __call__(self, input_ids, scores):
        if input_ids[0, 0] == self.first and input_ids.shape[1] > 8:
            raise RuntimeError("no more of this")
        return scores


class BreaksToo(Breaks, StoppingCriteria):
    """The same as a stopping criterion; it never stops."""

    def __call__(self, input_ids, scores, **options):
        super().__call__(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def distinct(count, length=5):
    return [[number + 1, *prompt[1:]] for number, prompt in enumerate(fixed(count, length))]


def fixed(count, length):
    source = random.Random(0)
    return [[source.randrange(1, VOCAB) for _ in range(length)] for _ in range(count)]


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["early_exit", "tree", "none", "two_model"])
@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_an_exception_ends_one_request(draft, where):
    model, prompts = tiny_llama(), distinct(7)
    broken = {"logits_processor": Breaks, "stopping_criteria": BreaksToo}[where](3)
    outputs = SelfSpecModel(model, draft_model=model).generate_batch(
        prompts, draft=draft, batch_size=3, max_new_tokens=9, do_sample=False, **{where: [broken]}
    )
    failed = outputs.pop("req_2")
    assert failed.error == "RuntimeError: no more of this"
    own = own_text(model, prompts[2], 9)
    assert 0 < len(failed.generated_tokens) < 5
    assert failed.generated_tokens == own[: len(failed.generated_tokens)]
    others = [*prompts[:2], *prompts[3:]]
    assert texts(outputs) == [own_text(model, prompt, 9) for prompt in others]


def test_prompts_that_cannot_be_continued_fail_alone():
    model, prompts = tiny_llama(max_position_embeddings=32), some_prompts(7)
    prompts[1], prompts[3], prompts[6] = [], [VOCAB], [1] * 40
    outputs = SelfSpecModel(model).generate_batch(prompts, max_new_tokens=3, do_sample=False)
    reasons = {name: output.error for name, output in outputs.items() if output.error}
    assert list(reasons) == ["req_1", "req_3", "req_6"]
    assert "empty prompt" in reasons["req_1"]
    assert "token ids must be in [0, 63]" in reasons["req_3"]
    assert "the prompt has 40 tokens, the model 32 positions" in reasons["req_6"]
    for name in ("req_0", "req_2", "req_4", "req_5"):
        prompt = outputs[name].prompt_ids
        assert outputs[name].generated_tokens == own_text(model, prompt, 3)


@pytest.mark.matrix(share=1)
@pytest.mark.parametrize("draft", ["early_exit", "tree"])
@pytest.mark.parametrize("name", ["gpt2", "gptj"])  # learned positions; a table of sines
def test_a_text_that_reaches_the_last_position_fails_alone(name, draft):
    model = model_of(name, "eager")  # 96 positions
    prompts = [*fixed(2, 6), *fixed(1, 91), *fixed(3, 4)]
    prompts = [[token % FAMILY_VOCAB for token in prompt] for prompt in prompts]
    outputs = SelfSpecModel(model).generate_batch(
        prompts, draft=draft, batch_size=3, max_new_tokens=20, do_sample=False
    )
    failed = outputs.pop("req_2")
    assert "the last of the model's 96 positions" in failed.error
    assert failed.generated_tokens == own_text(model, prompts[2], 6)
    others = [*prompts[:2], *prompts[3:]]
    assert texts(outputs) == [own_text(model, prompt, 20) for prompt in others]


@pytest.mark.parametrize("lengths", [(5,) * 6, (6, 40, 30, 4, 5)], ids=["alike", "places change"])
def test_broken_logits_end_their_request(lengths):
    """And leave nothing to the row that takes its place, a shorter one beside a longer one."""
    model, source = tiny_llama(), random.Random(2)
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = torch.nan
    prompts = [[source.randrange(1, 50) for _ in range(n)] for n in lengths]
    prompts[2][-1] = 60
    outputs = SelfSpecModel(model).generate_batch(
        prompts, batch_size=3, max_new_tokens=8, do_sample=False, suppress_tokens=[60]
    )
    assert "logits are NaN" in outputs.pop("req_2").error
    alone = [own_text(model, p, 8, suppress_tokens=[60]) for p in (*prompts[:2], *prompts[3:])]
    assert texts(outputs) == alone


def test_ctrl_c_leaves_what_is_finished(monkeypatch):
    model, prompts = tiny_llama(), some_prompts(20)
    steps, step = [], Session.step

    def interrupted(session, state):
        steps.append(state.rows)
        if len(steps) == 12:
            raise KeyboardInterrupt
        step(session, state)

    monkeypatch.setattr(Session, "step", interrupted)
    spec = SelfSpecModel(model)
    with pytest.warns(UserWarning, match=r"interrupted after \d+ finished requests"):
        outputs = spec.generate_batch(
            prompts, batch_size=4, draft="none", max_new_tokens=4, do_sample=False
        )
    assert 8 <= len(outputs) < 20
    for output in outputs.values():
        assert output.generated_tokens == own_text(model, output.prompt_ids, 4)
    assert len(spec.generate_batch(prompts, max_new_tokens=1, do_sample=False)) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 1)}, "attention_mask: generate_batch takes lists"),
        ({"num_return_sequences": 2, "do_sample": True}, "repeat a prompt once per continuation"),
        (
            {"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True)},
            "once per continuation",
        ),
        ({"output_scores": True}, "output_scores: generate_batch keeps only tokens"),
        ({"seed": [1, 2, 3]}, "seed has 3 numbers for 2 prompts"),
        *(({"batch_size": size}, f"from 1 on, got {size!r}") for size in (0, 2.5, None, "3")),
        (
            {"guidance_scale": 2, "negative_prompt_ids": torch.ones(2, 3).long()},
            "negative_prompt_ids has 2 rows: in generate_batch all requests have one",
        ),
        ({"num_beams": 2}, "num_beams=2: beam search"),
        ({"draft": "tre"}, "tree"),
        ({"custom_generate": "a/b"}, "custom_generate is another decoding method"),
        ({"token_healing": True}, "token_healing: generate_batch takes prompts as they are"),
        ({"generator": torch.Generator()}, "generator: in generate_batch .*; pass seed"),
        ({"progress_bar": True}, "progress_bar=True: count the outputs of generate_batch_iter"),
        ({"persistent_manager": True}, "persistent_manager=True: nothing is kept"),
        ({"warmup": False}, "warmup=False: nothing is warmed up"),
        (
            {"continuous_batching_config": ContinuousBatchingConfig()},
            "continuous_batching_config=.*choose batch_size",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_work_are_errors_before_anything_runs(options, message, monkeypatch):
    monkeypatch.setattr(Engine, "prefill", None)
    spec = SelfSpecModel(tiny_llama())
    for generate in (spec.generate_batch, spec.generate_batch_iter):
        with pytest.raises(ValueError, match=message):
            generate(some_prompts(2), max_new_tokens=4, **options)


# The arguments and the outputs of transformers' `generate_batch`


def test_arguments_stand_where_transformers_has_them():
    ours = inspect.signature(SelfSpecModel.generate_batch).parameters.values()
    theirs = inspect.signature(ContinuousMixin.generate_batch).parameters.values()
    for mine, own in zip(ours, theirs, strict=True):
        assert (mine.kind, mine.default) == (own.kind, own.default)
        assert mine.name == own.name or mine.kind is mine.VAR_KEYWORD


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["early_exit", "tree", "none", None])
@pytest.mark.parametrize("recorded", [False, True], ids=["", "timestamps"])
def test_outputs_have_the_fields_of_transformers(draft, recorded):
    prompts = [*some_prompts(5), [], [VOCAB + 7]]
    spec = SelfSpecModel(tiny_llama("sometimes"))
    before = time.perf_counter()
    outputs = spec.generate_batch(
        prompts,
        None,
        None,
        recorded,
        False,
        False,
        True,
        batch_size=2,
        max_new_tokens=6,
        draft=draft,
    )
    after = time.perf_counter()
    for number, output in enumerate(outputs.values()):
        assert isinstance(output, GenerationOutput) and output.is_finished()
        failed = number >= 5
        assert output.status == (RequestStatus.FAILED if failed else RequestStatus.FINISHED)
        assert (output.error is not None) == failed and output.logprobs == []
        begun, ended = output.lifespan
        assert before <= output.created_time <= ended <= after
        assert begun == -1 if failed else output.created_time <= begun <= ended
        assert len(output.generated_tokens) == (0 if failed else 6)
        if recorded:
            assert len(output.timestamps) == len(output.generated_tokens)
            assert output.timestamps == sorted(output.timestamps)
            assert all(begun <= moment <= ended for moment in output.timestamps)
        else:
            assert output.timestamps is None


def test_a_request_that_fails_on_its_way_has_ended():
    def broken(row, text):
        if len(text) > 6:
            raise RuntimeError("enough")
        return list(range(VOCAB))

    outputs = SelfSpecModel(tiny_llama()).generate_batch(
        [[1, 2], [3] * 4], max_new_tokens=9, prefix_allowed_tokens_fn=broken, do_sample=False
    )
    for output in outputs.values():
        assert output.status == RequestStatus.FAILED and output.is_finished()
        assert 0 < output.lifespan[0] <= output.lifespan[1] and "enough" in output.error


def test_a_drafter_that_cannot_take_in_rows_is_refused(monkeypatch):
    monkeypatch.setattr("selfspec.drafters.DRAFTERS", dict(DRAFTERS))

    @register_drafter
    class Keeps(DRAFTERS["none"]):
        name = "keeps"

        def select(self, rows):
            """Keeps something for each row."""

    assert Keeps.join is Drafter.join
    with pytest.raises(ValueError, match="'keeps' keeps something for each row"):
        SelfSpecModel(tiny_llama()).generate_batch(some_prompts(2), draft="keeps", max_new_tokens=4)


@pytest.mark.parametrize(
    "prompts",
    [["the cat"], "the cat", {"input_ids": [[1]]}, [[1], 2], [[1], None], [[1.5]], [[[1, 2]]]],
)
def test_a_prompt_is_a_list_of_token_ids(prompts):
    spec = SelfSpecModel(tiny_llama())
    for given in (prompts, iter(prompts)):
        with pytest.raises(TypeError, match=r'tokenizer\(prompts\)\["input_ids"\]'):
            spec.generate_batch(given, batch_size=1, max_new_tokens=2, do_sample=False)
    with pytest.raises(TypeError, match="lists of token ids, got None"):
        spec.generate_batch(None)


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": [3, "4"]}, {"max_new_tokens": {3, 4}}, {"seed": 1.5}, {"seed": [1, None]}],
    ids=str,
)
def test_numbers_of_requests_are_numbers(options):
    (name,) = options
    with pytest.raises(TypeError, match=f"{name} must be a number, or one per prompt, got "):
        SelfSpecModel(tiny_llama()).generate_batch([[3], [4]], **options)


def test_prompts_and_numbers_may_be_arrays():
    spec, prompts, lengths = SelfSpecModel(tiny_llama()), [[1, 2], [3, 4]], [2, 5]
    options = {"do_sample": True, "draft": {"drafter": "none", "rule": "coupled"}}
    expected = spec.generate_batch(prompts, max_new_tokens=lengths, seed=[3, 4], **options)
    for kind in (torch.tensor, np.array):
        found = spec.generate_batch(
            kind(prompts), max_new_tokens=kind(lengths), seed=np.int64(3), **options
        )
        for mine, other in zip(found.values(), expected.values(), strict=True):
            assert mine.prompt_ids == other.prompt_ids
            assert mine.generated_tokens == other.generated_tokens


@pytest.mark.parametrize("name", ["max_new_tokens", "seed"])
def test_a_prompt_beyond_the_numbers_fails_alone(name):
    spec, options = SelfSpecModel(tiny_llama()), {"max_new_tokens": 3, "do_sample": True}
    outputs = spec.generate_batch(iter([[1], [2]]), **{**options, name: [4]}).values()
    short = f"ValueError: {name} has 1 numbers, and there are more prompts"
    assert [output.error for output in outputs] == [None, short]
    with pytest.raises(ValueError, match=f"{name} has 0 numbers, and there are more prompts"):
        spec.generate_batch(iter([[1]]), **{**options, name: []})


def test_no_prompts_no_results():
    spec = SelfSpecModel(tiny_llama())
    assert spec.generate_batch([], max_new_tokens=4) == {}
    assert spec.generate_batch([], max_new_tokens=[], seed=[]) == {}


# Memory, and long prompts


def test_rows_that_left_make_room_for_those_that_join(monkeypatch):
    sizes, step = [], Session.step

    def noting(session, state):
        step(session, state)
        sizes.append(sum(w.nbytes for layer in state.slots.layers for w in layer._wholes))

    monkeypatch.setattr(Session, "step", noting)
    spec, prompts = SelfSpecModel(tiny_llama()), fixed(40, 8)
    lengths = some_lengths(40, 1, 50)
    lengths[0] = 50
    spec.generate_batch(prompts, batch_size=4, max_new_tokens=lengths, do_sample=False)
    assert len({*sizes}) == 1


def test_gates_are_put_in_once_for_all_requests(monkeypatch):
    times, put_in = [], Gates._put_in

    def noting(gates):
        times.append(gates)
        put_in(gates)

    monkeypatch.setattr(Gates, "_put_in", noting)
    spec, prompts = SelfSpecModel(tiny_llama()), some_prompts(20)
    lengths, options = some_lengths(20), {"batch_size": 3, "do_sample": False}
    outputs = spec.generate_batch(prompts, max_new_tokens=lengths, **options)
    assert len(times) == 1
    one_by_one = []
    for output in spec.generate_batch_iter(prompts, max_new_tokens=lengths, **options):
        assert not spec.decoder.gates.entered
        one_by_one.append(output)
    assert len(times) > 2
    assert {o.request_id: o.generated_tokens for o in one_by_one} == {
        name: output.generated_tokens for name, output in outputs.items()
    }


def test_time_between_two_results_is_not_part_of_a_round(monkeypatch):
    learnt = []
    monkeypatch.setattr(Rounds, "learn", lambda rounds, *round_: learnt.append(round_[2]))
    spec, options = SelfSpecModel(tiny_llama()), {"draft": "auto", "batch_size": 3}
    lengths = some_lengths(10, 2, 12)
    for _ in spec.generate_batch_iter(some_prompts(10), max_new_tokens=lengths, **options):
        time.sleep(0.5)
    assert len(learnt) > 10
    assert max(learnt) < 0.5


@pytest.mark.matrix
@pytest.mark.parametrize("draft", ["early_exit", "none", "prompt_lookup", "two_model"])
def test_a_long_prompt_is_prefilled_between_rounds(draft, monkeypatch):
    events, step, run = [], Session.step, Decoder.run

    def noting_step(session, state):
        events.append("round")
        step(session, state)

    def noting_run(decoder, tokens, *rest, **options):
        events.append(tokens.shape[1])
        return run(decoder, tokens, *rest, **options)

    monkeypatch.setattr(Session, "step", noting_step)
    monkeypatch.setattr(Decoder, "run", noting_run)
    model, prompts = tiny_llama(), [*fixed(3, 4), *fixed(1, 40), *fixed(2, 4)]
    spec, lengths = SelfSpecModel(model, draft_model=model), [30, 2, 30, 8, 8, 8]
    requests_equal_to_generate(spec, prompts, lengths, 3, draft=draft, prefill_chunk_size=8)
    if draft != "two_model":  # whose own prefill is not in pieces of this size
        chunks = [at for at, event in enumerate(events) if event == 8][:5]
        assert len(chunks) == 5
        between = itertools.pairwise(chunks)
        assert all(events[one:other].count("round") == 1 for one, other in between)


def test_rounds_between_passes_of_a_prefill_are_not_timed_as_prefill(monkeypatch):
    rounds, run = [], Batch._round

    def slow(batch):
        rounds.append(batch)
        time.sleep(0.1)
        run(batch)

    monkeypatch.setattr(Batch, "_round", slow)
    spec, prompts = SelfSpecModel(tiny_llama()), [*fixed(2, 4), *fixed(1, 80)]
    lengths = [40, 2, 2]
    spec.generate_batch(prompts, max_new_tokens=lengths, batch_size=2, prefill_chunk_size=4)
    assert len(rounds) > 20
    assert spec.last_stats.seconds["prefill"] < 1 < spec.last_stats.decode_seconds


@pytest.mark.parametrize("agreement", sorted(AGREEMENT))
def test_a_rewrapped_model_has_its_stats(agreement):
    spec = SelfSpecModel(tiny_llama(agreement))
    outputs = spec.generate_batch(some_prompts(6), batch_size=2, max_new_tokens=6, do_sample=False)
    counted = [output.stats for output in outputs.values()]
    for name in ("rounds", "drafted", "accepted", "emitted", "prefilled"):
        assert getattr(spec.last_stats, name) == sum(getattr(stats, name) for stats in counted)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_prompts():
    model = tiny_llama(dtype=torch.float32)
    prompts, lengths = some_prompts(1000), some_lengths(1000)
    assert_as_alone(model, prompts, lengths, "early_exit", 8)

"""Layers recorded as graphs: the same text, in shapes that stay, and a way back.

Most of this needs no GPU: what a CPU does is recorded here as a CUDA graph records what a GPU does,
one operation after the other, on the tensors that were there when it was recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from conftest import equal_to_generate, greedy, prompt, requests_equal_to_generate, tiny_llama
from families import VOCAB, build
from graph_tools import CpuTape, Meddling
from head_tools import own_head
from torch import Tensor

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder, Span
from selfspec.decoder.kernels import graphs
from selfspec.decoder.kernels.graphs import RECORDERS

DRAFTS = (
    "none",
    {"exit_layer": 2, "num_draft_tokens": 3},
    {"drafter": "tree", "exit_layer": 2, "num_draft_tokens": 3, "tree": {"nodes": 6}},
    "prompt_lookup",
)


class Picture:
    """Shows what was left once, and holds nothing of what it was made from."""

    def __init__(self, run: Callable[[], list[Tensor]]):
        self.outputs = run()
        self._then = [output.clone() for output in self.outputs]

    def replay(self) -> None:
        for output, then in zip(self.outputs, self._then, strict=True):
            output.copy_(then)


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> Iterator[type[CpuTape]]:
    """Graphs of what a CPU does, in pages that a text of a test turns."""
    monkeypatch.setitem(RECORDERS, "cpu", lambda device: CpuTape)
    monkeypatch.setattr(graphs, "GROWTH", 16)
    CpuTape.replays = 0
    return CpuTape


@pytest.fixture
def recorded(monkeypatch) -> list[int]:
    """How many recordings there were beside, each time that another was made."""
    beside, make_room = [], graphs.GraphedLayers._make_room

    def note(self):
        make_room(self)
        beside.append(len(self._recordings))

    monkeypatch.setattr(graphs.GraphedLayers, "_make_room", note)
    return beside


def writes_the_same(spec, *lengths, drafts=DRAFTS, vocab=VOCAB, new_tokens=24):
    ids, mask = (part.to(spec.decoder.device) for part in prompt(*lengths, vocab=vocab))
    equal_to_generate(spec, ids, mask, drafts, max_new_tokens=new_tokens)


def is_recorded(spec) -> bool:
    return spec.decoder.gates.graphs.problem is None


# Sliding windows beside full attention, attention written out, experts, layers side by side.
@pytest.mark.matrix(share=3)
@pytest.mark.parametrize("lengths", [(6,), (9, 5, 2)], ids=["one row", "ragged"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),
        ("qwen3", "eager"),
        ("gemma3_text", "sdpa"),
        ("mistral", "sdpa"),
        ("gpt_neox", "eager"),
        ("mixtral", "sdpa"),
        ("gpt_oss", "eager"),
        ("falcon", "sdpa"),
    ],
)
def test_text_is_the_models_own(family, attention, lengths):
    spec = SelfSpecModel(build(family, attention), kernels="graphs")
    for draft in DRAFTS:
        CpuTape.replays = 0
        writes_the_same(spec, *lengths, drafts=(draft,), new_tokens=24)  # two pages
        assert CpuTape.replays > 5, draft
    assert is_recorded(spec)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["block", "fused"])
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
def test_a_heads_own_layer_is_recorded(kind, drafter, monkeypatch):
    target = tiny_llama("sometimes", dtype=torch.float32)
    head = own_head(Decoder(target), kind, 1)
    spec = SelfSpecModel(target, heads=[head], kernels="graphs")
    replayed, replay = set(), graphs._Recording.replay

    def note(self, leaves):
        replayed.update(self.layers)
        return replay(self, leaves)

    monkeypatch.setattr(graphs._Recording, "replay", note)
    draft = {"drafter": drafter, "head": kind, "exit_layer": 1, "num_draft_tokens": 3}
    writes_the_same(spec, 6, drafts=(draft,), vocab=64)
    writes_the_same(spec, 9, 5, 2, drafts=(draft,), vocab=64)
    assert replayed == {head.layer, *target.model.layers} and is_recorded(spec)


def test_a_draft_model_is_recorded_too():
    other = tiny_llama("always", dtype=torch.float32, seed=3)
    target = tiny_llama(dtype=torch.float32)
    spec = SelfSpecModel(target, draft_model=other, kernels="graphs")
    writes_the_same(spec, 6, drafts=("two_model",), vocab=64)
    small = spec.engine.draft_models.chosen(DraftConfig(drafter="two_model")).decoder
    assert small.gates.graphs is not None and small.gates.graphs.problem is None


def test_sampled_text_is_that_of_layers_as_they_are():
    texts = []
    for kernels in ("eager", "graphs"):
        spec = SelfSpecModel(tiny_llama(dtype=torch.float64), kernels=kernels)
        ids, mask = prompt(9, 5, 2)
        generator = torch.Generator().manual_seed(3)
        options = {"do_sample": True, "max_new_tokens": 40, "generator": generator}
        texts.append(spec.generate(ids, attention_mask=mask, draft=DRAFTS[1], **options))
    assert torch.equal(*texts) and CpuTape.replays > 10


@pytest.mark.parametrize("family", ["falcon", "gptj"])  # bodies that take layers' tuples apart
def test_a_heads_own_layer_is_recorded_where_the_models_own_code_runs(family):
    target = build(family, "eager")
    head = own_head(Decoder(target), "block", 1)
    spec = SelfSpecModel(target, heads=[head], kernels="graphs")
    target.base_model.register_forward_hook(lambda *call: None)
    draft = {"head": "block", "exit_layer": 1, "num_draft_tokens": 3}
    writes_the_same(spec, 9, 5, 2, drafts=(draft,))
    assert CpuTape.replays and is_recorded(spec)


def test_a_shape_is_recorded_once_in_a_page_and_few_shapes_come(recorded):
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="graphs")
    writes_the_same(spec, 6, drafts=("none",), vocab=64, new_tokens=60)
    assert len(recorded) == 4  # pages of 66 tokens: the fifth is too short to be worth it


def test_what_was_not_used_for_longest_makes_room(recorded, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="graphs")
    writes_the_same(spec, 6, drafts=("none",), vocab=64, new_tokens=60)
    assert recorded == [0, 1, 1, 1]


def test_what_reads_keys_that_are_gone_makes_room(recorded, monkeypatch):
    """Keys move when they need more room than was reserved."""
    monkeypatch.setitem(RECORDERS, "cpu", lambda device: Picture)
    monkeypatch.setattr("selfspec.generation.loop._FIRST_ROOM", 20)
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="graphs")
    spec.generate(prompt(6)[0], do_sample=False, draft="none", max_new_tokens=60)
    assert recorded == [0, 1, 0, 1]


def test_recordings_outlive_rows_that_leave_and_join(recorded):
    target = tiny_llama(dtype=torch.float32)
    spec, texts = SelfSpecModel(target, kernels="graphs"), prompt(*[6] * 24)[0]
    requests_equal_to_generate(spec, texts.tolist(), [9, 13] * 12, draft="none")
    # One or two rows in two pages, and the prefill of two prompts.
    assert is_recorded(spec) and len(recorded) <= 5


def test_caches_that_take_turns_have_recordings_of_their_own(recorded):
    decoder = Decoder(tiny_llama(dtype=torch.float32), kernels="graphs")
    ids, _ = prompt(6)
    everything, caches = Span(0, decoder.depth), [decoder.new_slots(1) for _ in range(2)]
    with decoder, torch.inference_mode():
        for slots in caches:
            decoder.run(ids, everything, slots)
            slots.commit([6])
        for slots in caches * 8:
            decoder.run(ids[:, :1], everything, slots)
    assert len(recorded) == 2


# Recordings that outlive their call

BLOCK = {"head": "block", "exit_layer": 1, "num_draft_tokens": 3}


@pytest.fixture
def twice(recorded):
    """Generates until every shape has occurred often, and once more; counts the recordings."""

    def run(spec, between=lambda: None, drafts=("none",), lengths=((6,), (6,)), vocab=64):
        for _ in range(4):
            writes_the_same(spec, *lengths[0], drafts=drafts, vocab=vocab, new_tokens=20)
        first = len(recorded)
        between()
        writes_the_same(spec, *lengths[1], drafts=drafts, vocab=vocab, new_tokens=20)
        assert first
        return first, len(recorded) - first

    return run


def test_the_next_call_needs_no_recordings_of_its_own(twice):
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="graphs")
    assert twice(spec, drafts=DRAFTS[:2])[1] == 0
    longer = twice(spec, lengths=((6,), (50,)))  # its keys need more room
    assert longer[1] > 0 and twice(spec, lengths=((5, 6), (6,)))[1] > 0


def test_keys_of_a_heads_own_layer_are_used_again(twice):
    target = tiny_llama("sometimes", dtype=torch.float32)
    spec = SelfSpecModel(target, heads=[own_head(Decoder(target), "block", 1)], kernels="graphs")
    assert twice(spec, drafts=(BLOCK,))[1] == 0


def exchange_weights(target):
    with torch.no_grad():
        for layer in target.model.layers:  # which weights of another address
            layer.mlp.down_proj.weight = torch.nn.Parameter(2 - layer.mlp.down_proj.weight)


def change_in_place(target):
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.mul_(2)


def exchange_activation(target):
    target.model.layers[0].mlp.act_fn = torch.nn.Tanh()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "again"),
    [
        (exchange_weights, True),
        (change_in_place, False),  # recorded kernels read the same memory
        (exchange_activation, True),
        (lambda target: target.double(), True),
    ],
    ids=["weights", "in place", "activation", "dtype"],
)
def test_what_changes_between_calls_is_seen(twice, recorder, change, again):
    target = tiny_llama("always", dtype=torch.float32)
    spec = SelfSpecModel(target, kernels="graphs")
    _, anew = twice(spec, lambda: change(target))
    assert bool(anew) == again and is_recorded(spec)


def test_a_cache_that_the_caller_has_is_not_used_for_another_call():
    target = tiny_llama(dtype=torch.float32)
    spec = SelfSpecModel(target, kernels="graphs")
    ids, _ = prompt(6)
    options = {"do_sample": False, "draft": "none", "max_new_tokens": 12}
    first = spec.generate(ids, return_dict_in_generate=True, **options)
    spec.generate(ids.flip(1), **options)
    on = spec.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert torch.equal(on, greedy(target, first.sequences, max_new_tokens=12))


def test_recordings_are_used_from_turn_to_turn_and_see_exchanged_weights(recorded):
    target = tiny_llama("always", dtype=torch.float32)
    spec, plain = SelfSpecModel(target, kernels="graphs"), SelfSpecModel(target)
    ids, _ = prompt(6)
    options = {"do_sample": False, "draft": "none", "return_dict_in_generate": True}
    first = spec.generate(ids, max_new_tokens=7, **options)
    assert len(recorded) == 1
    exchange_weights(target)
    # A turn later the keys are the same tensors, and so is the page.
    caches = first.past_key_values, copy.deepcopy(first.past_key_values)
    texts = [
        model.generate(first.sequences, max_new_tokens=2, past_key_values=cache, **options)
        for model, cache in zip((spec, plain), caches, strict=True)
    ]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


# The way back


class Worn(CpuTape):
    def replay(self):
        super().replay()
        self.outputs[-1].mul_(1.001)


def broken(run):
    raise RuntimeError("out of memory")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("recorders", "message"),
    [
        ({"cpu": lambda device: Worn}, r"LlamaForCausalLM are not recorded .*differs"),
        ({"cpu": lambda device: broken}, "RuntimeError: out of memory"),
        ({}, "a device of the kind cpu has none"),
    ],
)
def test_what_cannot_be_recorded_is_told_once(monkeypatch, recorders, message):
    monkeypatch.delitem(RECORDERS, "cpu")
    for kind, recorder in recorders.items():
        monkeypatch.setitem(RECORDERS, kind, recorder)
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="graphs")
    with pytest.warns(UserWarning, match=message) as told:
        writes_the_same(spec, 6)
        writes_the_same(spec, 9, 5)
    assert len(told) == 1


def test_hooks_of_between_calls_are_called():
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="graphs")
    writes_the_same(spec, 6)
    seen = []
    mlp = spec.decoder.layers[3].mlp
    mlp.register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    with pytest.warns(UserWarning, match=r"hooks on LlamaDecoderLayer\.mlp"):
        writes_the_same(spec, 6)
    assert 1 in seen and 4 in seen  # passes of rounds, not only the prefill


@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("gpt_neo", "eager", "tables of its own"),
        ("bloom", "eager", "count keys"),
        ("mpt", "eager", "count keys"),
    ],
)
def test_families_that_cannot_be_recorded(family, attention, reason):
    with pytest.warns(UserWarning, match=reason):
        spec = SelfSpecModel(build(family, attention), kernels="graphs")
    writes_the_same(spec, 6, drafts=DRAFTS[:2])
    assert CpuTape.replays == 0


def test_layers_that_are_skipped_in_part_run_as_they_are():
    spec = SelfSpecModel(tiny_llama("sometimes", dtype=torch.float32), kernels="graphs")
    draft = {"drafter": "skip_sublayers", "skip": {"attention": [1], "mlp": [2]}}
    writes_the_same(spec, 6, drafts=(draft,), vocab=64)
    assert is_recorded(spec) and CpuTape.replays


@pytest.mark.matrix
@pytest.mark.parametrize("meddle", ["", "first", "between", "in place"])
def test_layers_are_recorded_only_where_the_body_hands_hidden_states_on(meddle):
    model = tiny_llama(dtype=torch.float32)
    model.model.__class__ = Meddling
    model.model.meddle = meddle  # pyright: ignore[reportAttributeAccessIssue]
    spec = SelfSpecModel(model, kernels="graphs")
    alone = meddle in ("", "first")
    with nullcontext() if alone else pytest.warns(UserWarning, match="Meddling does more than"):
        writes_the_same(spec, 6, vocab=64)
    assert is_recorded(spec) == alone


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("qwen3", "eager")])
@pytest.mark.parametrize("lengths", [(6,), (9, 5, 2)])
def test_cuda_graphs_write_the_models_own_text(family, attention, lengths, monkeypatch, recorded):
    monkeypatch.setattr(graphs, "GROWTH", 256)
    spec = SelfSpecModel(build(family, attention).cuda(), kernels="graphs")
    writes_the_same(spec, *lengths)
    assert is_recorded(spec) and recorded


@pytest.mark.matrix
@pytest.mark.parametrize("how", [{"precision": "int8"}, {"precision": "int4", "window": 4}])
def test_approximate_drafts_have_graphs_of_their_own(how):
    spec = SelfSpecModel(tiny_llama("seldom"), kernels="graphs")
    draft = {"exit_layer": 4, "num_draft_tokens": 3, **how}
    writes_the_same(spec, 9, drafts=(draft, "none", draft), vocab=64)
    with torch.no_grad():
        for own, other in zip(
            spec.causal_lm.parameters(), tiny_llama("seldom", seed=1).parameters(), strict=True
        ):
            own.copy_(other)  # graphs read copies where they are
    writes_the_same(spec, 9, drafts=(draft,), vocab=64)
    if "window" not in how:
        assert spec.last_stats.acceptance_rate > 0.7

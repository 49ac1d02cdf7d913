"""Layers recorded as graphs: the same text, in shapes that stay, and a way back.

Most of this needs no GPU: what a CPU does is recorded here as a CUDA graph records what a GPU does,
one operation after the other, on the tensors that were there when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import greedy, prompt, tiny_llama
from families import VOCAB, build
from head_tools import own_head
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder, graphs

DRAFTS = (
    "none",
    {"exit_layer": 2, "num_draft_tokens": 3},
    {"drafter": "tree", "exit_layer": 2, "num_draft_tokens": 3, "tree": {"nodes": 6}},
    "prompt_lookup",
)


class Watch(TorchDispatchMode):
    """Notes every operation, and refuses those that a stream cannot record."""

    def __init__(self):
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        numbered = func is torch.ops.aten.index.Tensor and not any(
            part is not None and part.dtype == torch.bool for part in args[1]
        )
        if tags & set(func.tags) and not numbered:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, output))
        return output


class CpuTape:
    """Does the same operations on the same tensors again."""

    replays = 0

    def __init__(self, run: Callable[[], list[Tensor]], device: torch.device):
        assert device.type == "cpu"
        with Watch() as watch:
            self.outputs = run()
        self._done = watch.done

    def replay(self) -> None:
        type(self).replays += 1
        for func, args, kwargs, output in self._done:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> Iterator[type[CpuTape]]:
    """Graphs of what a CPU does, in pages that a text of a test turns."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", CpuTape)
    monkeypatch.setattr(graphs, "PAGE", 16)
    CpuTape.replays = 0
    return CpuTape


def writes_the_same(spec, *lengths, drafts=DRAFTS, vocab=VOCAB, new_tokens=40):
    device = spec.engine.decoder.device
    ids, mask = (part.to(device) for part in prompt(*lengths, vocab=vocab))
    own = greedy(spec.model, ids, mask, max_new_tokens=new_tokens)
    for draft in drafts:
        out = spec.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, draft=draft
        )
        assert torch.equal(out, own), draft


def is_recorded(spec) -> bool:
    return spec.engine.decoder.gates.graphs.problem is None


# Sliding windows beside full attention, attention written out, experts, layers side by side.
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
        writes_the_same(spec, *lengths, drafts=(draft,))
        assert CpuTape.replays > 5, draft
    assert is_recorded(spec)


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
    small = spec.engine.draft_models.chosen(DraftConfig(drafter="two_model"))
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


def test_a_shape_is_recorded_once_in_a_page_and_few_shapes_come():
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="graphs")
    recorded, record = [], graphs._Recording.record

    def note(self, recorder):
        recorded.append(self)
        return record(self, recorder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs._Recording, "record", note)
        writes_the_same(spec, 6, drafts=("none",), vocab=64, new_tokens=60)
    assert len(recorded) == 4  # pages of 66 tokens: the fifth is too short to be worth it


def test_what_was_recorded_ends_with_its_call():
    target = tiny_llama("always", dtype=torch.float32)
    spec = SelfSpecModel(target, kernels="graphs")
    writes_the_same(spec, 6, vocab=64)
    with torch.no_grad():
        for layer in target.model.layers:  # which weights of another address
            layer.mlp.down_proj.weight = torch.nn.Parameter(2 - layer.mlp.down_proj.weight)
    writes_the_same(spec, 6, vocab=64)
    assert is_recorded(spec)


def test_no_more_are_recorded_than_allowed(monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 1)
    spec = SelfSpecModel(tiny_llama(dtype=torch.float32), kernels="graphs")
    writes_the_same(spec, 6, vocab=64)
    assert len(spec.engine.decoder.gates.graphs._recordings) <= 1 and CpuTape.replays


# The way back


def test_a_recording_that_says_something_else_is_not_used(monkeypatch):
    class Worn(CpuTape):
        def replay(self):
            super().replay()
            self.outputs[-1].mul_(1.001)

    monkeypatch.setitem(graphs.RECORDERS, "cpu", Worn)
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="graphs")
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM are not recorded .*differs") as told:
        writes_the_same(spec, 6)
        writes_the_same(spec, 9, 5)
    assert len(told) == 1


def test_an_error_while_recording_is_told_once(monkeypatch):
    def broken(run, device):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(graphs.RECORDERS, "cpu", broken)
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="graphs")
    with pytest.warns(UserWarning, match="RuntimeError: out of memory") as told:
        writes_the_same(spec, 6)
        writes_the_same(spec, 9, 5)
    assert len(told) == 1


def test_a_device_without_graphs_is_told_once(monkeypatch):
    monkeypatch.delitem(graphs.RECORDERS, "cpu")
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="graphs")
    with pytest.warns(UserWarning, match="a device of the kind cpu has none") as told:
        writes_the_same(spec, 6)
        writes_the_same(spec, 9, 5)
    assert len(told) == 1


def test_hooks_of_between_calls_are_called():
    spec = SelfSpecModel(build("llama", "sdpa"), kernels="graphs")
    writes_the_same(spec, 6)
    seen = []
    mlp = spec.engine.decoder.layers[3].mlp
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
    draft = {"drafter": "layer_skip", "skip": {"attention": [1], "mlp": [2]}}
    writes_the_same(spec, 6, drafts=(draft,), vocab=64)
    assert is_recorded(spec) and CpuTape.replays


# On a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("qwen3", "eager")])
@pytest.mark.parametrize("lengths", [(6,), (9, 5, 2)])
def test_cuda_graphs_write_the_models_own_text(family, attention, lengths, monkeypatch):
    monkeypatch.setattr(graphs, "PAGE", 256)
    spec = SelfSpecModel(build(family, attention).cuda(), kernels="graphs")
    writes_the_same(spec, *lengths)
    assert is_recorded(spec)
    assert spec.engine.decoder.gates.graphs._recordings

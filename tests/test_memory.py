"""What a process keeps that lives long: nothing of calls, and no model that nobody holds.

Garbage collection comes late, and does not see the memory of a device, so nothing may wait for it.
"""

import gc
import weakref

import pytest
import torch
from conftest import prompt, tiny_llama

from selfspec import SelfSpecModel
from selfspec.decoder.cache import SlotCache

IDS, MASK = prompt(4, 7)
PROMPTS = [[5, 9, 2], [7, 1, 3, 8], [4, 6]]
DRAFTS = ("none", "early_exit", "prompt_lookup", "auto", "cascade", "lookahead", "tree")
OPTIONS = [
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
]


@pytest.fixture
def no_collection():
    """Only what nothing refers to is freed meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(kind: type) -> int:
    return sum(isinstance(found, kind) for found in gc.get_objects())


@pytest.mark.parametrize("draft", [*DRAFTS, "skip_sublayers", "two_model"])
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampled", "penalised"])
def test_a_call_leaves_no_tensors_to_the_garbage_collector(draft, options, no_collection):
    spec = SelfSpecModel(tiny_llama(), draft_model=tiny_llama(seed=1))
    options = {"attention_mask": MASK, "max_new_tokens": 8, "draft": draft, **options}
    counts = []
    for _ in range(4):
        spec.generate(IDS, **options)
        counts.append(alive(torch.Tensor))
    assert counts[1:] == counts[:1] * 3


def test_batches_are_freed_at_their_end_and_where_they_stop(no_collection):
    spec = SelfSpecModel(tiny_llama())
    options = {"max_new_tokens": 8, "do_sample": False, "batch_size": 2}
    others = alive(SlotCache)
    spec.generate_batch(PROMPTS, **options)
    assert alive(SlotCache) == others
    outputs = spec.generate_batch_iter(PROMPTS, **options)
    next(outputs)
    assert alive(SlotCache) > others
    del outputs
    assert alive(SlotCache) == others


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("direct", torch.float32), ("prepacked", torch.bfloat16)],
    ids=["direct", "prepacked"],
)
def test_models_are_freed_with_what_wraps_them(kernels, dtype, no_collection):
    model, small = tiny_llama(dtype=dtype), tiny_llama(dtype=dtype, seed=1)
    held = [weakref.ref(model), weakref.ref(small)]
    spec = SelfSpecModel(model, kernels=kernels)
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
    for draft in (*DRAFTS, {"exit_layer": 4, "precision": "int8"}):
        spec.generate(IDS, **options, draft=draft)
    spec.generate(IDS, **options, assistant_model=small)
    del small
    assert held[1]() is None
    del spec, model
    assert held[0]() is None

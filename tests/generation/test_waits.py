"""What would wait for a device in a round, counted on the CPU: at most one thing.

Operations whose result the host needs before it can go on are seen by dispatch (scalars, sizes that
depend on values) or by the method of `Tensor` that asks for it.
"""

from __future__ import annotations

import pytest
import torch
from conftest import BIASES_IN_BLOCKS, EXIT, prompt, tiny_llama
from head_tools import own_head
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor

from selfspec import SelfSpecModel
from selfspec.generation import rounds
from selfspec.generation.loop import Session
from selfspec.sampling import processors
from selfspec.schedule import stopping

READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
WAITS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}


class Waits(TorchDispatchMode):
    """Notes what would wait for a device."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen: list[str] = []
        self._inside = False
        for name in READS:
            own = getattr(Tensor, name)
            monkeypatch.setattr(Tensor, name, self._noting(name, own))

    def _noting(self, name, own):
        def read(tensor, *args, **kwargs):
            if self._inside:  # one method asks through another
                return own(tensor, *args, **kwargs)
            self.seen.append(name)
            self._inside = True
            try:
                return own(tensor, *args, **kwargs)
            finally:
                self._inside = False

        return read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if not self._inside and (
            name in WAITS or (name.startswith("aten::index") and masked(args))
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def masked(args):
    """Whether a tensor is indexed by a mask, whose count the host has to know."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(index is not None and index.dtype == torch.bool for index in indices)


@pytest.fixture
def waits(monkeypatch):
    """`waits(spec, **options)`: what each round of a call waited for."""

    def count(spec, ids, mask, **options):
        monkeypatch.setattr(rounds, "on_host", rounds.fetch)  # as on a device
        for module in (stopping, processors):
            monkeypatch.setattr(module, "is_at_hand", lambda tensor: False)
        found, step = [], Session.step

        def counted(session, state):
            with monkeypatch.context() as patch, Waits(patch) as seen:
                step(session, state)
            found.append(seen.seen)

        monkeypatch.setattr(Session, "step", counted)
        options = {"max_new_tokens": 16, "pad_token_id": 0, **options}
        spec.generate(ids, attention_mask=mask, **options)
        monkeypatch.setattr(Session, "step", step)
        return found

    return count


def test_what_waits_is_seen(monkeypatch):
    numbers = torch.arange(3)
    with Waits(monkeypatch) as seen:
        numbers.tolist()
        numbers[0].item()
        bool(numbers[0] < 1)
        numbers.nonzero()
        numbers.unique()
        _ = numbers[numbers > 1]
        torch.equal(numbers, numbers)
        _ = numbers[torch.tensor([0])] + 1
    assert len(seen.seen) == 7


IDS, MASK = prompt(9, 5, 7)
REPEATING = torch.tensor([[5, 9, 3, 7] * 4] * 3)
DRAFTS = {
    "plain": {"drafter": "none"},
    "shared": {"head": "shared", "exit_layer": EXIT},
    "block": {"head": "block", "exit_layer": EXIT},
    "fused": {"head": "fused", "exit_layer": 0},
    "parallel": {"head": "fused", "exit_layer": 1},
    "lookup": {"drafter": "prompt_lookup", "lookup": {"shortest": 1}},
    "cascade": {"drafter": "cascade", "head": "block", "exit_layer": EXIT},
    "tree, shared": {"drafter": "tree", "head": "shared", "exit_layer": EXIT},
    "tree, block": {"drafter": "tree", "head": "block", "exit_layer": EXIT},
    "tree, fused": {"drafter": "tree", "head": "fused", "exit_layer": 0},
    "tree, parallel": {"drafter": "tree", "head": "fused", "exit_layer": 1},
    "coupled": {"head": "block", "exit_layer": EXIT, "rule": "coupled"},
    "optimal": {"head": "block", "exit_layer": EXIT, "schedule": "optimal"},
    "default": None,
}
PROCESSORS = {
    "no processors": {},
    "pointwise": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "in blocks": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "eos_token_id": 3,
        **({"bad_words_ids": [[4, 5], [6]]} if BIASES_IN_BLOCKS else {}),
        "exponential_decay_length_penalty": (4, 1.1),
        "begin_suppress_tokens": [7],
        "forced_eos_token_id": 3,
    },
}


@pytest.fixture(scope="module")
def specs():
    model = tiny_llama("sometimes", dtype=torch.float32)
    bare = SelfSpecModel(model)
    heads = [
        own_head(bare.decoder, *at) for at in (("block", EXIT), ("fused", 0), ("fused parallel", 1))
    ]
    return {True: SelfSpecModel(model, heads), False: bare}


@pytest.mark.matrix
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_round_waits_once(waits, specs, draft, processors, sampled):
    spec = specs[DRAFTS[draft] is not None]
    options = {**PROCESSORS[processors], "do_sample": sampled, "draft": DRAFTS[draft]}
    repeats = draft in ("lookup", "cascade", "default")
    ids, mask = (REPEATING, torch.ones_like(REPEATING)) if repeats else (IDS, MASK)
    found = waits(spec, ids, mask, **options)
    assert len(found) > 2
    assert max(map(len, found)) == 1, found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_lookahead_waits_for_its_guesses_as_well(waits, specs, sampled):
    found = waits(specs[False], IDS, MASK, do_sample=sampled, draft="lookahead", max_new_tokens=30)
    assert max(map(len, found)) == 2


class Unknown(LogitsProcessor):
    """Changes nothing."""

    def __call__(self, input_ids, scores):
        return scores


def test_a_processor_that_is_not_known_waits_in_a_tree(waits, specs):
    found = waits(specs[True], IDS, MASK, draft=DRAFTS["tree, block"], logits_processor=[Unknown()])
    assert min(map(len, found)) > 1

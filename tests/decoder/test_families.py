"""Equality: every family's greedy text is its own, whatever is drafted."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from families import (
    ALL_ROWS,
    CASES,
    CASES_BY_FAMILY,
    FAMILIES,
    LAYERS,
    LONG_ROW,
    NEW_TOKENS,
    build,
    model_of,
    own_text,
    prompts,
)
from head_tools import Seen, assert_reads_as_forced, own_head, record
from torch import Tensor

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.heads import BlockHead

EXITS = (1, LAYERS // 2, LAYERS - 1)
DRAFTS = (1, 4, 8)
SIDES = ("left", "right")
Combination = tuple[int, int, str, slice]


def check_equality(family: str, attention: str, combinations: list[Combination]) -> None:
    """Assert equal text for each combination of exit, draft length, padding side and batch."""
    model = model_of(family, attention)
    spec = SelfSpecModel(model)
    expected = own_text(model, *prompts("left"))
    assert expected.unique().numel() > 3, "a text that repeats itself shows little"
    for exit_layer, num_draft_tokens, side, rows in combinations:
        tokens, mask = prompts(side)
        out = spec.generate(
            tokens[rows],
            attention_mask=mask[rows],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            draft={"exit_layer": exit_layer, "num_draft_tokens": num_draft_tokens},
        )
        assert torch.equal(out[:, -NEW_TOKENS:], expected[rows]), (exit_layer, num_draft_tokens)


@pytest.mark.matrix(share=1)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_greedy_text_is_the_models_own(family: str, attention: str) -> None:
    # On three rows, and on the one that is longer than two windows.
    ragged, long = (LAYERS // 2, 8, "right", ALL_ROWS), (LAYERS - 1, 4, "left", LONG_ROW)
    check_equality(family, attention, [ragged, long])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_every_combination_gives_the_models_own_text(family: str, attention: str) -> None:
    check_equality(family, attention, list(product(EXITS, DRAFTS, SIDES, (ALL_ROWS, LONG_ROW))))


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gemma4_text"])
def test_the_final_norm_is_the_last_module_before_the_lm_head(family: str) -> None:
    """Wherever it and norms of embeddings stand in the body."""
    model = build(family, "eager")
    decoder, called = Decoder(model), []
    parts = (*decoder.layers, *decoder.gates.base.children(), decoder.lm_head)
    for module in parts:
        module.register_forward_hook(lambda module, *_: called.append(module))
    model(prompts("left")[0])
    assert called[-2:] == [decoder.final_norm, decoder.lm_head]


def test_the_default_drafts_over_inputs_of_every_layer() -> None:
    """Gemma 4 normalizes what it adds in each layer, with a norm of another width."""
    model = build("gemma4_text", "sdpa", agreement=0.1)
    expected = own_text(model, *prompts("left"))
    tokens, mask = prompts("left")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    out = SelfSpecModel(model).generate(tokens, attention_mask=mask, **options)
    assert torch.equal(out[:, -NEW_TOKENS:], expected)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_can_be_trained_after_it_has_written(family: str) -> None:
    # Passes make tensors that gradients refuse; none may stay in the model.
    model = model_of(family, CASES_BY_FAMILY[family])
    spec = SelfSpecModel(model, heads=[BlockHead.build(Decoder(model), 1)])
    tokens, _ = prompts("left")
    text = spec.generate(tokens[LONG_ROW], max_new_tokens=NEW_TOKENS, do_sample=False)
    model.train()
    model(text, labels=text).loss.backward()
    reached = [p.grad is not None for p in model.get_input_embeddings().parameters()]
    assert all(reached)
    for part in (*model.modules(), *(m for head in spec.heads for m in head.modules())):
        held = [*vars(part).values(), *part._parameters.values(), *part._buffers.values()]
        assert not any(isinstance(value, Tensor) and value.is_inference() for value in held)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("agreement", "rates"), [(0.0, (1.0, 1.0)), (0.3, (0.01, 0.99))])
def test_exits_that_agree_always_or_sometimes(
    family: str, agreement: float, rates: tuple[float, float]
) -> None:
    model = model_of(family, CASES_BY_FAMILY[family], agreement)
    spec = SelfSpecModel(model)
    tokens, mask = prompts("left")
    out = spec.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        draft={"exit_layer": LAYERS // 2, "num_draft_tokens": 4},
    )
    assert torch.equal(out[:, -NEW_TOKENS:], own_text(model, tokens, mask))
    assert spec.last_stats is not None
    assert rates[0] <= spec.last_stats.acceptance_rate <= rates[1]


FAST_WITH_LAYER = {
    "llama",
    "gpt2",
    "qwen3",
    "gemma3_text",
    "mistral",
    "mixtral",
    "bloom",
    "gpt_neo",
}
WITH_LAYER = [
    pytest.param(family, marks=() if family in FAST_WITH_LAYER else pytest.mark.slow)
    for family in FAMILIES
]


def check_reading(spec: Any, seen: list[Seen]) -> None:
    """Assert that the spec's only head read while decoding what it reads while fitted."""
    if spec.decoder.counts_keys:
        seen = [reading for reading in seen if reading.step == 0]
    assert_reads_as_forced(spec.decoder, spec.heads[0], seen[::7], close_in_single)


def with_head(family: str, kind: str, exit_layer: int, noise: float, **options: Any) -> Any:
    """A model of `family` with one head, whose layer is a copy disturbed by `noise`."""
    model = model_of(family, CASES_BY_FAMILY[family])
    head = own_head(Decoder(model), kind, exit_layer, noise=noise, **options)
    return SelfSpecModel(model, heads=[head])


def check_text(spec: Any, num_draft_tokens: int) -> None:
    """Assert that the spec's only head leaves the model's own text as it is."""
    tokens, mask = prompts("left")
    head = spec.heads[0]
    draft = {"head": head.kind, "num_draft_tokens": num_draft_tokens}
    out = spec.generate(tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, draft=draft)
    assert torch.equal(out[:, -NEW_TOKENS:], own_text(spec.model, tokens, mask))


@pytest.mark.parametrize("family", WITH_LAYER)
def test_a_copy_of_the_last_layer_drafts_what_the_model_says(family: str) -> None:
    """So its KV, masks and positions are the layer's own, in rows of different lengths."""
    spec = with_head(family, "block", LAYERS - 1, noise=0.0)
    check_text(spec, 4)
    assert spec.last_stats.acceptance_rate == 1


@pytest.mark.matrix
@pytest.mark.parametrize("family", WITH_LAYER)
@pytest.mark.parametrize("place", [3, 4])  # one with full, one with sliding-window attention
def test_a_fused_head_reads_while_decoding_what_it_reads_while_fitted(
    family: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_head(family, "fused", LAYERS // 2, noise=0.1, place=place)
    seen = record(monkeypatch)
    check_text(spec, 3)
    check_reading(spec, seen)


@pytest.mark.matrix
@pytest.mark.parametrize("family", WITH_LAYER)
@pytest.mark.parametrize("exit_layer", [0, LAYERS // 2])
def test_masks_read_while_decoding_what_they_read_while_fitted(
    family: str, exit_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the exit and in the head's layer, in rows of different lengths."""
    spec = with_head(family, "fused parallel", exit_layer, noise=0.1)
    seen = record(monkeypatch)
    for num_draft_tokens in (3, 1):
        check_text(spec, num_draft_tokens)
    check_reading(spec, seen)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_head_at_the_embedding_reads_many_tokens_and_says_one(family: str, trimmed: bool) -> None:
    """Rows that kept drafts are caught up with in one pass, of which logits of the end are left."""
    model = model_of(family, CASES_BY_FAMILY[family], agreement=0.1)
    head = own_head(Decoder(model), "fused", 0, noise=0.01, trimmed=trimmed)
    spec = SelfSpecModel(model, heads=[head])
    check_text(spec, 3)
    assert spec.last_stats is not None
    assert spec.last_stats.accepted > 0 or trimmed  # half of all tokens may be none that it writes
    tokens, mask = prompts("left")
    one = spec.generate(tokens[LONG_ROW], attention_mask=mask[LONG_ROW], max_new_tokens=NEW_TOKENS)
    assert torch.equal(one[:, -NEW_TOKENS:], own_text(model, tokens[LONG_ROW], mask[LONG_ROW]))


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_heads_of_another_architecture_than_the_target(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_head(family, kind, 0, noise=0.01)
    seen = record(monkeypatch)
    check_text(spec, 3)
    assert spec.last_stats.drafted > 0
    if kind == "eagle3":
        assert_reads_as_forced(spec.decoder, spec.heads[0], seen[::7], close_in_single)


def close_in_single(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)

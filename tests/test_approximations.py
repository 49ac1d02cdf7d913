"""Approximate drafts: weights in fewer bits, fewer keys. What is written is the model's own."""

from functools import cache

import pytest
import torch
from conftest import greedy, prompt, tiny_llama
from families import HYBRIDS, LAYERS
from families import build as build_family
from test_families import ALL_ROWS, CASES_BY_FAMILY, model_of, own_text, prompts

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder, Span
from selfspec.decoder.kernels.low_precision import KINDS, round_to_4_bits
from selfspec.drafters import DRAFTERS
from selfspec.generation.loop import Session
from selfspec.heads import build_head

PRECISIONS = (None, "int8", "int4")
WINDOWS = (None, 3)
MODEL_DRAFTERS = sorted(set(DRAFTERS) - {"none", "prompt_lookup", "lookahead"})
FAMILIES = ("llama", "mistral", "gemma3_text", "gpt2", "mixtral", "gpt_oss")
EXPERTS = ("mixtral", "gpt_oss")


@cache
def family(name):
    model = model_of(name, CASES_BY_FAMILY[name])
    return model, own_text(model, *prompts("left"))


def drafts(drafter, **more):
    skip = {"attention": [2], "mlp": [1, 3]}
    return DraftConfig.of({"drafter": drafter, "skip": skip, "num_draft_tokens": 3, **more})


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_the_models_own(name, drafter, precision, window):
    model, expected = family(name)
    tokens, mask = prompts("left")
    spec = SelfSpecModel(model, draft_model=model if drafter == "two_model" else None)
    everything = "all" if name not in EXPERTS or precision is None else None
    approximate = everything if precision or window else None
    if name in EXPERTS and window and precision:
        return  # refused, see below
    out = spec.generate(
        tokens[ALL_ROWS],
        attention_mask=mask[ALL_ROWS],
        max_new_tokens=expected.shape[1],
        do_sample=False,
        draft=drafts(
            drafter, precision=precision, window=window, sinks=2, approximate=approximate
        )
        if window
        else drafts(drafter, precision=precision, approximate=approximate),
    )
    assert torch.equal(out[:, -expected.shape[1] :], expected[ALL_ROWS])

"""Every drafter as a draft, for tests that run over all of them."""

from __future__ import annotations

import torch

from selfspec import DraftConfig
from selfspec.drafters import DRAFTERS

FAMILIES = ("llama", "gpt2", "qwen3", "gemma3_text", "mistral", "mixtral", "bloom", "gpt_neox")
TREES = {name for name, drafter in DRAFTERS.items() if drafter.makes_trees}
CHAINS = ("cascade", "early_exit", "skip_sublayers", "two_model")
SKIP = {"attention": [2], "mlp": [1, 3]}


def draft(drafter, **more):
    return DraftConfig.of({"drafter": drafter, "skip": SKIP, **more})


SEED, COUNT = 5, 14


def drawn_text(spec, ids, mask, how, temperature=0.8, **options):
    return spec.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        temperature=temperature,
        generator=torch.Generator().manual_seed(SEED),
        draft=how,
        **options,
    )

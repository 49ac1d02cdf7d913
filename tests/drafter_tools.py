"""Every drafter as a draft, for tests that run over all of them."""

from __future__ import annotations

import torch

from selfspec import DraftConfig
from selfspec.drafters import DRAFTERS

FAMILIES = ("llama", "gpt2", "qwen3", "gemma3_text", "mistral", "mixtral", "bloom", "gpt_neox")
TREES = {name for name, drafter in DRAFTERS.items() if drafter.makes_trees}
CHAINS = ("cascade", "early_exit", "skip_sublayers", "two_model")
SKIP = {"attention": [2], "mlp": [1, 3]}


SUFFIX = {"shortest": 2, "confident": 2}
NGRAM = {"index": "ngram", **SUFFIX}
GUESSES = {"window": 3, "ngram": 3, "guesses": 3}


def draft(drafter, **more):
    return DraftConfig.of({"drafter": drafter, "skip": SKIP, **more})


def tree(nodes, levels=4, **more):
    return draft("tree", num_draft_tokens=levels, tree={"nodes": nodes}, **more)


def skipping(schedule="fixed", **skip):
    return DraftConfig(drafter="skip_sublayers", skip=skip, num_draft_tokens=3, schedule=schedule)


# Every drafter without heads, with what else decides how it drafts; for targets of 4 layers or 5.
DRAFTS = {
    **{name: draft(name) for name in DRAFTERS},
    "early_exit": draft("early_exit", exit_layer=2, num_draft_tokens=4),
    "one token": draft("early_exit", exit_layer=2, num_draft_tokens=1),
    "many tokens": draft("early_exit", exit_layer=2, num_draft_tokens=8, schedule="optimal"),
    "tree": tree(9, exit_layer=2),
    "narrow tree": tree(4, exit_layer=2),
    "wide tree": tree(16, exit_layer=2),
    "prompt_lookup": draft("prompt_lookup", lookup=SUFFIX, num_draft_tokens=4),
    "n-gram lookup": draft("prompt_lookup", lookup=NGRAM, num_draft_tokens=4),
    "cascade": draft("cascade", exit_layer=2, lookup=SUFFIX, num_draft_tokens=4),
    "n-gram cascade": draft("cascade", exit_layer=2, lookup=NGRAM, schedule="optimal"),
    "lookahead": draft("lookahead", lookahead=GUESSES),
    "wide lookahead": draft("lookahead", lookahead={"window": 5, "ngram": 2, "guesses": 1}),
    "halves": skipping(attention=(1, 3), mlp=(2, 3)),
    "from the first": skipping("optimal", attention=(0, 2)),
    "clasp": skipping("confidence", search="clasp", every=4, layers=2),
    "two_model": draft("two_model", num_draft_tokens=4),
    "itself": draft("two_model", num_draft_tokens=4, schedule="optimal"),
}
# Others choose by the clock with what to draft, or how long.
STEADY = [name for name in DRAFTS if name != "auto" and DRAFTS[name].schedule != "optimal"]
BRANCHING = TREES - {"auto"} | {"clasp", "narrow tree", "wide tree", "wide lookahead"}


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

"""A target whose every continuation can be enumerated, draws from it, and how likely they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import quieten, tiny_llama
from law_tools import p_value

from selfspec import SelfSpecModel

VOCAB, HORIZON, DRAWS, BATCH = 12, 4, 36_000, 2000
PROMPT = torch.tensor([[7, 7, 1]])
WARPED = {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "repetition_penalty": 1.3}
POINTWISE = {"temperature": 0.7, "top_k": 0}


@pytest.fixture(scope="module")
def target():
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_llama("seldom", dtype=torch.float32, spread=0.4, seed=20, **shape, **heads)
    return quieten(model, 0.3, above=1)  # most drafts are kept, not all


def prepared_processors(model, options):
    """What transformers makes of the options, in its order."""
    found = []

    def custom(model, input_ids, logits_processor, **kwargs):
        found.append(logits_processor)
        return input_ids

    model.generate(PROMPT, do_sample=True, custom_generate=custom, max_new_tokens=3, **options)
    return found[0]


@torch.no_grad()
def exact(model, options):
    """`[VOCAB] * HORIZON` probabilities of every continuation under plain decoding."""
    processors = prepared_processors(model, options)
    joint = torch.ones((), dtype=torch.float64)
    for length in range(HORIZON):
        words = list(itertools.product(range(VOCAB), repeat=length))
        behind = torch.tensor(words, dtype=torch.long).view(len(words), length)
        text = torch.cat([PROMPT.expand(len(words), -1), behind], dim=1)
        scores = processors(text, model(text).logits[:, -1].float())
        step = scores.double().softmax(-1).view([VOCAB] * (length + 1))
        joint = joint[..., None] * step
    return joint


def draws(model, options, draft, total=DRAWS, seed=0, **parts):
    """Counts of the continuations that speculation writes, and its acceptance rate.

    What a `SelfSpecModel` has beside its model stands among the parts.
    """
    spec = SelfSpecModel(model, **parts)
    generator = torch.Generator().manual_seed(seed)
    counts, rates = torch.zeros(VOCAB**HORIZON), []
    for _ in range(total // BATCH):
        text = spec.generate(
            PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            do_sample=True,
            max_new_tokens=HORIZON,
            num_return_sequences=BATCH,
            generator=generator,
            draft=draft,
            **options,
        )
        cells = (text[:, PROMPT.shape[1] :] * VOCAB ** torch.arange(HORIZON - 1, -1, -1)).sum(-1)
        counts += torch.bincount(cells, minlength=VOCAB**HORIZON)
        rates.append(spec.last_stats.acceptance_rate)
    return counts.double().view([VOCAB] * HORIZON), sum(rates) / len(rates)


def p_values(counts, probs):
    """The test over each token alone and over the first 2, 3, 4: few cells see small faults best.

    Prefill writes the first token; the next two are drafted, the last is corrected or the bonus.
    """
    alone = [(token,) for token in range(HORIZON)]
    together = [tuple(range(length)) for length in range(2, HORIZON + 1)]
    others = [tuple({*range(HORIZON)} - {*kept}) for kept in (*alone, *together[:-1])]
    marginals = [(counts.sum(dim=rest), probs.sum(dim=rest)) for rest in others]
    return [p_value(*pair) for pair in (*marginals, (counts, probs))]


def follows(model, options, draft, between=(0.05, 0.95), exactly=None, **more):
    """Assert that what is drawn follows the model, by drafts of which some are kept and some not.

    `exactly`: the probabilities of all continuations, if they are known.
    """
    counts, acceptance = draws(model, options, draft, **more)
    assert between[0] < acceptance < between[1]
    assert min(p_values(counts, exact(model, options) if exactly is None else exactly)) > 1e-3

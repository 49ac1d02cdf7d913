"""Over keys and values in 8 bits, texts are those of the model over a cache that rounds alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import EXIT, VOCAB, prompt, tiny_llama
from families import ALL_ROWS, CASES_BY_FAMILY, FAMILIES, FLOAT32, NEW_TOKENS, model_of, prompts
from torch import Tensor
from typer.testing import CliRunner

from selfspec import SelfSpecModel
from selfspec.apps.bench import Sampling, check_exactness
from selfspec.apps.cli import commands
from selfspec.config import DraftConfig
from selfspec.decoder import CACHE, Decoder, Span
from selfspec.decoder.cache import RoundedCache, SlotCache, join_rows, take_row
from selfspec.decoder.cache.int8 import from_int8, to_int8

# transformers' mpt cannot go on over any cache that it is handed, its own kind included.
WITHOUT_REFERENCE = {"mpt"}
EXIT_DRAFT = {"exit_layer": EXIT, "num_draft_tokens": 3}
DRAFTS = {
    "none": {"drafter": "none"},
    "early_exit": EXIT_DRAFT,
    "tree": {"drafter": "tree", "exit_layer": EXIT, "tree": {"nodes": 6}, "num_draft_tokens": 3},
    "skip_sublayers": {"drafter": "skip_sublayers", "skip": {"attention": (1,), "mlp": (2,)}},
    "prompt_lookup": {"drafter": "prompt_lookup"},
    "lookahead": {"drafter": "lookahead"},
    "cascade": {"drafter": "cascade", "exit_layer": EXIT},
    "auto": {"drafter": "auto", "exit_layer": EXIT},
}


def rounded_text(model: Any, tokens: Tensor, mask: Tensor, count: int = NEW_TOKENS) -> Tensor:
    """What the model's own generate writes over a cache that rounds, one row at a time."""
    rows = [row[real.bool()][None] for row, real in zip(tokens, mask, strict=True)]
    options = {"max_new_tokens": count, "do_sample": False}
    texts = [
        model.generate(row, **{CACHE: RoundedCache(config=model.config)}, **options) for row in rows
    ]
    return torch.cat([text[:, -count:] for text in texts])


def int8(model: Any, **options: Any) -> SelfSpecModel:
    return SelfSpecModel(model, kv_cache_dtype="int8", **options)


# Numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_states_are_rounded_to_the_nearest_of_255(dtype: torch.dtype) -> None:
    states = torch.randn(2, 3, 7, 16, dtype=torch.float64).to(dtype)
    states[0, 0, 0] = 0
    numbers, scales = to_int8(states)
    assert numbers.dtype == torch.int8 and scales.dtype == dtype
    back = from_int8(numbers, scales)
    step = states.double().abs().amax(-1, keepdim=True) / 127
    slack = 128 * torch.finfo(dtype).eps  # of scales and products in that dtype
    assert ((back - states).double().abs() <= step * (0.5 + slack)).all()
    assert not back[0, 0, 0].any()
    assert numbers.abs().amax(-1).eq(127).sum() == 2 * 3 * 7 - 1


def test_what_is_kept_of_a_token_depends_on_the_token_alone() -> None:
    states = torch.randn(2, 3, 9, 16)
    whole = to_int8(states)
    parts = [to_int8(part) for part in states.split(4, dim=2)]
    for kept, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(kept, torch.cat(pieces, dim=2))


# Texts


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", sorted({*FAMILIES} - FLOAT32 - WITHOUT_REFERENCE))
def test_greedy_text_is_that_over_a_rounding_cache(family: str) -> None:
    model = model_of(family, CASES_BY_FAMILY[family], agreement=0.3)
    tokens, mask = prompts("left")
    text = int8(model).generate(
        tokens[ALL_ROWS],
        attention_mask=mask[ALL_ROWS],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        draft=EXIT_DRAFT,
    )
    assert torch.equal(text[:, -NEW_TOKENS:], rounded_text(model, tokens, mask))


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", DRAFTS)
def test_every_drafter_writes_it(drafter: str) -> None:
    model, (tokens, mask) = tiny_llama("sometimes"), prompts("left")
    text = int8(model).generate(
        tokens, attention_mask=mask, max_new_tokens=30, do_sample=False, draft=DRAFTS[drafter]
    )
    assert torch.equal(text[:, -30:], rounded_text(model, tokens, mask, 30))


def test_rounding_is_not_for_nothing() -> None:
    """The reference would show a cache that does not round."""
    model, (tokens, mask) = tiny_llama("sometimes"), prompts("left")
    own = SelfSpecModel(model).generate(
        tokens, attention_mask=mask, max_new_tokens=30, do_sample=False
    )
    assert not torch.equal(own[:, -30:], rounded_text(model, tokens, mask, 30))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_second_turn_goes_on_over_what_was_kept(rows: int) -> None:
    model = tiny_llama("sometimes")
    spec, (ids, mask) = int8(model), prompt(*[6, 9][:rows])
    options = {"max_new_tokens": 10, "do_sample": False, "draft": EXIT_DRAFT}
    first = spec.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)
    assert not isinstance(first, Tensor) and isinstance(first.past_key_values, SlotCache)
    longer = torch.nn.functional.pad(mask, (0, 10), value=1)
    second = spec.generate(
        first.sequences, attention_mask=longer, past_key_values=first.past_key_values, **options
    )
    assert torch.equal(second[:, -20:], rounded_text(model, ids, mask, 20))


def test_a_check_asks_for_the_same_rounding() -> None:
    spec = int8(tiny_llama("sometimes", spread=0.3))
    drafting = DraftConfig(exit_layer=EXIT, num_draft_tokens=2)
    texts = [torch.randint(2, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))]
    found = check_exactness(spec, drafting, texts, 30, Sampling(samples=1024))
    assert found.passed and not found.divergences
    spec.decoder.own_cache = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    assert check_exactness(spec, drafting, texts, 60).divergences


@pytest.mark.slow
def test_check_takes_the_option() -> None:
    command = ["check", "--kv-cache-dtype", "int8", "--samples", "0", "--max-new-tokens", "8"]
    run = CliRunner().invoke(commands, [*command, "--json"])
    assert run.exit_code == 0 and '"kv_cache_dtype": "int8"' in run.stdout


# Memory


def test_a_token_takes_a_byte_a_number_and_a_scale() -> None:
    sizes = {}
    for kept in ("auto", "int8"):
        decoder = Decoder(tiny_llama(dtype=torch.bfloat16), kv_cache_dtype=kept)
        slots = decoder.new_slots(1, 32)
        with torch.no_grad():
            decoder.run(torch.tensor([[3, 4, 5]]), Span(0, decoder.depth), slots)
        slots.commit([3])
        sizes[kept] = slots.sizes.token[0]
        again = join_rows([take_row(slots, 0)], slots)
        assert again.sizes.token == slots.sizes.token
        for mine, theirs in zip(slots.layers, again.layers, strict=True):
            assert torch.equal(mine.seen(3)[0], theirs.seen(3)[0])
    heads, dim = 2, 8
    assert sizes == {"auto": 2 * heads * dim * 2, "int8": 2 * heads * (dim + 2)}


# What there is not


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype must be one of .*'int4'"),
        ({"kv_cache_dtype": "int8", "kernels": "compiled"}, "choose other kernels"),
        ({"kv_cache_dtype": "int8", "kernels": "graphs"}, "choose other kernels"),
    ],
)
def test_other_caches_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(tiny_llama(), **options)

"""Skipped sublayers, and the drafter that skips them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import gates, greedy, prompt, tiny_llama
from distribution_tools import WARPED, draws, exact, p_values, target  # noqa: F401 - a fixture
from families import (
    CASES_BY_FAMILY,
    FAMILIES,
    LAYERS,
    build,
    model_of,
)
from torch import nn

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder, Skips, Span
from selfspec.decoder.cache import take_row
from selfspec.drafters.engine import Engine
from selfspec.drafters.skip_sublayers import middle_layers, similar_layers

ALL = Span(0, LAYERS)
TOKENS = torch.randint(2, 61, (2, 9), generator=torch.Generator().manual_seed(5))


def run(decoder: Decoder, skips: Skips | None, keep: tuple[int, ...] = ()) -> Any:
    slots = decoder.new_slots(len(TOKENS))
    return decoder.run(TOKENS, ALL, slots, unembed=True, keep=keep, skips=skips)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_skipped_sublayers_add_nothing(family: str) -> None:
    model = build(family, CASES_BY_FAMILY[family])
    decoder = Decoder(model)
    forwards = {name: module.forward for name, module in model.named_modules()}
    plain = run(decoder, None, keep=(1, 2))
    assert torch.equal(run(decoder, Skips()).output, plain.output)

    # A skipped layer hands through what it is given; so do its halves, one after the other.
    whole = run(decoder, Skips.of([1], [1]), keep=(1, 2))
    assert torch.equal(whole.kept[0], plain.kept[0]) and torch.equal(*whole.kept)
    assert not torch.equal(whole.output, plain.output)
    found = decoder.gates.sublayers.skipped(1, Skips.of([1], [1]))
    assert len(found) >= 2, "attention and MLP are both known"
    with decoder, decoder.gates.skipping(decoder.layers[1], found):
        halves = run(decoder, None, keep=(1, 2))
    torch.testing.assert_close(*halves.kept)

    # One half alone changes the text, and what the other half adds is there.
    for skips in (Skips.of([1], []), Skips.of([], [1])):
        decoder.check_skips(skips)
        once = run(decoder, skips, keep=(1, 2))
        assert not torch.equal(*once.kept)
        assert torch.equal(once.output, run(decoder, skips).output)
    assert gates(model) == []
    assert all(module.forward == forwards[name] for name, module in model.named_modules())


@torch.no_grad()
def test_a_module_around_a_sublayer_may_take_every_argument_by_any_name() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, **kwargs: Any) -> Any:
            return self.inner(**kwargs)

    def skipped(model: Any) -> Any:
        decoder = Decoder(model)
        run(decoder, None)
        return run(decoder, Skips.of([1], [])).output

    model = build("llama", "sdpa")
    plain = skipped(model)
    layer = model.model.layers[1]
    layer.self_attn = Around(layer.self_attn)
    assert torch.equal(skipped(model), plain)


def test_the_last_layer_can_be_skipped() -> None:
    decoder = Decoder(tiny_llama())
    run_all = Span(0, 4)
    plain = decoder.run(TOKENS, run_all, decoder.new_slots(2), unembed=True, keep=(3,))
    skips = Skips.of([3], [3])
    without = decoder.run(TOKENS, run_all, decoder.new_slots(2), unembed=True, skips=skips)
    exit_at = decoder.run(TOKENS, Span(0, 3), decoder.new_slots(2), unembed=True)
    assert torch.equal(without.hidden, plain.kept[0])
    assert torch.equal(without.output, exit_at.output)


# The drafter

HALVES = {"attention": (1, 3), "mlp": (2, 3)}


def drafting(skip: dict[str, Any], num_draft_tokens: int = 3, **others: Any) -> DraftConfig:
    return DraftConfig.of(
        {
            "drafter": "skip_sublayers",
            "skip": skip,
            "num_draft_tokens": num_draft_tokens,
            **others,
        }
    )


def test_skipping_nothing_is_always_accepted() -> None:
    spec = SelfSpecModel(tiny_llama("seldom"))
    ids, mask = prompt(5, 9, 3)
    draft = drafting({"search": "none"})
    options = {"attention_mask": mask, "max_new_tokens": 21}
    assert torch.equal(
        spec.generate(ids, draft=draft, **options), greedy(spec.model, ids, mask, max_new_tokens=21)
    )
    assert spec.last_stats.acceptance_rate == 1
    spec.generate(ids, draft=draft, do_sample=True, **options)
    assert spec.last_stats.acceptance_rate > 0.999  # the last layer runs over more tokens at once


@pytest.mark.parametrize("search", ["none", "clasp"])
def test_approximate_states_are_overwritten(search: str) -> None:
    """So rejected drafts leave nothing to roll back: KV in the end is that of the text."""
    model = tiny_llama("seldom")
    spec = SelfSpecModel(model)
    ids, mask = prompt(6)
    skip = (
        {"search": "clasp", "every": 2} if search == "clasp" else {"attention": (1,), "mlp": (2,)}
    )
    out = spec.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=15,
        return_dict_in_generate=True,
        draft=drafting(skip),
    )
    assert spec.last_stats.acceptance_rate < 1
    own = model(out.sequences[:, :-1], use_cache=True).past_key_values
    for ours, theirs in zip(take_row(out.past_key_values, 0), own, strict=True):
        for states, expected in zip(ours, theirs[:2], strict=True):
            torch.testing.assert_close(states, expected[0], rtol=1e-9, atol=1e-9)


def test_the_exact_prefix_runs_once_over_each_draft() -> None:
    model = tiny_llama()
    spec = SelfSpecModel(model)
    ran = [0] * 4
    for index, layer in enumerate(model.model.layers):

        def note(module: nn.Module, args: Any, index: int = index) -> None:
            ran[index] += args[0].shape[1]

        layer.register_forward_pre_hook(note)
    spec.generate(prompt(5)[0], max_new_tokens=20, draft=drafting({"mlp": (2,)}))
    drafts = ran[0] - 5 - spec.last_stats.rounds
    assert ran == [ran[0], ran[0], ran[0] + drafts, ran[0] + drafts]


# CLaSp


@torch.no_grad()
def test_clasp_finds_the_layers_that_do_nothing() -> None:
    model = tiny_llama("seldom", num_hidden_layers=6)
    for index in (1, 4):
        model.model.layers[index].self_attn.o_proj.weight.zero_()
        model.model.layers[index].mlp.down_proj.weight.zero_()
    spec = SelfSpecModel(model)
    seen: list[Any] = []
    search = similar_layers

    def noting(*args: Any) -> tuple[int, ...]:
        seen.append(search(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.drafters.skip_sublayers.similar_layers", noting)
        ids, mask = prompt(5, 9, 3)
        skip = {"search": "clasp", "layers": 2, "every": 8}
        spec.generate(ids, attention_mask=mask, max_new_tokens=40, draft=drafting(skip))
    assert seen and set(seen) == {(1, 4)}
    # Once they were found, drafts are the target's own.
    assert spec.last_stats.acceptance_rate > 0.8


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3_text"])
def test_clasp_carries_the_states_that_skipping_leaves(family: str) -> None:
    """Along the layers that it chose, the states that it compared are those of a real pass."""
    decoder = Decoder(model_of(family, CASES_BY_FAMILY[family]))
    slots = decoder.new_slots(2)
    text, last = TOKENS[:, :-1], TOKENS[:, -1:]
    decoder.run(text, ALL, slots)
    slots.commit([text.shape[1] - 2, text.shape[1]])  # rows of different lengths
    full = decoder.run(last, ALL, slots, keep=tuple(range(LAYERS + 1)))
    slots.commit([1, 1])
    before = take_row(slots, 0)
    carried: list[torch.Tensor] = []
    run_span = decoder.run

    def noting(*args: Any, **kwargs: Any) -> Any:
        left = run_span(*args, **kwargs)
        carried.append(left.hidden)
        return left

    decoder.run = noting  # pyright: ignore[reportAttributeAccessIssue]
    layers = similar_layers(decoder, slots, full.kept, 2)
    assert len(layers) == 2
    for layer, held in zip(take_row(slots, 0), before, strict=True):
        assert torch.equal(layer[0], held[0]) and torch.equal(layer[1], held[1])
    slots.crop(-1)
    real = run_span(last, ALL, slots, skips=Skips.of(layers, layers))
    last_run = max({*range(LAYERS)} - {*layers})
    distance = (carried[last_run] - real.hidden).abs().amax(-1)
    assert distance.amin(-1).max() < 1e-9, "no candidate is what the real pass left"


def test_middle_layers_are_spread_evenly() -> None:
    assert middle_layers(16, 7) == (2, 4, 6, 8, 10, 12, 14)
    for depth in range(2, 20):
        for count in range(1, depth):
            layers = middle_layers(depth, count)
            assert len(set(layers)) == count and set(layers) <= set(range(depth))
            if count <= depth - 2:
                assert 0 not in layers and depth - 1 not in layers


# Bad input


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ({"attention": range(4), "mlp": range(4)}, "leaves nothing of the model's 4 layers"),
        ({"attention": (4,)}, r"skip.attention must name layers in \[0, 3\], got \[4\]"),
        ({"mlp": (-1, 2)}, r"skip.mlp must name layers in \[0, 3\], got \[-1\]"),
        ({"search": "clasp", "layers": 4}, "skip.layers must be below the model's 4 layers, got 4"),
        ({"search": "clasp", "mlp": (1,)}, "chooses the layers itself"),
        (
            {"attention": (1,), "layers": 2},
            "layers=2 is the number of layers that",
        ),
    ],
)
def test_impossible_skips_are_refused_before_any_pass(
    skip: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    spec = SelfSpecModel(model)
    monkeypatch.setattr(Engine, "prefill", None)
    with pytest.raises(ValueError, match=message):
        spec.generate(prompt(5)[0], draft={"drafter": "skip_sublayers", "skip": skip})


def test_a_family_whose_sublayers_are_strange_skips_whole_layers() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer._modules["inner"] = nn.Identity()
        layer._modules["strange"] = layer._modules.pop("self_attn")
        layer.strange.__class__ = type("Mixer", (type(layer.strange),), {})
        object.__setattr__(layer, "self_attn", layer.strange)
    spec = SelfSpecModel(model)
    ids, mask = prompt(5)
    with pytest.raises(ValueError, match=r"attention of layer 1, a LlamaDecoderLayer.*strange"):
        spec.generate(ids, draft=drafting({"attention": (1,)}))
    options = {"attention_mask": mask, "max_new_tokens": 10}
    out = spec.generate(ids, draft=drafting({"attention": (1,), "mlp": (1,)}), **options)
    assert torch.equal(out, greedy(model, ids, mask, max_new_tokens=10))

"""Multimodal checkpoints: text is the model's own, with images in the prompt and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import ROOT, tiny_llama
from graph_tools import CpuTape
from head_tools import KINDS, own_head
from multimodal import IMAGE, LAYERS, MAIN, MORE, REFUSED, TEXT_ONLY, Row, build, prompts
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import SelfSpecModel
from selfspec.decoder import CACHE, Decoder, find_layers
from selfspec.decoder.families import text_parts
from selfspec.decoder.kernels import compiled
from selfspec.decoder.kernels.graphs import RECORDERS
from selfspec.generation.unsupported import IMAGE_FAMILIES

NEW_TOKENS = 14
MIXED = (Row(3, 1, 2), Row(9), Row(4, 2, 6))
BATCHES = {
    "text": (Row(5), Row(17), Row(8)),
    "one image": (Row(5, 1, 4),),
    "ends in the image": (Row(5, 1, -1),),
    "some with images": MIXED,
    "all with images": (Row(3, 1, -1), Row(2, 1, 9)),
}
DRAFTS: list[Any] = [
    "none",
    {"exit_layer": 2, "num_draft_tokens": 3},
    {"drafter": "tree", "exit_layer": 1},
    "prompt_lookup",
    None,
]
SHORT_DRAFTS = DRAFTS[:2]
TYPES = ("token_type_ids", "mm_token_type_ids")


def fast(names: Any, *chosen: str) -> list[Any]:
    """Parameters, of which all but the chosen ones are slow."""
    return [pytest.param(n, marks=() if n in chosen else pytest.mark.slow) for n in names]


def own_text(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What the model's own generate writes."""
    text: Any = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
    return text


def text_of(spec: SelfSpecModel, inputs: dict[str, Any], **options: Any) -> Any:
    return spec.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)


def check_text(family: str, rows: tuple[Row, ...], drafts: list[Any]) -> None:
    """Assert that a family's greedy text is its own, whatever is drafted."""
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, *rows)
    expected = own_text(model, inputs)
    assert expected[:, -NEW_TOKENS:].unique().numel() > 2, "such a text shows little"
    for draft in drafts:
        assert torch.equal(text_of(spec, inputs, draft=draft), expected), draft


# Families


@pytest.mark.matrix
@pytest.mark.parametrize("batch", fast(BATCHES, "text", "some with images", "all with images"))
@pytest.mark.parametrize("family", MAIN)
def test_greedy_text_is_the_models_own(family: str, batch: str) -> None:
    check_text(family, BATCHES[batch], DRAFTS)


@pytest.mark.parametrize("family", fast(MORE, "qwen3_5", "internvl", "llava_next"))
def test_greedy_text_after_images_in_other_families(family: str) -> None:
    check_text(family, MIXED, SHORT_DRAFTS)


@pytest.mark.parametrize("family", fast(TEXT_ONLY, "aria", "mllama", "lfm2_vl", "gemma4_unified"))
def test_greedy_text_after_text_in_other_families(family: str) -> None:
    check_text(family, BATCHES["text"], SHORT_DRAFTS)


def test_every_family_that_may_get_images_is_tested_with_images() -> None:
    assert set(MAIN) | set(MORE) == IMAGE_FAMILIES


def test_the_docs_name_the_tested_families() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    for families in (MAIN, MORE, TEXT_ONLY):
        assert f": {', '.join(families)}" in page


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen3_vl"])
def test_another_image_gives_another_text(family: str) -> None:
    """Else the tests above would show nothing about images."""
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    seen = text_of(spec, inputs)
    other = text_of(spec, {**inputs, "pixel_values": inputs["pixel_values"].flip(0) * 2})
    assert torch.equal(seen[1], other[1])  # the row without an image
    assert not torch.equal(seen, other)


# Drafters


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", fast(MAIN, "gemma3", "qwen3_vl"))
def test_every_kind_of_head_after_images(family: str, kind: str) -> None:
    model = build(family)
    inputs = prompts(model, *MIXED)
    spec = SelfSpecModel(model, heads=[own_head(Decoder(model), kind, 2, noise=0.02)])
    assert torch.equal(
        text_of(spec, inputs, draft={"num_draft_tokens": 3}), own_text(model, inputs)
    )
    assert spec.last_stats is not None and spec.last_stats.drafted > 0


@pytest.mark.matrix
@pytest.mark.parametrize(
    "draft",
    [
        "lookahead",
        "two_model",
        "auto",
        {"drafter": "cascade", "exit_layer": 2},
        {"drafter": "skip_sublayers", "skip": {"attention": [1], "mlp": [2]}},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", fast(MAIN, "gemma3", "qwen2_5_vl"))
def test_every_drafter_after_images(family: str, draft: Any) -> None:
    model = build(family)
    inputs = prompts(model, *MIXED)
    spec = SelfSpecModel(model, draft_model=build(family, seed=1))
    assert torch.equal(text_of(spec, inputs, draft=draft), own_text(model, inputs))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_seed_gives_one_text_after_images_whatever_drafts(family: str) -> None:
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    texts = []
    for draft in DRAFTS[:4]:
        chosen = {"drafter": draft} if isinstance(draft, str) else draft
        source = torch.Generator().manual_seed(5)
        options = {"do_sample": True, "draft": {**chosen, "rule": "coupled"}, "generator": source}
        texts.append(text_of(spec, inputs, **options))
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "idefics3"])
def test_logits_after_images_are_the_models_own(family: str) -> None:
    """So samples are, too: they are drawn from these."""
    model = build(family).double()
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    options = {"return_dict_in_generate": True, "output_logits": True}
    own: Any = own_text(model, inputs, **options)
    ours = text_of(spec, inputs, draft=DRAFTS[1], **options)
    for expected, found in zip(own.logits, ours.logits, strict=True):
        torch.testing.assert_close(found, expected.to(found), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_rows_leave_the_batch_with_their_positions(family: str) -> None:
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    whole = own_text(model, inputs)
    ends = {"eos_token_id": int(whole[0, -NEW_TOKENS + 3]), "pad_token_id": 0}
    expected = own_text(model, inputs, **ends)
    assert not torch.equal(expected, whole)
    for draft in DRAFTS[:3]:
        assert torch.equal(text_of(spec, inputs, draft=draft, **ends), expected), draft


@pytest.mark.parametrize("kernels", ["compiled", "graphs"])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_recorded_layers_after_images(
    family: str, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt is no narrow pass, although it is as narrow: it sees no whole pages."""
    monkeypatch.setattr(compiled.torch, "compile", lambda function, **options: function)
    monkeypatch.setitem(RECORDERS, "cpu", lambda device: CpuTape)
    model = build(family)
    spec, inputs = SelfSpecModel(model, kernels=kernels), prompts(model, *MIXED)
    expected = own_text(model, inputs)
    for _ in range(2):  # the second call plays what the first has recorded
        assert torch.equal(text_of(spec, inputs, draft=DRAFTS[1]), expected)


def test_a_kv_cache_of_8_bits_after_images() -> None:
    model = build("qwen3_vl")
    spec, inputs = SelfSpecModel(model, kv_cache_dtype="int8"), prompts(model, *MIXED)
    rounded = spec.decoder.own_cache()
    expected = own_text(model, inputs, **{CACHE: rounded})
    assert torch.equal(text_of(spec, inputs, draft=DRAFTS[1]), expected)


# Forms of a call


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "smolvlm"])
def test_padding_on_the_right(family: str) -> None:
    model = build(family)
    spec = SelfSpecModel(model)
    left, right = prompts(model, *MIXED), prompts(model, *MIXED, side="right")
    text = text_of(spec, right, draft=DRAFTS[1])
    assert torch.equal(text[:, :-NEW_TOKENS], right["input_ids"])
    assert torch.equal(text[:, -NEW_TOKENS:], own_text(model, left)[:, -NEW_TOKENS:])


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_two_texts_for_each_prompt(family: str) -> None:
    model = build(family)
    spec = SelfSpecModel(model)
    one, twice = prompts(model, Row(3, 1, 2)), prompts(model, Row(3, 1, 2), Row(3, 1, 2))
    doubled = {name: torch.cat([one[name]] * 2) for name in twice}
    coupled = {"do_sample": True, "draft": {"exit_layer": 2, "rule": "coupled"}}
    texts = [
        text_of(spec, inputs, **coupled, **options, generator=torch.Generator().manual_seed(1))
        for inputs, options in ((one, {"num_return_sequences": 2}), (doubled, {}))
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "llava"])
def test_a_second_turn_goes_on_after_images(family: str, types: bool) -> None:
    """Positions after an image are no slots; the cache knows them."""
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    first = text_of(
        spec,
        inputs,
        draft=DRAFTS[1],
        return_dict_in_generate=True,
        suppress_tokens=[IMAGE],
    )
    added = torch.tensor([[5, 6, 7]] * 3)
    grown = _continued(inputs, torch.cat([first.sequences, added], 1))
    text = {n: v for n, v in grown.items() if n.endswith("mask") or n == "input_ids"}
    text |= {n: v for n, v in grown.items() if types and n in TYPES}
    second = text_of(spec, text, past_key_values=first.past_key_values, draft=DRAFTS[1])
    assert torch.equal(second, own_text(model, grown))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_second_turn_goes_on_from_the_models_own_cache(family: str) -> None:
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, Row(4, 1, 3))
    options = {"return_dict_in_generate": True, "suppress_tokens": [IMAGE]}
    first: Any = own_text(model, inputs, **options)
    grown = _continued(inputs, torch.cat([first.sequences, torch.tensor([[5, 6]])], 1))
    second: Any = spec.generate(
        grown["input_ids"],
        past_key_values=first.past_key_values,
        max_new_tokens=NEW_TOKENS,
        draft=DRAFTS[1],
    )
    assert torch.equal(second, own_text(model, grown))


def _continued(inputs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """The inputs with more tokens of text."""
    more = ids.shape[1] - inputs["input_ids"].shape[1]
    grown = {**inputs, "input_ids": ids}
    mask = inputs["attention_mask"]
    grown["attention_mask"] = nn.functional.pad(mask, (0, more), value=1)
    return grown | {n: nn.functional.pad(inputs[n], (0, more)) for n in TYPES if n in inputs}


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3"])
def test_text_prompts_in_continuous_batching(family: str) -> None:
    model = build(family)
    spec, texts = SelfSpecModel(model), [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [15]]
    found = spec.generate_batch(texts, batch_size=2, max_new_tokens=NEW_TOKENS)
    for text, output in zip(texts, found.values(), strict=True):
        own = own_text(model, {"input_ids": torch.tensor([text])})
        assert output.generated_tokens == own[0, len(text) :].tolist()


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_5_vl"])
def test_a_checkpoint_is_loaded_as_what_it_is(family: str, tmp_path: Any) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    spec = SelfSpecModel.from_pretrained(tmp_path)
    assert type(spec.model) is type(model)
    inputs = prompts(model, *MIXED)
    assert torch.equal(text_of(spec, inputs), own_text(model, inputs))


def test_only_what_writes_text_is_packed() -> None:
    """The image encoder runs once a prompt, and its copy would take memory for nothing."""
    model = build("qwen3_vl")
    parts = {part for root in text_parts(model) for part in root.modules()}
    assert {model.get_decoder(), model.get_output_embeddings()} <= parts
    assert parts.isdisjoint(model.model.visual.modules())  # pyright: ignore
    assert text_parts(llama := tiny_llama("always")) == [llama]


def test_the_model_is_left_as_it_was() -> None:
    model = build("qwen3_vl")
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    expected = own_text(model, inputs)
    text_of(spec, inputs)
    assert torch.equal(own_text(model, inputs), expected)


# Refusals


def test_other_media_are_refused_by_name_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("qwen3_vl")
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    seen = text_of(spec, inputs, return_dict_in_generate=True)
    monkeypatch.setattr(type(model.model), "get_image_features", _never)
    pixels = inputs["pixel_values"]
    for name in ("pixel_values_videos", "input_features"):
        with pytest.raises(ValueError, match=rf"^{name}: not covered"):
            text_of(spec, {**inputs, name: pixels})
    with pytest.raises(ValueError, match=r"mm_encoder_outputs\['video'\]"):
        text_of(spec, {**inputs, "mm_encoder_outputs": {"video": pixels}})
    with pytest.raises(ValueError, match=r"pixel_values.*come with the first prompt"):
        text_of(spec, inputs, past_key_values=seen.past_key_values)
    with pytest.raises(ValueError, match=r"pixel_values.*generate_batch takes lists"):
        spec.generate_batch([[1, 2]], pixel_values=pixels)


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an image was encoded")


def test_images_are_refused_where_they_are_not_tested() -> None:
    model = build("aria")
    with pytest.raises(
        ValueError, match=r"^pixel_values: .*AriaForConditionalGeneration takes text"
    ):
        SelfSpecModel(model).generate(
            torch.tensor([[1, 2]]), pixel_values=torch.zeros(1, 3, 56, 56)
        )
    with pytest.raises(ValueError, match="pixel_values"):
        llama = tiny_llama("always")
        SelfSpecModel(llama).generate(torch.tensor([[1, 2]]), pixel_values=torch.zeros(1))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("where", ["call", "config"])
def test_a_prompt_with_images_is_not_healed(family: str, where: str) -> None:
    """Healing goes through text, from which the places of images are missing."""
    model = build(family)
    spec, inputs = SelfSpecModel(model), prompts(model, *MIXED)
    model.generation_config.token_healing = where == "config"
    with pytest.raises(ValueError, match=r"^token_healing: .*pixel_values"):
        text_of(spec, inputs, **({"token_healing": True} if where == "call" else {}))


def test_a_prompt_with_images_is_prefilled_in_one_pass() -> None:
    model = build("llava")
    with pytest.raises(ValueError, match=r"^prefill_chunk_size"):
        text_of(SelfSpecModel(model), prompts(model, *MIXED), prefill_chunk_size=4)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_run_are_refused_when_they_are_wrapped(family: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[family]):
        SelfSpecModel(build(family))


def test_layers_are_those_of_the_text_model() -> None:
    """The image encoder has as many."""
    model = build("gemma3")
    body, name, layers = find_layers(model, LAYERS)
    assert (body, name) == (model.get_decoder(), "layers")
    assert {type(layer).__name__ for layer in layers} == {"Gemma3DecoderLayer"}


class Stacks(nn.Module):
    """Two lists of layers, and one that has as many experts in each layer."""

    def __init__(self, second: int):
        super().__init__()
        experts = [nn.ModuleList(nn.Linear(1, 1) for _ in range(3)) for _ in range(3)]
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": each}) for each in experts)
        self.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(second))


def test_layers_that_cannot_be_told_are_refused() -> None:
    assert find_layers(Stacks(2), 3)[1] == "layers"
    with pytest.raises(ValueError, match=r"Stacks has 2 ModuleLists .*Stacks.layers, Stacks.more"):
        find_layers(Stacks(3), 3)
    with pytest.raises(ValueError, match="Stacks has no ModuleList of num_hidden_layers = 4"):
        find_layers(Stacks(2), 4)

"""Tiny random multimodal models, and prompts with and without random images for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from families import skip_if_too_old
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

LAYERS = 4
VOCAB = 99
IMAGE = 90  # the token in whose place the images go
WIDTH = 32

# What text and vision configs get; names that a config does not know are dropped.
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "embed_dim": WIDTH,
    "out_hidden_size": WIDTH,
    "intermediate_size": 48,
    # As many as the text model has: they must not be taken for its own.
    "num_hidden_layers": LAYERS,
    "depth": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "image_size": 56,
    "patch_size": 14,
    "window_size": 28,
    "mlp_ratio": 2,
    "num_channels": 3,
    "in_channels": 3,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 2],
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_MROPE_GLM = {**_MROPE, "partial_rotary_factor": 1.0}
_QWEN = {"video_token_id": 91, "vision_start_token_id": 93, "vision_end_token_id": 94}
_GEMMA = {"boi_token_id": 91, "eoi_token_id": 92, "mm_tokens_per_image": 4}
_MLP = {"mlp_ratio": 2.0}
_LATENT = {"num_key_value_heads": 4}
_XDROPE = {**_MROPE, "xdrope_section": [1, 1, 1, 1], "mrope_section": [1, 1, 1, 1]}
_EMU = {"<image>": IMAGE, **{f"<|visual token {index:06}|>": 60 + index for index in range(20)}}


@dataclass(frozen=True)
class Family:
    """What a family needs beside the common values, and the form of its images.

    Attributes:
        text: of the text model's config.
        vision: of the image encoder's.
        top: of the whole config.
        images: makes the inputs for a number of images; `None` if only text is tested.
        eager: whether there is no other attention.
    """

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    images: Callable[[Any, Sequence[int], torch.Generator], dict[str, Tensor]] | None = None
    eager: bool = False


def flat(config: Any, counts: Sequence[int], source: torch.Generator) -> dict[str, Tensor]:
    """`[images, 3, height, width]`."""
    return {"pixel_values": torch.randn(sum(counts), 3, 56, 56, generator=source)}


def sized(config: Any, counts: Sequence[int], source: torch.Generator) -> dict[str, Tensor]:
    """The same, with the sizes that images had before they were padded."""
    sizes = torch.tensor([[56, 56], [56, 28]] * sum(counts))[: sum(counts)]
    return {**flat(config, counts, source), "image_sizes": sizes}


def by_row(config: Any, counts: Sequence[int], source: torch.Generator) -> dict[str, Tensor]:
    """`[rows, most images, 3, height, width]`, padded with images of zeros."""
    pixels = torch.zeros(len(counts), max(counts), 3, 56, 56)
    for row, count in enumerate(counts):
        pixels[row, :count] = torch.randn(count, 3, 56, 56, generator=source)
    return {"pixel_values": pixels}


def patches(config: Any, counts: Sequence[int], source: torch.Generator) -> dict[str, Tensor]:
    """`[patches of all images, pixels]`, and the patches of each image by time, height, width."""
    grids = torch.tensor([[1, 4, 6], [1, 4, 4]] * sum(counts))[: sum(counts)]
    vision = config.vision_config
    pixels = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    total = int(grids.prod(-1).sum())
    return {
        "pixel_values": torch.randn(total, pixels, generator=source),
        "image_grid_thw": grids,
    }


def tiles(config: Any, counts: Sequence[int], source: torch.Generator) -> dict[str, Tensor]:
    """`[images, tiles, 3, height, width]`: each image as a whole and in four parts."""
    pixels = torch.randn(sum(counts), 5, 3, 56, 56, generator=source)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[56, 56]] * sum(counts))}


_CLIP = {"model_type": "clip_vision_model"}
_PINPOINTS = {"image_grid_pinpoints": [[112, 112]]}
_SQUARES = {"image_size": [56, 56], "patch_size": [14, 14]}
_ROPE, _ROPE_GLM = {"rope_parameters": _MROPE}, {"rope_parameters": _MROPE_GLM}
_VIDEO = {"video_token_id": 91}

# Families that most multimodal checkpoints are of.
MAIN = {
    "gemma3": Family({"sliding_window": 5}, top=_GEMMA, images=flat),
    "llava": Family(vision=_CLIP, images=flat),
    "mistral3": Family(images=sized),
    "idefics3": Family(top={"scale_factor": 2}, images=by_row),
    "smolvlm": Family(top={"scale_factor": 2}, images=by_row),
    "qwen2_vl": Family(_ROPE, top=_QWEN, images=patches),
    "qwen2_5_vl": Family(_ROPE, top=_QWEN, images=patches),
    "qwen3_vl": Family(_ROPE, top=_QWEN, images=patches),
}
# Others that are tested with images.
MORE = {
    "qwen3_5": Family(_ROPE_GLM, top=_QWEN, images=patches),
    "internvl": Family(vision=_SQUARES, images=flat),
    "llava_next": Family(vision=_CLIP, top=_PINPOINTS, images=tiles),
    "aya_vision": Family(images=flat),
    "cohere2_vision": Family(images=flat),
    "cosmos3_omni": Family(_ROPE, top=_QWEN, images=patches),
    "deepseek_vl": Family(images=flat),
    "exaone4_5": Family(top=_VIDEO, images=patches),
    "glm46v": Family(_ROPE_GLM, top=_VIDEO, images=patches),
    "glm4v": Family(_ROPE_GLM, top=_VIDEO, images=patches),
    "glm4v_moe": Family(_ROPE_GLM, top=_VIDEO, images=patches),
    "glm_ocr": Family(_ROPE_GLM, top=_VIDEO, images=patches),
    "got_ocr2": Family(images=flat, eager=True),
    "hyperclovax_vision_v2": Family(images=patches),
    "idefics2": Family(images=by_row),
    "lighton_ocr": Family(images=sized),
    "llava_onevision": Family(top={**_PINPOINTS, **_VIDEO}, images=tiles),
    "qianfan_ocr": Family(vision=_SQUARES, images=flat),
    "qwen3_5_moe": Family(_ROPE_GLM, top=_QWEN, images=patches),
    "qwen3_vl_moe": Family(_ROPE, top=_QWEN, images=patches),
    "vipllava": Family(vision=_CLIP, top={"vision_feature_layers": [-2, -1]}, images=flat),
}
# And those that are tested with text only.
TEXT_ONLY = {
    "aria": Family(),
    "deepseek_vl_hybrid": Family(vision=_MLP),
    "emu3": Family({"bos_token_id": 1}, top={"vocabulary_map": _EMU}),
    "ernie4_5_vl_moe": Family({**_ROPE, "moe_intermediate_size": [24, 24]}),
    "fuyu": Family(),
    "gemma4": Family(),
    "gemma4_unified": Family(),
    "glmga": Family(_ROPE_GLM),
    "granite_docling": Family(),
    "hunyuan_vl": Family({"rope_parameters": _XDROPE}),
    "kimi_k25": Family(_LATENT),
    "lfm2_vl": Family(),
    "lfm3_vl": Family(),
    "minicpm_ocr": Family(),
    "minicpmv4_6": Family(),
    "minicpmv4_7": Family(),
    "minimax_m3_vl": Family(),
    "mistral4": Family({**_LATENT, "head_dim": 16}),
    "muse_glimmer": Family(),
    "ovis2": Family(),
    "paddleocr_vl": Family(_ROPE),
    "pp_chart2table": Family(eager=True),
    "qwen2_5_omni_thinker": Family(_ROPE, top={"vision_start_token_id": 95}),
    "qwen3_omni_moe_thinker": Family(top={"vision_start_token_id": 95}),
    "shieldgemma2": Family(),
    "step3p7": Family({"sliding_window": 5}, vision=_MLP),
    "video_llama_3": Family(),
    "video_llava": Family(),
}
# Those that are refused, with a part of the reason.
REFUSED = {
    "kosmos-2": "a generate of its own",
    # It leaves out layers by what the cache says of them, which the check at wrapping finds.
    "mllama": "gives other logits",
    "paligemma": "attend to later ones",
}
FAMILIES = MAIN | MORE | TEXT_ONLY | {name: Family(eager=True) for name in REFUSED}
FAMILIES["mllama"] = Family({"bos_token_id": 1, "cross_attention_layers": [1]})


def build(family: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """A random model of a family."""
    own, config_class = FAMILIES[family], CONFIG_MAPPING[family]
    parts = {}
    for name, part in vars(config_class()).items():
        if isinstance(part, PreTrainedConfig):
            is_text = "text" in name
            parts[name] = _tiny(part, own.text if is_text else own.vision, is_text)
    top = {**({"image_token_id": IMAGE} if own.images else {}), **own.top}
    config = config_class(**parts, **top) if parts else _tiny(config_class(), own.text, True)
    torch.manual_seed(seed)
    made: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    model = made._from_config(config, attn_implementation="eager" if own.eager else attention)
    skip_if_too_old(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.is_floating_point():
                parameter.normal_(0, 0.25)
        words: Any = model.get_input_embeddings()
        words.weight.normal_(0, 0.6 / getattr(words, "scalar_embed_scale", 1.0))
    return model.eval()


def _tiny(config: PreTrainedConfig, own: dict[str, Any], is_text: bool) -> PreTrainedConfig:
    common = _TEXT if is_text else _VISION
    names = set(config.to_dict()) | set(type(config).attribute_map)
    values = {name: value for name, value in common.items() if name in names} | own
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if is_text and kinds:
        values["layer_types"] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    kind = values.pop("model_type", config.model_type)
    return CONFIG_MAPPING[kind](**values)


class Row(NamedTuple):
    """One prompt: text, images with a token of text after each, more text.

    Attributes:
        before: tokens before the first image.
        images: their number.
        after: tokens after the last one's; -1 takes that away, too: the prompt ends in the image.
    """

    before: int
    images: int = 0
    after: int = 0


def prompts(model: PreTrainedModel, *rows: Row, side: str = "left") -> dict[str, Tensor]:
    """What a processor makes of random prompts: tokens, mask, types of tokens, images."""
    source = torch.Generator().manual_seed(3)
    counts = [row.images for row in rows]
    form = FAMILIES[model.config.model_type].images
    media = form(model.config, counts, source) if form and sum(counts) else {}
    sizes = _tokens_of_images(model, media, counts)
    texts = [_text(row, sizes, source) for row in rows]
    width = max(map(len, texts))
    pads = [[0] * (width - len(text)) for text in texts]
    both = list(zip(texts, pads, strict=True))
    ids = torch.tensor([pad + text if side == "left" else text + pad for text, pad in both])
    reals = [(pad, [1] * len(text)) for text, pad in both]
    mask = torch.tensor([pad + ones if side == "left" else ones + pad for pad, ones in reals])
    inputs = {"input_ids": ids, "attention_mask": mask, **media}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inspect.signature(model.forward).parameters:
            inputs[name] = (ids == IMAGE).long()
    return inputs


def _text(row: Row, sizes: list[int], source: torch.Generator) -> list[int]:
    def words(count: int) -> list[int]:
        return torch.randint(3, 60, (count,), generator=source).tolist()

    text = words(row.before)
    for _ in range(row.images):
        text += [IMAGE] * sizes.pop(0) + words(1)
    return text[:-1] if row.after < 0 else text + words(row.after)


@torch.no_grad()
def _tokens_of_images(
    model: PreTrainedModel, media: dict[str, Tensor], counts: Sequence[int]
) -> list[int]:
    """The number of tokens that each image takes."""
    if not media:
        return []
    encode: Any = model.base_model.get_image_features  # pyright: ignore[reportAttributeAccessIssue]
    sizes = [len(features) for features in encode(**media, return_dict=True).pooler_output]
    if len(sizes) == sum(counts):
        return sizes
    rows = zip(sizes, counts, strict=True)  # of all images of a row together
    return [size // count for size, count in rows for _ in range(count)]

"""Random heads in the layouts in which others publish them, and what they compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import VOCAB
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 32, 4, 2, 8, 40, 1e-5, 5_000.0
LAYER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "model_type": "llama",
}
DRAFTS = 24  # tokens of a draft vocabulary


@dataclass
class Published:
    """A head on disk, its tensors by the names of EAGLE-3, and its flags."""

    folder: Path
    tensors: dict[str, Tensor]
    flags: dict[str, Any]


def _drawn(*shape: int, seed: int, scale: float = 0.2) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=source, dtype=torch.float64)


def layer_tensors(
    inputs: int, qwen: bool = False, heads: int = HEADS, biases: Sequence[str] = ()
) -> dict[str, Tensor]:
    """A decoder layer whose attention reads `inputs` widths; `biases` names maps with a bias."""
    shapes = {
        "self_attn.q_proj.weight": (heads * HEAD_DIM, inputs * WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs * WIDTH),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs * WIDTH),
        "self_attn.o_proj.weight": (WIDTH, heads * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    if qwen:
        shapes |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biases}
    return {
        name: _drawn(*shape, seed=seed) + ("norm" in name)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def eagle3_tensors(
    *,
    streams: int = 3,
    qwen: bool = False,
    embedding: bool = True,
    heads: int = HEADS,
    biases: Sequence[str] = (),
    **flags: bool,
) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head, in the layout of its repository."""
    layer = layer_tensors(2, qwen, heads, biases)
    tensors = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    for seed, name in enumerate(("hidden_norm", "input_layernorm")):
        tensors[f"midlayer.{name}.weight"] = 1 + _drawn(WIDTH, seed=20 + seed)
    tensors |= {
        "fc.weight": _drawn(WIDTH, streams * WIDTH, seed=30),
        "norm.weight": 1 + _drawn(WIDTH, seed=31),
        "lm_head.weight": _drawn(DRAFTS, WIDTH, seed=32, scale=1.0),
        **draft_vocabulary(),
    }
    if embedding:
        tensors["embed_tokens.weight"] = _drawn(VOCAB, WIDTH, seed=33, scale=1.0)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + _drawn(streams * WIDTH, seed=34)
    if flags.get("fc_norm"):
        for i in range(streams):
            tensors[f"fc_norm.{i}.weight"] = 1 + _drawn(WIDTH, seed=35 + i)
    return tensors


def peagle_tensors(depth: int = 2, **options: Any) -> dict[str, Tensor]:
    """The tensors of a P-EAGLE head of several layers, in the layout of EAGLE's repository."""
    tensors = eagle3_tensors(streams=2, **options)
    for layer in range(1, depth):
        own = layer_tensors(1, options.get("qwen", False))
        own["input_layernorm.weight"] = 1 + _drawn(WIDTH, seed=60 + layer)
        tensors |= {f"layers.{layer}.{name}": 0.9**layer * each for name, each in own.items()}
    return {**tensors, "mask_hidden": _drawn(1, 1, 2 * WIDTH, seed=70, scale=1.0)}


def draft_vocabulary() -> dict[str, Tensor]:
    """`d2t` and `t2d` of some tokens of the vocabulary."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randperm(VOCAB, generator=source)[:DRAFTS].sort().values
    drafted = torch.zeros(VOCAB, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(DRAFTS), "t2d": drafted}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def changed(folder: Path, **keys: Any) -> None:
    """Change keys of the config; `None` removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_layer(folder: Path, **keys: Any) -> None:
    """Change keys of the layer's config, where the layout has it."""
    nested = json.loads((folder / "config.json").read_text()).get("transformer_layer_config")
    if nested is None:
        return changed(folder, **keys)
    return changed(folder, transformer_layer_config={**nested, **keys})


def write_eagle3(folder: Path, tensors: dict[str, Tensor], **flags: Any) -> Path:
    """An EAGLE-3 head in the layout of its repository."""
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTS}
    return write(folder, {**config, **flags}, tensors)


def write_speculators(folder: Path, tensors: dict[str, Tensor], **flags: Any) -> Path:
    """An EAGLE-3 head in the layout of speculators."""
    layer = dict(LAYER)
    if "midlayer.self_attn.q_norm.weight" in tensors:
        layer["model_type"] = "qwen3"
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFTS,
        "norm_before_residual": False,
        **flags,
    }
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    return write(folder, config, renamed)


def write_eagle(
    folder: Path, *, bias: bool = True, prefix: str = "", biases: Sequence[str] = (), **keys: Any
) -> dict[str, Tensor]:
    """An EAGLE-2 head; returns its tensors."""
    layer = layer_tensors(1, biases=biases)
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors["fc.weight"] = _drawn(WIDTH, 2 * WIDTH, seed=40)
    tensors["embed_tokens.weight"] = _drawn(VOCAB, WIDTH, seed=41, scale=1.0)
    if bias:
        tensors["fc.bias"] = _drawn(WIDTH, seed=42)
    config = {**LAYER, "architectures": ["LlamaForCausalLM"], "bias": bias, **keys}
    write(folder, config, {prefix + name: tensor for name, tensor in tensors.items()})
    return tensors


def write_medusa(folder: Path, *, heads: int = 3, layers: int = 2) -> dict[str, Tensor]:
    """A Medusa head in the layout of its repository; returns its tensors."""
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            seed = 50 + 10 * head + layer
            tensors[f"{head}.{layer}.linear.weight"] = _drawn(WIDTH, WIDTH, seed=seed)
            tensors[f"{head}.{layer}.linear.bias"] = _drawn(WIDTH, seed=seed + 5)
        tensors[f"{head}.{layers}.weight"] = _drawn(VOCAB, WIDTH, seed=90 + head, scale=1.0)
    write(folder, {"medusa_num_heads": heads, "medusa_num_layers": layers}, tensors)
    return tensors


# What the heads compute, stated without any module: of one sequence at a time


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm."""
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: Tensor, share: float = 1) -> Tensor:
    """`[heads, n, dim]` with rotary position embeddings of positions 0 to n - 1.

    Only the first `share` of each head is rotated.
    """
    turning = int(share * x.shape[-1])
    if turning < x.shape[-1]:
        return torch.cat([rotated(x[..., :turning]), x[..., turning:]], dim=-1)
    half = x.shape[-1] // 2
    frequencies = 1 / THETA ** (torch.arange(half, dtype=torch.float) * 2 / x.shape[-1])
    angles = (torch.arange(x.shape[1])[:, None].float() * frequencies).to(x.dtype)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def decoder_layer(w: dict[str, Tensor], read: Tensor, residual: Tensor, share: float = 1) -> Tensor:
    """Causal attention over `read` `[n, any]`, and the MLP."""

    def mapped(x: Tensor, name: str) -> Tensor:
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def heads(name: str) -> Tensor:
        x = mapped(read, f"self_attn.{name}_proj").view(len(read), -1, HEAD_DIM)
        if f"self_attn.{name}_norm.weight" in w:
            x = rms(x, w[f"self_attn.{name}_norm.weight"])
        return x.transpose(0, 1)

    q, k, v = rotated(heads("q"), share), rotated(heads("k"), share), heads("v")
    k, v = (x.repeat_interleave(len(q) // KV_HEADS, 0) for x in (k, v))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True)
    joined = attended.transpose(0, 1).reshape(len(read), -1)
    r = residual + mapped(joined, "self_attn.o_proj")
    x = rms(r, w["post_attention_layernorm.weight"])
    gated = silu(mapped(x, "mlp.gate_proj")) * mapped(x, "mlp.up_proj")
    return r + mapped(gated, "mlp.down_proj")


def eagle3_logits(
    tensors: dict[str, Tensor],
    tokens: Tensor,
    streams: list[Tensor],
    drafts: int,
    share: float = 1,
    **flags: bool,
) -> list[Tensor]:
    """Logits over the draft vocabulary for the drafts after `tokens`, given the drafts.

    Args:
        tensors: in the layout of the EAGLE-3 repository.
        tokens: `[n]` the sequence, of which the last `drafts` tokens are drafts.
        streams: `[n - drafts - 1, width]` the target's residual streams at all tokens before the
            pending one, which is the last that is no draft.
        drafts: how many there are.
        share: of each attention head, what is rotated.
        flags: those of the architecture.
    """
    features = _fused(tensors, streams, **flags)
    found = []
    for _ in range(drafts + 1):
        # Row i has the token at i + 1 and the features of the token at i.
        y, out = _eagle3_rows(tensors, tokens[1 : len(features) + 1], features, share, **flags)
        found.append(linear(out[-1:], tensors["lm_head.weight"]))
        features = torch.cat([features, (out if flags.get("norm_output") else y)[-1:]])
    return found


def peagle_logits(
    tensors: dict[str, Tensor],
    tokens: Tensor,
    streams: list[Tensor],
    drafts: int,
    mask_token: int,
    **flags: bool,
) -> Tensor:
    """Logits `[drafts, n]` of the drafts after `tokens`, all of them in one pass."""
    masks = list(tensors["mask_hidden"].view(len(streams), 1, WIDTH).expand(-1, drafts - 1, -1))
    streams = [torch.cat(pair) for pair in zip(streams, masks, strict=True)]
    read = torch.cat([tokens[1:], torch.full((drafts - 1,), mask_token)])
    _, out = _eagle3_rows(tensors, read, _fused(tensors, streams, **flags), **flags)
    return linear(out[-drafts:], tensors["lm_head.weight"])


def _fused(tensors: dict[str, Tensor], streams: list[Tensor], **flags: bool) -> Tensor:
    if flags.get("fc_norm"):
        streams = [rms(s, tensors[f"fc_norm.{i}.weight"]) for i, s in enumerate(streams)]
    joined = torch.cat(streams, dim=-1)
    if flags.get("norm_before_fc"):
        joined = rms(joined, tensors["input_norm.weight"])
    return linear(joined, tensors["fc.weight"])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _eagle3_rows(
    tensors: dict[str, Tensor], tokens: Tensor, features: Tensor, share: float = 1, **flags: bool
) -> tuple[Tensor, Tensor]:
    """Output of the layers, and its norm, for pairs of a token and features."""
    w, layer = _part(tensors, "midlayer."), 1
    normed = rms(features, w["hidden_norm.weight"])
    embedded = rms(tensors["embed_tokens.weight"][tokens], w["input_layernorm.weight"])
    residual = normed if flags.get("norm_before_residual") else features
    y = decoder_layer(w, torch.cat([embedded, normed], dim=-1), residual, share)
    while w := _part(tensors, f"layers.{layer}."):
        y = decoder_layer(w, rms(y, w["input_layernorm.weight"]), y, share)
        layer += 1
    return y, rms(y, tensors["norm.weight"])


def eagle_logits(
    tensors: dict[str, Tensor], tokens: Tensor, last: Tensor, lm_head: Tensor, drafts: int
) -> list[Tensor]:
    """The same of EAGLE-2; `last` `[n - drafts - 1, width]` are inputs of the target's LM head."""
    w = {n.removeprefix("layers.0."): t for n, t in tensors.items() if n.startswith("layers.0.")}
    features, found = last, []
    for _ in range(drafts + 1):
        embedded = tensors["embed_tokens.weight"][tokens[1 : len(features) + 1]]
        x = linear(
            torch.cat([embedded, features], -1), tensors["fc.weight"], tensors.get("fc.bias")
        )
        y = decoder_layer(w, x, x)[-1:]
        found.append(linear(y, lm_head))
        features = torch.cat([features, y])
    return found


def medusa_logits(tensors: dict[str, Tensor], last: Tensor, head: int, layers: int) -> Tensor:
    """Logits of one of Medusa's heads at `last` `[n, width]`, inputs of the target's LM head."""
    for layer in range(layers):
        weight = tensors[f"{head}.{layer}.linear.weight"]
        last = last + silu(linear(last, weight, tensors[f"{head}.{layer}.linear.bias"]))
    return linear(last, tensors[f"{head}.{layers}.weight"])


def residual_streams(target, tokens, layers):
    """The target's residual streams at `tokens` `[n]`, by the number of layers below."""
    seen = {}
    hooks = [
        target.model.layers[layer - 1].register_forward_hook(
            lambda module, args, output, layer=layer: seen.__setitem__(layer, output[0])
        )
        for layer in layers
    ]
    try:
        with torch.no_grad():
            last = target.model(tokens[None]).last_hidden_state[0]
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[layer] for layer in layers], last

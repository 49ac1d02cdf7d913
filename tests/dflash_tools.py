"""Random DFlash, DSpark and DFlash2 heads in published layouts, and what they compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from conftest import VOCAB
from published import (
    DRAFTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER,
    WIDTH,
    _drawn,
    draft_vocabulary,
    layer_tensors,
    rms,
    rotated,
    write,
)
from torch import Tensor
from torch.nn.functional import linear, silu

BLOCK, MASK_TOKEN, STREAMS, RANK = 4, 7, (2, 4), 6
QWEN3 = {**LAYER, "model_type": "qwen3"}


@dataclass
class Published:
    """A head, by its tensors in speculators' names, and what its config says beside the sizes.

    Attributes:
        tensors: the tensors.
        from_anchor: whether the anchor's row drafts.
        window: the sliding window of its second layer.
        of_anchor: whether the window is measured from the anchor.
        causal: whether a row of a sliding layer sees only those before it in the block.
    """

    tensors: dict[str, Tensor]
    from_anchor: bool = False
    window: int | None = None
    of_anchor: bool = True
    causal: bool = True
    keys: dict[str, Any] = field(default_factory=dict)


def dflash_tensors(depth: int = 2, trimmed: bool = False) -> dict[str, Tensor]:
    """The tensors of a DFlash head."""
    tensors = {
        "fc.weight": _drawn(WIDTH, len(STREAMS) * WIDTH, seed=100),
        "hidden_norm.weight": 1 + _drawn(WIDTH, seed=101),
        "norm.weight": 1 + _drawn(WIDTH, seed=102),
    }
    for layer in range(depth):
        own = layer_tensors(1, qwen=True)
        own["input_layernorm.weight"] = 1 + _drawn(WIDTH, seed=103)
        tensors |= {f"layers.{layer}.{name}": 0.9**layer * each for name, each in own.items()}
    if trimmed:
        readout = _drawn(DRAFTS, WIDTH, seed=104, scale=1.0)
        tensors |= {"lm_head.weight": readout, **draft_vocabulary()}
    return tensors


def markov_tensors(markov_type: str, drafts: int) -> dict[str, Tensor]:
    """What DSpark adds: a bias of this type, and a confidence output."""
    tensors = {
        "markov_head.markov_w1.weight": _drawn(VOCAB, RANK, seed=110, scale=1.0),
        "markov_head.markov_w2.weight": _drawn(drafts, RANK, seed=111, scale=0.5),
        "confidence_head.proj.weight": _drawn(1, WIDTH + RANK, seed=112),
        "confidence_head.proj.bias": _drawn(1, seed=113),
    }
    if markov_type == "gated":
        tensors["markov_head.gate_proj.weight"] = _drawn(RANK, WIDTH + RANK, seed=114)
        tensors["markov_head.gate_proj.bias"] = _drawn(RANK, seed=115)
    if markov_type == "rnn":
        tensors["markov_head.joint_proj.weight"] = _drawn(3 * RANK, 2 * RANK + WIDTH, seed=116)
        tensors["markov_head.joint_proj.bias"] = _drawn(3 * RANK, seed=117)
    return tensors


def dflash2_tensors(depth: int = 2, taps: int = 2, group: int = 8) -> dict[str, Tensor]:
    """What DFlash2 adds: convolutions around every sublayer, and a selector."""
    tensors = {
        "candidate_selector.predecessor_codebook": _drawn(VOCAB, RANK, seed=120, scale=1.0),
        "candidate_selector.successor_codebook": _drawn(VOCAB, RANK, seed=121, scale=1.0),
        "candidate_selector.hidden_projection.weight": _drawn(RANK, WIDTH, seed=122),
    }
    for layer in range(depth):
        for seed, name in enumerate(("attention_conv", "mlp_conv"), 123):
            prefix = f"layers.{layer}.{name}"
            tensors[f"{prefix}.base_kernel"] = 0.5 + _drawn(2, taps, WIDTH, seed=seed)
            shape = 2 * taps * WIDTH // group, WIDTH
            tensors[f"{prefix}.kernel_projection.weight"] = _drawn(*shape, seed=seed + 2)
    return tensors


# Layouts


def write_speculators(folder: Path, head: Published, algorithm: str = "dflash") -> Path:
    """The layout of speculators, whose ids of hidden states count the layers below."""
    layer = {**QWEN3, "num_hidden_layers": _depth(head.tensors), **_sliding(head)}
    config = {
        "architectures": ["Any"],
        "speculators_model_type": algorithm,
        "transformer_layer_config": layer,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(STREAMS),
        "mask_token_id": MASK_TOKEN,
        "sample_from_anchor": head.from_anchor,
        "sliding_window_non_causal": not head.causal,
        **head.keys,
    }
    return write(folder, config, head.tensors)


def write_z_lab(folder: Path, head: Published, **others: Any) -> Path:
    """z-lab's layout, whose ids name the layers whose output is read."""
    nested = {
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [layers - 1 for layers in STREAMS],
        "block_size": BLOCK,
    }
    config = {
        **QWEN3,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": _depth(head.tensors),
        "is_causal": None if head.causal else False,  # null: in the layers that slide
        "dflash_config": {**nested, **others},
        **_sliding(head),
        **head.keys,
    }
    return write(folder, config, head.tensors)


def write_deepspec(folder: Path, head: Published) -> Path:
    """DeepSpec's layout, with everything at the top of the config."""
    config = {
        **QWEN3,
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": _depth(head.tensors),
        "target_layer_ids": [layers - 1 for layers in STREAMS],
        "mask_token_id": MASK_TOKEN,
        "block_size": BLOCK,
        "markov_rank": RANK,
        "enable_confidence_head": True,
    }
    return write(folder, config, head.tensors)


def write_transformers(folder: Path, head: Published) -> Path:
    """The layout of transformers' own model."""
    config = {
        **{key: value for key, value in QWEN3.items() if key != "vocab_size"},
        "model_type": "muse_glimmer_assistant",
        "architectures": ["MuseGlimmerAssistantModel"],
        "num_hidden_layers": _depth(head.tensors),
        "layer_types": ["full_attention"] * _depth(head.tensors),
        "target_layer_ids": [layers - 1 for layers in STREAMS],
        "mask_token_id": MASK_TOKEN,
        "block_size": BLOCK,
        **_sliding(head),
    }
    others = {"fc.weight": "encoder.fc.weight"}
    others["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
    return write(folder, config, {others.get(n, n): t for n, t in head.tensors.items()})


def _depth(tensors: dict[str, Tensor]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))


def _sliding(head: Published) -> dict[str, Any]:
    if head.window is None:
        return {}
    kinds = ["full_attention", "sliding_attention"][: _depth(head.tensors)]
    return {"layer_types": kinds, "sliding_window": head.window, "use_sliding_window": True}


# What they compute, stated without any module: of one sequence at a time


def dflash_block(
    head: Published, embedding: Tensor, anchor: Tensor, streams: list[Tensor]
) -> Tensor:
    """`[block, width]` inputs of the LM head.

    Args:
        head: the head.
        embedding: `[vocab, width]` the target's.
        anchor: `[]` the newest token.
        streams: `[n, width]` the target's residual streams at all tokens before it.
    """
    joined = linear(torch.cat(streams, dim=-1), head.tensors["fc.weight"])
    context = rms(joined, head.tensors["hidden_norm.weight"])
    tokens = torch.tensor([int(anchor), *[MASK_TOKEN] * (BLOCK - 1)])
    x = embedding[tokens]
    for layer in range(_depth(head.tensors)):
        prefix = f"layers.{layer}."
        w = {n.removeprefix(prefix): t for n, t in head.tensors.items() if n.startswith(prefix)}
        u, added = _prepared(w, "attention_conv", rms(x, w["input_layernorm.weight"]))
        slides = head.window is not None and layer == 1
        attended = _attended(w, u, context, _seen(head, len(context), slides))
        x = x + _finished(w, "attention_conv", attended, added)
        u, added = _prepared(w, "mlp_conv", rms(x, w["post_attention_layernorm.weight"]))
        gated = silu(linear(u, w["mlp.gate_proj.weight"])) * linear(u, w["mlp.up_proj.weight"])
        x = x + _finished(w, "mlp_conv", linear(gated, w["mlp.down_proj.weight"]), added)
    return rms(x, head.tensors["norm.weight"])


def _seen(head: Published, known: int, slides: bool) -> Tensor:
    """`[block, known + block]` which keys each row sees."""
    seen = torch.ones(BLOCK, known + BLOCK, dtype=torch.bool)
    for row in range(BLOCK) if slides else ():
        for key in range(known + BLOCK):
            place = known + row
            start = known - head.window if head.of_anchor else place - head.window + 1
            end = place if head.causal else known + BLOCK
            if not head.of_anchor:
                end = min(end, place + head.window - 1)
            seen[row, key] = start <= key <= end
    return seen


def _attended(w: dict[str, Tensor], u: Tensor, context: Tensor, seen: Tensor) -> Tensor:
    read = torch.cat([context, u])  # positions 0, 1, 2, ...

    def heads(name: str, count: int) -> Tensor:
        x = linear(read, w[f"self_attn.{name}_proj.weight"]).view(-1, count, HEAD_DIM)
        if name != "v":
            x = rms(x, w[f"self_attn.{name}_norm.weight"])
        return x.transpose(0, 1)

    q = rotated(heads("q", HEADS))[:, len(context) :]
    k, v = rotated(heads("k", KV_HEADS)), heads("v", KV_HEADS)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf)
    mixed = scores.softmax(-1) @ v
    return linear(mixed.transpose(0, 1).reshape(len(u), -1), w["self_attn.o_proj.weight"])


def _prepared(w: dict[str, Tensor], name: str, u: Tensor) -> tuple[Tensor, Tensor | None]:
    if f"{name}.base_kernel" not in w:
        return u, None
    base = w[f"{name}.base_kernel"]
    added = linear(u, w[f"{name}.kernel_projection.weight"]).view(len(u), 2, base.shape[1], -1)
    added = added.repeat_interleave(WIDTH // added.shape[-1], dim=-1)
    return _convolved(u, base[0] + added[:, 0]), base[1] + added[:, 1]


def _finished(w: dict[str, Tensor], name: str, out: Tensor, kernel: Tensor | None) -> Tensor:
    return out if kernel is None else _convolved(out, kernel)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    rows = []
    for row in range(len(x)):
        taps = range(min(kernel.shape[1], row + 1))
        rows.append(sum(kernel[row, tap] * x[row - tap] for tap in taps))
    return torch.stack(rows)


def dflash_logits(
    head: Published, hidden: Tensor, lm_head: Tensor, before: list[int], top_k: int = 16
) -> Tensor:
    """Logits over the draft vocabulary of the draft after `before`.

    Args:
        head: the head.
        hidden: `[block, width]` from `dflash_block`.
        lm_head: the LM head.
        before: the anchor and the drafts before this one.
        top_k: candidates of DFlash2.
    """
    tensors, row = head.tensors, len(before) - head.from_anchor
    logits = linear(hidden[row], lm_head)
    if "markov_head.markov_w1.weight" in tensors:
        # The bias of every row up to this one; if the anchor's row drafts nothing, it is the first.
        previous = before if head.from_anchor else [before[0], *before]
        return logits + _markov(tensors, hidden, previous)
    if "candidate_selector.successor_codebook" in tensors:
        of = "candidate_selector."
        projected = linear(hidden[row], tensors[f"{of}hidden_projection.weight"])
        query = tensors[f"{of}predecessor_codebook"][before[-1]] * projected
        best = logits.topk(top_k).indices
        scores = logits[best] + tensors[f"{of}successor_codebook"][best] @ query
        return torch.full_like(logits, -torch.inf).scatter(0, best, scores)
    return logits


def _markov(tensors: dict[str, Tensor], hidden: Tensor, previous: list[int]) -> Tensor:
    state, m = torch.zeros(RANK, dtype=hidden.dtype), torch.empty(0)
    for row, token in enumerate(previous):
        m = e = tensors["markov_head.markov_w1.weight"][token]
        h = hidden[row]
        if "markov_head.gate_proj.weight" in tensors:
            gate, bias = (tensors[f"markov_head.gate_proj.{n}"] for n in ("weight", "bias"))
            m = linear(torch.cat([h, e]), gate, bias).sigmoid() * e
        if "markov_head.joint_proj.weight" in tensors:
            joint, bias = (tensors[f"markov_head.joint_proj.{n}"] for n in ("weight", "bias"))
            g, c, o = linear(torch.cat([state, e, h]), joint, bias).chunk(3)
            state, m = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()
    return linear(m, tensors["markov_head.markov_w2.weight"])

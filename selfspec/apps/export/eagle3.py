"""An `eagle3` head in the formats that serving engines load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from re import match

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_NAME

from selfspec.apps.export.guides import guide, new_folder
from selfspec.config import JsonObject, Options
from selfspec.decoder import Decoder
from selfspec.heads import CARD_NAME, Eagle3Head, ExitHead
from selfspec.heads.formats.eagle import LAYER_IDS
from selfspec.heads.formats.files import PUBLISHED_CONFIG
from selfspec.heads.llama_layer import ATTENTION_MAPS, MLP_MAPS

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class ExportedEagle3:
    """What was written.

    Attributes:
        target: the checkpoint that the head drafts for: a hub id or a folder.
        parameters: parameters of the head, its LM head included.
        vocabulary: tokens that it drafts.
        feature_layers: the target's hidden states that it reads, by the number of layers below.
        num_draft_tokens: drafts a round in the launch lines.
        parallel: whether it makes all of them in one pass (P-EAGLE).
    """

    target: str
    parameters: int
    vocabulary: int
    feature_layers: tuple[int, ...]
    num_draft_tokens: int
    parallel: bool


@torch.no_grad()
def export_eagle3(
    decoder: Decoder,
    head: Eagle3Head,
    folder: str | Path,
    *,
    target: str,
    num_draft_tokens: int = 4,
) -> ExportedEagle3:
    """Write a head as `folder/eagle3` (EAGLE's layout) and `folder/speculators`.

    Args:
        decoder: the target.
        head: the head.
        folder: created as a whole, or not at all if there is an error.
        target: hub id or folder of the target, for the launch lines.
        num_draft_tokens: drafts a round in the launch lines.

    Raises:
        FileExistsError: `folder` exists and is not empty.
        ValueError: the target's LM head has a bias, which the formats lack, or is quantized.
    """
    tensors = eagle3_tensors(decoder, head)
    exported = ExportedEagle3(
        target=target,
        parameters=sum(t.numel() for t in tensors.values() if t.is_floating_point()),
        vocabulary=len(tensors["lm_head.weight"]),
        feature_layers=head.feature_layers,
        num_draft_tokens=num_draft_tokens,
        parallel=head.drafts_at_once,
    )
    layer = layer_config(decoder, head.options, str(tensors["fc.weight"].dtype))
    with new_folder(folder) as scratch:
        write_head(scratch / "eagle3", _eagle_config(decoder, head, layer, exported), tensors)
        renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        config = _speculators_config(decoder, head, layer, exported)
        write_head(scratch / "speculators", config, renamed)
        (scratch / CARD_NAME).write_text(_guide(exported, str(folder)), encoding="utf-8")
    return exported


def eagle3_tensors(decoder: Decoder, head: Eagle3Head) -> dict[str, Tensor]:
    """The head's tensors by the names of EAGLE's layout, its LM head included."""
    tensors = {_published_name(name): tensor for name, tensor in published_state(head)}
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"][None, None]
    if head.readout is None:
        tensors["lm_head.weight"] = lm_head_rows(decoder, head.vocab_ids)
    if head.vocab_ids is not None:
        tensors |= draft_vocabulary(decoder, head.vocab_ids)
    count = head.options["num_hidden_layers"]
    layers = ["midlayer", *(f"layers.{i}" for i in range(1, count))]
    tensors |= absent_biases(layers, head.options["layer"]["biases"], tensors)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def published_state(head: ExitHead) -> list[tuple[str, Tensor]]:
    """The head's own names and tensors, without those that published layouts do not have."""
    own = head.state_dict().items()
    return [(n, t) for n, t in own if n != "vocab_ids" and not n.startswith("calibrators.")]


def lm_head_rows(decoder: Decoder, vocab_ids: Tensor | None) -> Tensor:
    """The rows of the target's LM head for these tokens, or all, with the scale of its logits.

    Raises ValueError if the LM head has a bias, or is quantized.
    """
    if getattr(decoder.lm_head, "bias", None) is not None:
        raise ValueError(
            f"the LM head of {type(decoder.causal_lm).__name__} has a bias, which files of heads "
            "cannot hold; fit the head with an LM head of its own (option vocabulary)"
        )
    whole = decoder.lm_head_weight.detach()
    rows = whole if vocab_ids is None else whole[vocab_ids.to(whole.device)]
    scale = _logits_scale(decoder, whole)
    return rows if scale == 1 else rows * scale


def _logits_scale(decoder: Decoder, weight: Tensor) -> float:
    """By what a target multiplies its logits (Granite, Cohere); 1 if it computes anything else."""
    states = torch.linspace(-1, 1, weight.shape[1]).to(weight)[None, None]
    plain, logits = (states @ weight.T).float(), decoder.unembed(states).float()
    plain = plain.to(logits.device)[..., : logits.shape[-1]]
    scale = float((logits * plain).sum() / plain.square().sum())
    error = float((logits - scale * plain).abs().max() / logits.abs().max())
    return scale if error < 1e-2 < abs(scale - 1) else 1.0


def draft_vocabulary(decoder: Decoder, vocab_ids: Tensor) -> dict[str, Tensor]:
    """`d2t`, each draft token's distance to its token, and `t2d`, whether a token is drafted."""
    ids = vocab_ids.cpu()
    drafted = torch.zeros(decoder.vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def _published_name(name: str) -> str:
    """The name in EAGLE's layout of a tensor of our heads."""
    further = match(r"layer\.rest\.(\d+)\.(.*)", name)
    if further is not None:
        return f"layers.{int(further[1]) + 1}.{further[2]}"
    others = {"layer.norm.weight": "norm.weight", "mask.hidden": "mask_hidden"}
    return others.get(name, name.replace("layer.", "midlayer.").replace("readout.", "lm_head."))


def absent_biases(
    layers: Iterable[str], biases: Iterable[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Zeros for linear maps without a bias beside those of a layer that have one, `biases`.

    Engines read `attention_bias` and `mlp_bias`, which mean all maps of a part. `layers` are
    prefixes of the names of `tensors`.
    """
    biases = set(biases)
    absent = [
        f"{layer}.{name}"
        for layer in layers
        for maps in (ATTENTION_MAPS, MLP_MAPS)
        if not biases.isdisjoint(maps)
        for name in maps
        if name not in biases
    ]
    return {f"{name}.bias": torch.zeros_like(tensors[f"{name}.weight"][:, 0]) for name in absent}


def write_head(folder: Path, config: JsonObject, tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and safetensors."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / PUBLISHED_CONFIG).write_text(text, encoding="utf-8")
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def layer_config(decoder: Decoder, options: Options, dtype: str) -> JsonObject:
    """The config of a head's layers, with the rotary embedding as engines of every age read it."""
    layer = dict(options["layer"])
    rope, biases = dict(layer.pop("rope_parameters")), set(layer.pop("biases"))
    partial = {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    # The frequencies of other kinds depend on the head's own number of positions.
    longest = decoder.max_positions if kind in ("default", "linear", "llama3") else None
    return {
        **layer,
        **partial,
        "attention_bias": not biases.isdisjoint(ATTENTION_MAPS),
        "mlp_bias": not biases.isdisjoint(MLP_MAPS),
        "num_hidden_layers": options["num_hidden_layers"],
        "vocab_size": decoder.vocab_size,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "max_position_embeddings": longest or layer["max_position_embeddings"],
        "tie_word_embeddings": False,
        "torch_dtype": dtype.removeprefix("torch."),
    }


def _flags(decoder: Decoder, head: Eagle3Head, exported: ExportedEagle3) -> JsonObject:
    mask = {} if head.mask is None else {"mask_token_id": head.options["mask_token"]}
    return {
        **{name: head.options[name] for name in _FLAGS},
        **mask,
        "draft_vocab_size": exported.vocabulary,
        "target_hidden_size": decoder.config.hidden_size,
        LAYER_IDS: sorted(head.feature_layers),
    }


def _eagle_config(
    decoder: Decoder, head: Eagle3Head, layer: Options, exported: ExportedEagle3
) -> JsonObject:
    """`config.json` of EAGLE's layout.

    SGLang and TensorRT-LLM read the nested ids, which are indices of the layers whose outputs are
    used; vLLM reads the others, which count layers below. SGLang takes nested ids for indices only
    if the first is 1, which the README tells.
    """
    outputs = [layers - 1 for layers in sorted(head.feature_layers)]
    kind = "Eagle3Qwen3ForCausalLM" if layer["model_type"] == "qwen3" else "LlamaForCausalLMEagle3"
    flags = _flags(decoder, head, exported)
    if "mask_token_id" in flags:
        flags |= {"ptd_token_id": flags.pop("mask_token_id"), "parallel_drafting": True}
    return {
        "architectures": [kind],
        **layer,
        **flags,
        "eagle_config": {LAYER_IDS: outputs, "use_aux_hidden_state": True},
    }


def _speculators_config(
    decoder: Decoder, head: Eagle3Head, layer: Options, exported: ExportedEagle3
) -> JsonObject:
    """`config.json` of speculators' layout."""
    algorithm, name = ("peagle", "PEagle") if exported.parallel else ("eagle3", "Eagle3")
    return {
        "architectures": [f"{name}Speculator"],
        **speculators_facts(decoder, algorithm, exported.num_draft_tokens, exported.target),
        "transformer_layer_config": dict(layer),
        "torch_dtype": layer["torch_dtype"],
        **_flags(decoder, head, exported),
    }


def speculators_facts(
    decoder: Decoder, algorithm: str, num_draft_tokens: int, target: str
) -> JsonObject:
    """The keys of speculators' configs that say what a head is for."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    method |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"name_or_path": target, "architectures": [type(decoder.causal_lm).__name__]}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }


_SGLANG_NOTE = """
SGLang reads other layers of the target for this head, and accepts fewer drafts: it takes the ids \
in `eagle_config` for indices of layers only if the first is 1.
"""


def _guide(exported: ExportedEagle3, folder: str) -> str:
    plain, k = f"{folder}/eagle3", exported.num_draft_tokens
    vllm = {"method": "eagle3", "model": f"{folder}/speculators", "num_speculative_tokens": k}
    if exported.parallel:
        vllm["parallel_drafting"] = True
    words = dict(
        folder=plain,
        vllm=vllm,
        layers=", ".join(map(str, exported.feature_layers)),
        sglang_note="" if exported.feature_layers[0] == 2 else _SGLANG_NOTE,
        name_of="P-EAGLE" if exported.parallel else "EAGLE-3",
        **asdict(exported),
    )
    # Of the engines, only vLLM drafts with parallel heads.
    others = "" if exported.parallel else guide("eagle3_engines", **words)
    return guide("eagle3", **words, others=others)

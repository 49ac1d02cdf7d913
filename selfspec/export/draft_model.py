"""Folders that are there whole or not at all."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from re import fullmatch
from shlex import quote
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from selfspec.decoder import Decoder
from selfspec.decoder.support import layer_windows
from selfspec.heads import CARD_NAME, ExitHead, LensHead, LoraHead
from selfspec.heads.store import fingerprint


def check_free(folder: str | Path) -> Path:
    """The folder to write, absolute.

    Raises:
        FileExistsError: it is there already, with something in it.
    """
    path = Path(folder).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{folder} is there already; delete it, or name another folder")
    return path


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when the block ends well.

    Raises:
        FileExistsError: `folder` is there already, with something in it.
    """
    path = check_free(folder)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if path.exists():
            path.rmdir()
        scratch.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# The config of a model that has only some of another's layers.

# Lists of layers, by their numbers.
_NUMBERS = ("mlp_only_layers", "moe_layers")


def shortened(config: PreTrainedConfig, places: Sequence[int]) -> PreTrainedConfig:
    """The config of the model whose layers are those at `places` of `config`'s.

    Whatever a config says of each layer (its kind of attention, whether it has positions or
    experts) is cut to these.
    """
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    fields = _per_layer(text.to_dict(), depth, places)
    for name, value in {"num_hidden_layers": len(places), **fields}.items():
        setattr(text, name, value)
    # Read as from a file: what a config works out of its fields is worked out anew.
    return type(short).from_dict(short.to_dict())


def _per_layer(fields: dict[str, Any], depth: int, places: Sequence[int]) -> dict[str, Any]:
    """Fields that say something of each layer, for the layers that stay."""
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, (list, tuple)):
            continue
        if name in _NUMBERS:
            cut[name] = [new for new, old in enumerate(places) if old in value]
        elif len(value) == depth and "token" not in name and name != "architectures":
            cut[name] = [value[place] for place in places]
    if "attention_types" in fields:  # GPT-Neo writes its list run by run
        cut["attention_types"] = [[[kind], 1] for kind in cut["attention_layers"]]
    return cut


# LM heads that say what an exit head says, with nothing in front of them but a norm.

# As far down as float16 reaches with room for the logit itself.
_NEVER = -1e4


def folded_readout(decoder: Decoder, head: ExitHead) -> dict[str, Tensor]:
    """The parameters of the LM head that `head` makes of the target's; empty if it stays.

    Raises:
        ValueError: the target's LM head is quantized, or has an adapter.
    """
    weight = _corrected(decoder, head)
    ids = head.vocab_ids
    if ids is None:
        return {} if weight is None else {"weight": weight}
    return _expanded(decoder, decoder.lm_head_weight if weight is None else weight, ids)


def _corrected(decoder: Decoder, head: ExitHead) -> Tensor | None:
    """`[vocab, hidden]` W (I + B A) of a lens, W + B A of a LoRA head."""
    if isinstance(head, LensHead):
        weight = decoder.lm_head_weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        wide, up, down = (
            matrix.to(weight.device, exact) for matrix in (weight, head.up.weight, head.down.weight)
        )
        return (wide + wide @ up @ down).to(weight.dtype)
    if isinstance(head, LoraHead):
        weight = decoder.lm_head_weight
        adapted: Any = head.readout
        rows = slice(None) if head.vocab_ids is None else head.vocab_ids.to(weight.device)
        corrected = weight.detach().clone()
        corrected[rows] += adapted.get_delta_weight("exit").to(weight.device, weight.dtype)
        return corrected
    return None


def _expanded(decoder: Decoder, weight: Tensor, vocab_ids: Tensor) -> dict[str, Tensor]:
    """An LM head over all tokens whose likeliest one is always among `vocab_ids`.

    A token outside gets the mean of the rows inside, and so the mean of their logits, which is
    never the highest; where there is a bias, a very low one as well.
    """
    ids = vocab_ids.to(weight.device)
    outside = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    outside[ids] = False
    expanded = weight.detach().clone()
    exact = torch.promote_types(weight.dtype, torch.float32)
    expanded[outside] = weight[ids].to(exact).mean(0).to(weight.dtype)
    bias: Tensor | None = getattr(decoder.lm_head, "bias", None)
    if bias is None:
        return {"weight": expanded}
    return {"weight": expanded, "bias": bias.detach().masked_fill(outside.to(bias.device), _NEVER)}


# The first layers of a target and an exit head, as one stock model of the same architecture.

FOLDABLE = ("block", "lora", "lens", "shared")
"""Kinds of heads that fold, the best drafters first."""


def check_foldable(head: ExitHead, fitted: Sequence[ExitHead] = ()) -> None:
    """Raise ValueError, naming the nearest of the `fitted` heads that folds, unless `head` does."""
    if head.kind in FOLDABLE:
        return
    others = [other for other in fitted if other.kind in FOLDABLE]
    others.sort(key=lambda h: (abs(h.exit_layer - head.exit_layer), FOLDABLE.index(h.kind)))
    kind, exit_layer = "shared", max(1, head.exit_layer)
    if others:
        kind, exit_layer = others[0].kind, others[0].exit_layer
    raise ValueError(
        f"a {head.kind} head does not fold into a stock checkpoint, which has no place for what "
        f"it reads of the target's own passes; the nearest that does is {kind!r} at exit_layer "
        f"{exit_layer} (--head {kind} --exit-layer {exit_layer})"
    )


@torch.no_grad()
def fold(decoder: Decoder, head: ExitHead) -> PreTrainedModel:
    """A model of the target's own class that says what an exit says.

    It has the layers below the exit, the head's own layer above them if there is one, the head's
    norm as its final norm, and an LM head that contains a lens's or an adapter's correction. Over
    a trimmed vocabulary its likeliest token is the head's.

    Args:
        decoder: the target.
        head: the exit head, fitted to it.

    Returns:
        A model to be saved: its weights are the target's own tensors where they are the same, and
        buffers that a checkpoint does not hold are not there.

    Raises:
        ValueError: the head's kind does not fold; the target is quantized or carries adapters; no
            model of its class has such layers.
    """
    check_foldable(head)
    _check_plain(decoder)
    places = [*range(head.exit_layer), *([] if head.layer is None else [head.place])]
    readout = folded_readout(decoder, head)
    config = shortened(decoder.causal_lm.config, places)
    text = config.get_text_config(decoder=True)
    if readout:
        config.tie_word_embeddings = text.tie_word_embeddings = False
    config.dtype = decoder.dtype
    _check_windows(decoder, head, layer_windows(text, len(places)), places)
    with torch.device("meta"):
        draft = type(decoder.causal_lm)(config)
    _fill(draft, _weights(decoder, head, readout), head)
    draft.generation_config = copy.deepcopy(decoder.causal_lm.generation_config)
    return draft.eval()


def _check_plain(decoder: Decoder) -> None:
    """Raise ValueError unless the target's weights are plain tensors under their own names."""
    model = decoder.causal_lm
    name = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"the {name} is quantized; fold the checkpoint it was made from")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(f"the {name} carries adapters; merge them first (merge_and_unload)")


def _check_windows(
    decoder: Decoder, head: ExitHead, windows: list[int | None], places: list[int]
) -> None:
    wanted = [decoder.windows[place] for place in places]
    if windows != wanted:
        raise ValueError(
            f"a {type(decoder.causal_lm).__name__} of {len(places)} layers would have attention "
            f"windows {windows}, and the {head.kind} head needs {wanted}; choose another exit_layer"
        )


def _weights(decoder: Decoder, head: ExitHead, readout: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft's weights by their names in a checkpoint of the target's class."""
    model = decoder.causal_lm
    names = {module: f"{name}." for name, module in model.named_modules()}
    layers, lm_head = names[decoder.layers], names[decoder.lm_head]
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(layers) or _number(name, layers) < head.exit_layer
    }
    if head.layer is not None:
        prefix = f"{layers}{head.exit_layer}."
        weights |= _as_stored(head.layer, decoder.layers[head.place], prefix)
    norm: nn.Module | None = getattr(head, "norm", None)
    if norm is not None and decoder.final_norm is not None:
        weights |= _as_stored(norm, decoder.final_norm, names[decoder.final_norm])
    return weights | {lm_head + name: tensor for name, tensor in readout.items()}


def _as_stored(module: nn.Module, like: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights of a head's part in the dtypes of the target's part that it is a copy of."""
    dtypes = {name: tensor.dtype for name, tensor in like.state_dict().items()}
    return {prefix + name: t.to(dtypes[name]) for name, t in module.state_dict().items()}


def _number(name: str, prefix: str) -> int:
    return int(name.removeprefix(prefix).split(".", 1)[0])


def _fill(draft: PreTrainedModel, weights: dict[str, Tensor], head: ExitHead) -> None:
    try:
        draft.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        if head.layer is None:
            raise
        raise ValueError(
            f"layer {head.exit_layer} of a {type(draft).__name__} is built unlike layer "
            f"{head.place}, whose copy the {head.kind} head is; fit the head with "
            f"place={head.exit_layer}"
        ) from error
    draft.tie_weights()


# The page beside a folded draft: what it is, and the lines that launch it.

_HUB_ID = r"[\w-][\w.-]*/[\w.-]+"


def draft_guide(exported: Exported, folder: str) -> str:
    """The README of a folded draft, in Markdown, with the front matter that the hub reads.

    Args:
        exported: what was folded.
        folder: where it lies.
    """
    on_hub = fullmatch(_HUB_ID, exported.target) is not None
    front = [f"base_model: {exported.target}"] if on_hub else []
    launches = launch_lines(exported.target, folder, exported.num_draft_tokens)
    blocks = [
        f"## {engine}\n\n```{language}\n{text}\n```\n"
        for engine, (language, text) in launches.items()
    ]
    head = [
        "---",
        "library_name: transformers",
        *front,
        "tags: [speculative-decoding, draft-model, early-exit]",
        "---",
        "",
        f"# Draft model for {exported.target}",
        "",
        _summary(exported),
        "",
        "It is a draft: by itself it writes worse than its target. Beside its target it changes "
        "no output; whoever decodes with both checks every draft with the target.",
        "",
    ]
    return "\n".join([*head, "\n".join(blocks)])


def _summary(exported: Exported) -> str:
    below = f"The first {exported.exit_layer} layers of its target"
    heads = {
        "shared": "the target's own final norm and LM head",
        "lens": "the norm and the corrected LM head that a `lens` head was fitted to have",
        "lora": "the norm and the LM head that a `lora` head was fitted to have",
        "block": "the layer and the norm of a `block` head that was fitted to them",
    }
    text = (
        f"{below}, and {heads[exported.head]}, as a `{exported.architecture}` of "
        f"{exported.layers} layers and {exported.parameters:,} parameters. Made by "
        "`selfspec export hf-draft`; `selfspec_export.json` says of what."
    )
    if exported.drafted is not None:
        text += (
            f" It was fitted to draft {exported.drafted:,} tokens. Any other token has the mean "
            "of their rows in the LM head, so it is never the likeliest."
        )
    return text


def launch_lines(target: str, draft: str, tokens: int) -> dict[str, tuple[str, str]]:
    """Per engine, the language of its lines and the lines that launch a target with a draft.

    Args:
        target: hub id or folder of the target.
        draft: hub id or folder of the folded draft.
        tokens: drafts a round.
    """
    speculative = json.dumps(
        {"method": "draft_model", "model": draft, "num_speculative_tokens": tokens}
    )
    big, small = quote(target), quote(draft)
    return {
        "transformers": ("python", _transformers(target, draft)),
        "vLLM": ("bash", f"vllm serve {big} \\\n  --speculative-config {quote(speculative)}"),
        "SGLang": ("bash", _sglang(big, small, tokens)),
        "TensorRT-LLM": ("bash", _tensorrt(big, draft, tokens)),
        "mlx-lm": (
            "bash",
            f"mlx_lm.generate --model {big} --draft-model {small} --num-draft-tokens {tokens} \\\n"
            '  --prompt "Once upon a time"',
        ),
        "llama.cpp": (
            "bash",
            "# in a checkout of llama.cpp\n"
            f"python convert_hf_to_gguf.py {big} --outfile target.gguf\n"
            f"python convert_hf_to_gguf.py {small} --outfile draft.gguf\n"
            f"llama-server -m target.gguf -md draft.gguf --draft-max {tokens}",
        ),
    }


def _transformers(target: str, draft: str) -> str:
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"target = AutoModelForCausalLM.from_pretrained({target!r})\n"
        f"draft = AutoModelForCausalLM.from_pretrained({draft!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})\n"
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "written = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)\n"
        "print(tokenizer.decode(written[0]))"
    )


def _sglang(big: str, small: str, tokens: int) -> str:
    # SGLang counts the token that starts a chain among the drafts.
    return (
        f"python -m sglang.launch_server --model-path {big} \\\n"
        f"  --speculative-algorithm STANDALONE --speculative-draft-model-path {small} \\\n"
        f"  --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )


def _tensorrt(big: str, draft: str, tokens: int) -> str:
    return (
        "cat > draft.yaml <<'EOF'\n"
        "disable_overlap_scheduler: true\n"
        "speculative_config:\n"
        "  decoding_type: DraftTarget\n"
        f"  max_draft_len: {tokens}\n"
        f"  speculative_model_dir: {json.dumps(draft)}\n"
        "EOF\n"
        f"trtllm-serve {big} --backend pytorch --extra_llm_api_options draft.yaml"
    )


# A folded exit on disk: checkpoint, tokenizer, side-car and a page on how to launch it.

SIDE_CAR = "selfspec_export.json"
_FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """What was folded into a draft checkpoint.

    Attributes:
        target: the checkpoint it drafts for: a hub id or a folder.
        architecture: class of the model.
        exit_layer: number of the target's layers below the exit.
        head: kind of the exit head.
        layers: layers of the draft.
        parameters: its parameters.
        num_draft_tokens: drafts a round that the launch lines ask for.
        drafted: how many tokens it can draft, if its vocabulary was trimmed.
        own: its parts that are not the target's.
    """

    target: str
    architecture: str
    exit_layer: int
    head: str
    layers: int
    parameters: int
    num_draft_tokens: int
    drafted: int | None
    own: tuple[str, ...]


def export_draft(
    decoder: Decoder,
    head: ExitHead,
    folder: str | Path,
    *,
    target: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_draft_tokens: int = 4,
) -> Exported:
    """Write an exit as a stock checkpoint, for whoever takes a draft model.

    Args:
        decoder: the target.
        head: the exit head (`fold` says which can be folded).
        folder: made whole or not at all.
        target: hub id or folder of the target, for the launch lines.
        tokenizer: the target's, to be written beside.
        num_draft_tokens: drafts a round that the launch lines ask for.

    Raises:
        FileExistsError: `folder` is there already, with something in it.
        ValueError: the head cannot be folded.
    """
    with new_folder(folder) as scratch:
        draft = fold(decoder, head)
        exported = _exported(head, draft, target, num_draft_tokens)
        config = draft.generation_config
        assert config is not None
        config.num_assistant_tokens = num_draft_tokens
        config.num_assistant_tokens_schedule = "constant"
        draft.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        side_car = json.dumps(_side_car(decoder, head, exported), indent=2)
        (scratch / SIDE_CAR).write_text(side_car + "\n", encoding="utf-8")
        (scratch / CARD_NAME).write_text(draft_guide(exported, str(folder)), encoding="utf-8")
    return exported


def _exported(
    head: ExitHead, draft: PreTrainedModel, target: str, num_draft_tokens: int
) -> Exported:
    parts = {"layer": head.layer, "norm": getattr(head, "norm", None)}
    corrected = head.kind in ("lens", "lora") or head.vocab_ids is not None
    return Exported(
        target=target,
        architecture=type(draft).__name__,
        exit_layer=head.exit_layer,
        head=head.kind,
        layers=head.exit_layer + (head.layer is not None),
        parameters=draft.num_parameters(),
        num_draft_tokens=num_draft_tokens,
        drafted=None if head.vocab_ids is None else len(head.vocab_ids),
        own=tuple(
            [name for name, part in parts.items() if part is not None] + ["lm_head"] * corrected
        ),
    )


def _side_car(decoder: Decoder, head: ExitHead, exported: Exported) -> dict[str, Any]:
    return {
        "format_version": _FORMAT,
        "selfspec_version": selfspec.__version__,
        "transformers_version": transformers.__version__,
        **asdict(exported),
        "facts": head.facts,
        "fingerprint": fingerprint(decoder),
    }

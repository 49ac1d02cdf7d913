"""What is specific to model families: layers, norms, positions, sublayers, refusals."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from peft import PeftMixedModel
from peft.tuners.tuners_utils import BaseTuner
from torch import Tensor, nn
from torch.jit import ScriptModule
from transformers import DynamicCache, PreTrainedModel

from selfspec.config import Kernels, KVCacheDtype
from selfspec.decoder.cache import SlicedViews, Switch, Window
from selfspec.decoder.devices import weight_of
from selfspec.decoder.mixers import is_mixer, unknown_mixers
from selfspec.decoder.passes import Skips, cache_name
from selfspec.decoder.quantized import is_quantized


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside, PEFT wrapping removed."""
    inner = model
    if hasattr(model, "peft_config"):
        configs: dict[str, Any] = model.peft_config  # pyright: ignore[reportAssignmentType]
        config = next(iter(configs.values()))
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"a PEFT model of type {config.peft_type} adds virtual tokens, which a span of "
                "layers cannot see; use an adapter inside the layers (LoRA), or merge it"
            )
        _refuse_tuner(model)
        if hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # pyright: ignore[reportCallIssue]
        elif isinstance(model, PeftMixedModel):
            inner = model.base_model.model
    if not isinstance(inner, PreTrainedModel):
        remedy = "; SelfSpecModel.from_pretrained loads one" * isinstance(model, (str, Path))
        raise TypeError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}{remedy}"
        )
    return inner


# Their own `forward` or `generate` does nothing more outside training.
_PASS_ON = {"AdaLoraModel", "MixedModel"}
_MIX_TOKENS = {"LilyModel"}  # what a token gets depends on all tokens of the pass


def _refuse_tuner(model: nn.Module) -> None:
    """Raise ValueError for an adapter that acts outside the layers, in every call of the model."""
    kind = type(getattr(model, "base_model", None))
    acts = issubclass(kind, BaseTuner) and (
        kind.forward is not BaseTuner.forward or hasattr(kind, "generate")
    )
    if (acts and kind.__name__ not in _PASS_ON) or kind.__name__ in _MIX_TOKENS:
        raise ValueError(
            f"a {kind.__name__} of PEFT computes something for every call outside the layers, or "
            "from all tokens of a pass, which passes over other layers or tokens would miss; use "
            "an adapter inside the layers (LoRA), or merge it"
        )


def refuse_options(kernels: str, kv_cache_dtype: str) -> None:
    """Raise ValueError for unknown options, and for options that exclude each other."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {get_args(Kernels)}, got {kernels!r}")
    if kv_cache_dtype not in get_args(KVCacheDtype):
        raise ValueError(
            f"kv_cache_dtype must be one of {get_args(KVCacheDtype)}, got {kv_cache_dtype!r}"
        )
    if kernels in ("compiled", "graphs") and kv_cache_dtype != "auto":
        raise ValueError(
            f"with kernels {kernels!r} layers write keys and values as they are, not as "
            f"{kv_cache_dtype}; "
            "choose other kernels, or leave kv_cache_dtype out"
        )


_DYNAMIC = re.compile(r"torch\.ao\.nn\.(intrinsic\.)?quantized\.dynamic")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that is not supported."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", "eager")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; selfspec runs decoder-only causal LMs")
    if model.get_output_embeddings() is None or not model.can_generate():
        raise ValueError(f"{name} has no LM head; load the model with AutoModelForCausalLM")
    kind: Any = type(model)
    if kind.generate.__module__.startswith("transformers.models."):
        raise ValueError(
            f"{name} has a generate of its own, which is not transformers' loop over tokens; "
            "wrap the language model inside, if that is a causal LM"
        )
    parts = [part for root in text_parts(model) for part in root.modules()]
    scripted = [type(part).__name__ for part in parts if isinstance(part, ScriptModule)]
    if scripted:
        raise ValueError(
            f"{name} has a {scripted[0]} that is scripted or traced, so its code cannot be read; "
            "put the module itself there, or use the model's own generate"
        )
    if any(_DYNAMIC.match(type(part).__module__) for part in parts):
        raise ValueError(
            f"{name} is quantized dynamically, with one scale for all tokens of a pass, so a token "
            "depends on those beside it; quantize weights alone (torchao's Int8WeightOnlyConfig), "
            "or use the model's own generate"
        )
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"{name} is split into {stages} pipeline stages, none of which has all layers; load it "
            "with tensor parallelism (DistributedConfig(tp_size=...)) or with device_map"
        )
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} uses attention {attention!r}, which takes no mask per row; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(
            f"{name} lets tokens of a prompt attend to later ones; selfspec runs causal LMs"
        )
    _refuse_caches(model, config)


# transformers' cache classes of layers that selfspec runs; layers without a cache have a dummy.
_ATTENDING = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
_OTHERS = {"LinearAttentionLayer", "DummyLayer"}


def _refuse_caches(model: PreTrainedModel, config: Any) -> None:
    """Raise ValueError unless each layer has KV of its own, a known recurrent state, or nothing."""
    name, sized = type(model).__name__, hasattr(config, "num_hidden_layers")
    kinds = (
        {type(layer).__name__ for layer in DynamicCache(config=config).layers} if sized else set()
    )
    decoder = model.get_decoder()  # encoders of images or audio may have recurrent layers, too
    mixers = {type(module).__name__ for module in decoder.modules() if is_mixer(module)}
    if model._is_stateful and not (kinds & _ATTENDING and mixers):
        raise ValueError(
            f"{name} keeps nothing but recurrent states, or keeps them outside transformers' "
            "cache; selfspec runs models that attend to a KV cache in some of their layers"
        )
    unknown = sorted(unknown_mixers(decoder))
    if unknown:
        raise ValueError(
            f"{name} has recurrent layers with a {unknown[0]}, whose kernel selfspec does not "
            "know, so rejected tokens could not be rolled back"
        )
    strange = kinds - _ATTENDING - (_OTHERS if mixers else set())
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if strange or chunked or not sized:
        what = "attends in chunks" if chunked else f"caches {', '.join(sorted(strange))}"
        raise ValueError(
            f"{name} {what}; selfspec runs models whose every layer has full or "
            "sliding-window attention over a KV cache of its own"
        )


def is_multimodal(model: PreTrainedModel) -> bool:
    """Whether the text model is a part of the model."""
    return model.config.get_text_config(decoder=True) is not model.config


def text_parts(model: PreTrainedModel) -> list[nn.Module]:
    """What writes text: the model, or the text model of a multimodal one and its LM head."""
    if not is_multimodal(model):
        return [model]
    decoder, lm_head = model.get_decoder(), model.get_output_embeddings()
    if lm_head is None or any(part is lm_head for part in decoder.modules()):
        return [decoder]
    return [decoder, lm_head]


def find_layers(model: nn.Module, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that owns the decoder layers (the body), their name in it, and the layers.

    They are looked for in `model.get_decoder()`: encoders of images or audio have layers, too.
    """
    inside = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    name, found = type(model).__name__, list(_lists(inside, count))
    if len(found) > 1:
        paths = ", ".join(f"{type(owner).__name__}.{child}" for owner, child, _ in found)
        raise ValueError(
            f"{name} has {len(found)} ModuleLists of num_hidden_layers = {count} layers ({paths}); "
            "selfspec cannot tell which modules are its decoder layers"
        )
    if not found:
        raise ValueError(
            f"{name} has no ModuleList of num_hidden_layers = {count} layers; "
            "selfspec cannot tell which modules are its decoder layers"
        )
    return found[0]


def _lists(module: nn.Module, count: int) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Lists of `count` modules, without those inside others: a layer may have as many experts."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            yield module, name, child
        else:
            yield from _lists(child, count)


# By which embeddings of positions take the length of the cache, since transformers 5.24 and before.
_LENGTHS = {"cache_length", "past_key_values_length"}


def refuse_body(model: PreTrainedModel, base: nn.Module) -> None:
    """Raise ValueError if the module that owns the layers cannot be run as a decoder's body."""
    name, body = type(model).__name__, type(base)
    takes = inspect.signature(body.forward).parameters
    missing = [part for part in ("input_ids", cache_name(body.forward)) if part not in takes]
    if missing:
        raise ValueError(
            f"{name} has its layers in a {body.__name__}, whose forward takes no "
            f"{' and no '.join(missing)}; selfspec runs models whose body takes token ids and a "
            "KV cache"
        )
    counters = [
        type(part).__name__
        for part in base.children()
        if not _LENGTHS.isdisjoint(inspect.signature(type(part).forward).parameters)
    ]
    if counters and "position_ids" not in takes:
        raise ValueError(
            f"{name} counts positions by the length of its cache, one for all rows "
            f"({counters[0]}), but rows that accept different numbers of drafts need positions of "
            "their own; selfspec runs models whose body takes position_ids"
        )


def layer_windows(config: Any, depth: int) -> list[int | None]:
    """Per layer, the sliding window in tokens, or None."""
    if config.model_type == "gpt_neo":
        local = [kind == "local" for kind in config.attention_layers]
        return [config.window_size if is_local else None for is_local in local]
    layers = DynamicCache(config=config).layers
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return windows or [None] * depth


def attention_layers(config: Any, depth: int) -> list[int]:
    """Indices of the layers that attend and have no recurrent state."""
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    plain = {"DynamicLayer", "DynamicSlidingWindowLayer"}
    return [index for index in range(depth) if not kinds or kinds[index] in plain]


def causal_tables(layers: nn.Module) -> list[nn.Module]:
    """Attention modules that mask by a table of their own (GPT-Neo)."""
    tables = [(module, module._buffers.get("bias")) for module in layers.modules()]
    return [m for m, t in tables if t is not None and t.dtype == torch.bool and t.ndim == 4]


def plain_weight(lm_head: nn.Module, vocab_size: int) -> Tensor:
    """`[vocab, hidden]` an LM head's whole matrix, or ValueError where it has no plain one."""
    weight = lm_head.weight if isinstance(lm_head, nn.Linear) else None
    if weight is None or is_quantized(weight) or weight.shape[0] != vocab_size:
        raise ValueError(
            f"the LM head is a {type(lm_head).__name__} without a plain weight matrix of "
            f"{vocab_size} rows, so its rows cannot be taken; leave the LM head "
            "unquantized and merge its adapter, or draft over the whole vocabulary"
        )
    return weight_of(lm_head, "weight")


# Finding the attention and the MLP of a decoder layer, and skipping them.

Forward = Callable[..., Any]

_NAMES = {
    "attention": re.compile(r"(self_)?att(n|ention)"),
    "mlp": re.compile(r"(shared_)?mlp|ffn|feed_forward|(block_sparse_)?moe"),
}
_CLASSES = {
    "attention": re.compile(r"Attention$"),
    "mlp": re.compile(r"(MLP|FFN|FeedForward|MoE|Moe|MoeBlock)$"),
}


class Skipped:
    """Replaces the `forward` of a sublayer while it is skipped.

    Args:
        module: the sublayer.
        others: number of values it returns beside the hidden states; `None` until it has run.
    """

    def __init__(self, module: nn.Module, others: int | None = None):
        self.module, self._others = module, others
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `own` would return if it added nothing."""
        if self._others is None:
            # Families differ in what attention or experts return, so the sublayer runs once. The
            # KV that it writes lies after the committed tokens and is overwritten later.
            output = own(*args, **kwargs)
            self._others = len(output) - 1 if isinstance(output, tuple) else 0
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        residual: Tensor | None = given.get("residual")
        added = torch.zeros_like(given[self._names[0]]) if residual is None else residual
        return (added, *[None] * self._others) if self._others else added


class SkippedHalf(Skipped):
    """The first linear layer of an MLP without a module of its own (OPT)."""

    def __call__(self, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the input, which gives the second layer's zeros their width."""
        return args[0]


class Sublayers:
    """The sublayers of every layer.

    Args:
        layers: the decoder layers.
    """

    def __init__(self, layers: nn.ModuleList):
        self._layers = layers
        self._found: dict[tuple[int, str], list[Skipped]] = {}

    def skipped(self, index: int, skips: Skips) -> list[Skipped]:
        """Replacements for the skipped sublayers of a layer that is skipped in part."""
        stand_ins: list[Skipped] = []
        for kind, chosen in (("attention", skips.attention), ("mlp", skips.mlp)):
            if index in chosen:
                stand_ins += self._find(index, kind)
        return stand_ins

    def check(self, skips: Skips) -> None:
        """Raise ValueError unless every skipped sublayer exists and something is left to run."""
        depth = len(self._layers)
        for kind, chosen in (("attention", skips.attention), ("mlp", skips.mlp)):
            strange = sorted(index for index in chosen if not 0 <= index < depth)
            if strange:
                raise ValueError(
                    f"skip.{kind} must name layers in [0, {depth - 1}], got {strange}; "
                    f"the model has {depth} layers"
                )
        if len(skips.layers) == depth:
            raise ValueError(
                f"the skip set leaves nothing of the model's {depth} layers; "
                "keep at least one attention or MLP"
            )
        for index in (skips.attention | skips.mlp) - skips.layers:
            kind = "attention" if index in skips.attention else "mlp"
            if not self._find(index, kind):
                layer = self._layers[index]
                children = ", ".join(name for name, _ in layer.named_children())
                raise ValueError(
                    f"cannot tell the {kind} of layer {index}, a {type(layer).__name__}, among its "
                    f"children ({children}); skip whole layers, named in both skip.attention and "
                    "skip.mlp"
                )

    def _find(self, index: int, kind: str) -> list[Skipped]:
        layer, found = self._layers[index], self._found.get((index, kind))
        if found is None or not {stand_in.module for stand_in in found} <= {*layer.children()}:
            found = self._found[index, kind] = _find(layer, kind)
        return found


def _find(layer: nn.Module, kind: str) -> list[Skipped]:
    children = dict(layer.named_children())
    found = [
        Skipped(child)
        for name, child in children.items()
        if _NAMES[kind].fullmatch(name) or _CLASSES[kind].search(type(child).__name__)
    ]
    if not found and kind == "mlp" and {"fc1", "fc2"} <= children.keys():
        return [SkippedHalf(children["fc1"]), Skipped(children["fc2"], others=0)]
    return found


# Rotary embeddings, computed once for all positions; a pass takes a view.

# Rotary types with constant frequencies. Others depend on the longest position of the pass.
_STATIC = {"default", "linear", "llama3", "yarn"}
_GROWTH = 256  # least positions of a table


def _rope_types(module: nn.Module) -> dict[str | None, str | None]:
    """Rotary types of a rotary embedding by the kind of layers; `None` for all of them."""
    kind = vars(module).get("rope_type")  # asking a module for what it lacks takes long
    return kind if isinstance(kind, dict) else {None: kind}


def is_static(module: nn.Module) -> bool:
    """Whether `module` is a rotary embedding with constant frequencies."""
    return set(_rope_types(module).values()) <= _STATIC


class RotaryTables:
    """Tables of a static rotary embedding, for rows that all write the same slots.

    Args:
        forward: the embedding's own.
    """

    def __init__(self, forward: Callable[..., Any]):
        self._forward = forward
        self._tables: dict[tuple[Any, ...], SlicedViews] = {}

    def view(self, x: Tensor, window: Window, layer_type: str | None = None) -> Any:
        """What `forward` returns for the window's positions.

        Args:
            x: a tensor with the wanted dtype and device.
            window: the slots of the pass, uniform.
            layer_type: the kind of layers, where an embedding serves several.
        """
        key = len(window.starts), layer_type, x.dtype, x.device
        tables = self._tables.get(key)
        if tables is None or tables.length < window.end:
            tables = self._tables[key] = self._make(x, window, layer_type)
        views = tables.view(window.starts[0], window.width)
        if len(views) == 1:
            return views[0]
        return views

    def _make(self, x: Tensor, window: Window, layer_type: str | None) -> SlicedViews:
        more = () if layer_type is None else (layer_type,)
        # A table outlives its first pass, which may run in inference mode.
        with torch.inference_mode(False):
            positions = torch.arange(max(2 * window.end, _GROWTH), device=x.device)
            made = self._forward(x, positions[None], *more)
        tables = (made,) if isinstance(made, Tensor) else made
        rows = len(window.starts)
        return SlicedViews(*(table.expand(rows, *table.shape[1:]) for table in tables), dim=1)


# Rotary embeddings that choose their frequencies by the largest position of a pass.


def _original_lengths(module: nn.Module) -> set[int]:
    """The lengths beyond which a rotary embedding takes other frequencies."""
    lengths: set[int] = set()
    for layer_type, kind in _rope_types(module).items():
        if kind == "longrope":
            parameters = module.config.rope_parameters  # pyright: ignore
            parameters = parameters if layer_type is None else parameters[layer_type]  # pyright: ignore
            lengths.add(parameters["original_max_position_embeddings"])  # pyright: ignore
        elif kind is not None and "dynamic" in kind:
            lengths.add(module.original_max_seq_len)  # pyright: ignore
    return lengths


def length_rotaries(base: nn.Module) -> tuple[list[nn.Module], int | None]:
    """Rotary embeddings whose frequencies depend on the largest position of a pass.

    Returns:
        The embeddings, and the length beyond which they change; `None` without such embeddings.

    Raises:
        ValueError: they change at different lengths.
    """
    found = {module: _original_lengths(module) for module in base.modules()}
    lengths = sorted(set().union(*found.values()))
    if len(lengths) > 1:
        raise ValueError(
            f"{type(base).__name__} has rotary embeddings that change beyond different lengths "
            f"({', '.join(map(str, lengths))} tokens), which selfspec does not run"
        )
    return [module for module, own in found.items() if own], next(iter(lengths), None)


def prefills_again(model: PreTrainedModel) -> bool:
    """Whether the model's own `generate` computes its cache anew beyond the original length.

    Phi-3, Phi-3.5-MoE and Phi-4 drop the cache in `prepare_inputs_for_generation`.
    """
    prepare: Any = inspect.unwrap(model.prepare_inputs_for_generation)  # pyright: ignore
    return "original_max_position_embeddings" in prepare.__code__.co_names


class LengthRotary:
    """Gives each token the frequencies that it has in plain decoding, whatever its pass holds.

    Args:
        module: a rotary embedding of `length_rotaries`.
        original: the length beyond which it changes.
    """

    def __init__(self, module: nn.Module, original: int):
        # It remembers the longest pass, so the model's own is left alone.
        self._own = copy.copy(module)
        self._own._buffers = {name: _clone(value) for name, value in module._buffers.items()}
        self._original = original
        # LongRoPE has two sets of frequencies, dynamic NTK one for each length.
        self._two = "longrope" in _rope_types(module).values()

    def __call__(
        self, x: Tensor, positions: Tensor, switch: Switch, *args: Any, **kwargs: Any
    ) -> Any:
        """What the embedding returns for `positions` `[rows, width]`."""
        # How far the plain pass of a token goes beyond the original length, from -1: it does not.
        first, last = (max(end, -1) for end in (switch.first, switch.last))
        if self._two:
            first, last = min(first, 0), min(last, 0)
        made = self._run(x, positions, self._original + first, *args, **kwargs)
        for step in range(first + 1, last + 1):
            beyond = positions - torch.tensor(switch.at, device=positions.device)[:, None]
            here = self._run(x, positions, self._original + step, *args, **kwargs)
            made = _where((beyond >= step)[..., None], here, made)
        return made

    def _run(self, x: Tensor, positions: Tensor, largest: int, *args: Any, **kwargs: Any) -> Any:
        """What it returns for positions up to `largest` in a pass that reaches it."""
        forward = partial(type(self._own).forward, self._own, x)
        if not self._two:
            forward(torch.zeros_like(positions[:1, :1]), *args, **kwargs)  # forgets longer passes
        if not self._two or largest < self._original:
            positions = positions.clamp(max=largest)
        wider = torch.nn.functional.pad(positions, (0, 1), value=largest)
        made = forward(wider, *args, **kwargs)
        return made[:, :-1] if isinstance(made, Tensor) else tuple(part[:, :-1] for part in made)


def _clone(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()


def _where(chosen: Tensor, one: Any, other: Any) -> Any:
    if isinstance(one, Tensor):
        return torch.where(chosen, one, other)
    return tuple(torch.where(chosen, a, b) for a, b in zip(one, other, strict=True))

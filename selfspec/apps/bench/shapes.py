"""Benchmarks of published model sizes with random weights.

A head on random weights predicts nothing, so acceptance is planted (`planted.py`): time and memory
are measured, and acceptance is given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights

from selfspec.apps.bench.config import BenchConfig, MethodConfig, ModeConfig, PromptSetConfig
from selfspec.apps.bench.run import Bench
from selfspec.config import DraftConfig, JsonObject, Precision, TreeConfig, unknown_name
from selfspec.decoder.devices import usable_device
from selfspec.decoder.kernels.low_precision import Part, bytes_read
from selfspec.drafters.engine import Engine
from selfspec.heads import build_head
from selfspec.model import SelfSpecModel
from selfspec.schedule.profile import device_name

_FOLDER = Path(__file__).with_name("shape_configs")
SHAPES = sorted(path.stem for path in _FOLDER.glob("*.json"))
"""Names of the shapes in the package."""

_NODES = 12  # of a tree, on as many levels
_CHUNK = 2048  # prompt tokens of a pass: the mask of a long prompt would not fit in memory
_USABLE = 0.8  # share of the memory that a benchmark may fill


def read_shape(name: str) -> PretrainedConfig:
    """The config of a shape: one in the package, or a config.json; ValueError if it is neither."""
    path = _FOLDER / f"{name}.json" if name in SHAPES else Path(name)
    if not path.exists():
        raise ValueError(unknown_name("shape", name, [*SHAPES, "the path of a config.json"]))
    return AutoConfig.from_pretrained(path)


@torch.no_grad()
def random_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A model on `device` with random weights and without an end token.

    In float32 each token depends on all tokens before it, so that faults of a KV cache change the
    output. In half precision, passes of different width round differently, and nearly equal logits
    would swap. There the layers' outputs are scaled down until the last token decides the next one.
    """
    with no_init_weights(), device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    words, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    width, depth = words.shape[-1], config.get_text_config(decoder=True).num_hidden_layers
    wide = dtype.itemsize >= 4
    quiet = 0.25 * (2 * depth * width) ** -0.5  # all layers add a quarter of an embedding
    source = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            bound = (3 / weight.shape[-1]) ** 0.5  # variance 1 for inputs of variance 1
            weight.uniform_(-bound, bound, generator=source)
            if wide and name.endswith("o_proj.weight"):
                # Attention's outputs are means over the prompt, similar at all positions: at full
                # scale they would outweigh the tokens after a few layers.
                weight.mul_(0.3)
            elif not wide and weight is not words and weight.shape[-2] == width:
                weight.mul_(quiet)
        else:
            weight.fill_(0 if name.endswith("bias") else 1)
    if not wide and head is not words:
        head.copy_(words.roll(1, 0))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def numbers_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are their own ids, for prompts of random tokens."""
    words = WordLevel({str(token): token for token in range(vocab)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


# The methods of the benchmark


def default_methods(depth: int, acceptances: Sequence[float]) -> tuple[MethodConfig, ...]:
    """Methods of transformers, selfspec without drafts, and early exits at each acceptance rate."""
    low, middle = max(1, depth // 8), max(2, depth // 4)
    tree = {"drafter": "tree", "tree": TreeConfig(nodes=_NODES)}
    drafts = {
        "fused 0": _early_exit("fused", 0),
        f"fused {low} in one pass": _early_exit("fused", low),
        f"block {low}": _early_exit("block", low),
        f"shared {low}": _early_exit("shared", low),
        f"shared {middle}": _early_exit("shared", middle),
        "medusa 0": _early_exit("medusa", 0),
        "fused 0, int4": _early_exit("fused", 0, precision="int4"),
        "whole model in int8": _early_exit("shared", depth, precision="int8"),
        "whole model in int4": _early_exit("shared", depth, precision="int4"),
        f"fused 0, tree of {_NODES}": _early_exit("fused", 0, **tree),
    }
    planted = (
        MethodConfig(
            name=f"{name}, {rate:g}",
            draft=draft,
            head_options={"parallel": True} if name.endswith("in one pass") else {},
            acceptance=rate,
        )
        for name, draft in drafts.items()
        for rate in acceptances
    )
    return (
        MethodConfig(name="generate, static cache", peer="static_cache"),
        MethodConfig(name="generate_batch", peer="continuous_batching"),
        MethodConfig(name="selfspec plain", draft=DraftConfig(drafter="none")),
        *planted,
    )


def _early_exit(head: str, exit_layer: int, **fields: Any) -> DraftConfig:
    return DraftConfig(head=head, exit_layer=exit_layer, num_draft_tokens=4, **fields)


def random_prompts(lengths: Sequence[int]) -> tuple[PromptSetConfig, ...]:
    """A prompt of random tokens of each length."""
    return tuple(
        PromptSetConfig(name=f"{n} tokens", reader="random", count=1, prompt_tokens=n)
        for n in lengths
    )


def with_defaults(config: BenchConfig, depth: int, device: torch.device) -> BenchConfig:
    """Fill in the defaults of a shape with `depth` layers.

    On a CPU, prompts are shorter, rows fewer, and the dtype is float32.
    """
    gpu = device.type != "cpu"
    lengths = (128, 2048, 8192, 32768) if gpu else (64, 256)
    chosen: dict[str, object] = {
        "dtype": "bfloat16" if gpu else "float32",
        "prompts": random_prompts(lengths),
        "methods": default_methods(depth, config.acceptance),
        "modes": (ModeConfig(name="greedy, acceptance planted"),),
        "batch_sizes": (1, 4, 8, 16, 32) if gpu else (1, 4),
        "max_new_tokens": 128 if gpu else 32,
        "warm_up": 16 if gpu else 4,
        "prefill_chunk_size": _CHUNK,
    }
    given = {name: getattr(config, name) for name in config.model_fields_set}
    return BenchConfig(**{**chosen, **given})


def add_heads(engine: Engine, methods: Sequence[MethodConfig]) -> dict[str, str]:
    """Build the untrained heads of the methods; returns why others have none, by their names."""
    places = {
        method.name: (method.draft.head, method.draft.exit_layer)
        for method in methods
        if method.draft is not None
    }
    wanted = {places[m.name]: m.head_options for m in methods if m.name in places}
    refused: dict[tuple[str | None, int | None], str] = {}
    for (kind, exit_layer), options in wanted.items():
        if kind not in (None, "shared") and exit_layer is not None:
            try:
                engine.add(build_head(engine.decoder, kind, exit_layer, options))
            except ValueError as error:
                refused[kind, exit_layer] = str(error)
    return {name: refused[place] for name, place in places.items() if place in refused}


class ShapeBench(Bench):
    """The benchmark of a shape; `facts` has model and device, for the report.

    Raises ValueError if there is no such shape or device, too little memory, or if a head of the
    given methods cannot be built.
    """

    def __init__(self, config: BenchConfig):
        assert config.shape is not None
        shape = read_shape(config.shape)
        device = usable_device(config.device)
        text: Any = shape.get_text_config(decoder=True)
        chosen = config.model_fields_set & {"prompts", "batch_sizes"}
        named = "methods" in config.model_fields_set
        config = with_defaults(config, text.num_hidden_layers, device)
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        model = random_model(shape, dtype, device, config.seed)
        spec = SelfSpecModel(model, kernels=config.kernels, kv_cache_dtype=config.kv_cache_dtype)
        # Not every layer can be a head's. Of the default methods, the others are run.
        refused = add_heads(spec.engine, config.methods)
        if refused and named:
            raise ValueError(next(iter(refused.values())))
        methods = tuple(method for method in config.methods if method.name not in refused)
        config = config.model_copy(update={"methods": methods})
        super().__init__(spec, numbers_tokenizer(text.vocab_size), config)
        self.bandwidth = read_bandwidth(device)
        # On a CPU more prompt tokens would take minutes.
        most = None if chosen or device.type != "cpu" else 256
        left_out = self._leave_out(usable_memory(device), most)
        self.measured = {
            "bandwidth GB/s": round(self.bandwidth / 1e9, 1),
            "left out": [*left_out, *(f"{name} ({why})" for name, why in refused.items())],
        }
        self.facts: JsonObject = {
            "shape": config.shape,
            "weights": "random",
            "acceptance": "planted: the drafter runs as usual, then proposes the target's own next "
            "token with the probability in the method's name, else a wrong one",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": text.num_hidden_layers,
            "dtype": config.dtype,
            "device": str(device),
            "kernels": config.kernels,
            "threads": torch.get_num_threads(),
            "processor": device_name(device),
        }

    def _leave_out(self, usable: float, most: int | None) -> list[str]:
        """Drop batches that do not fit in `usable` bytes or have more than `most` prompt tokens."""
        engine = self.spec.engine
        drafts = (method.draft for method in self.config.methods)
        weights = weights_held(engine, [draft for draft in drafts if draft is not None])
        names: list[str] = []
        for key, batches in list(self.batches.items()):
            batch = batches[0]
            tokens = batch.rows * (batch.width + self.config.max_new_tokens)
            kv = tokens * kv_bytes_of_layer(engine) * engine.decoder.depth
            # Static and growing caches, the mask of a chunk, and logits in float32.
            mask = batch.rows * _CHUNK * batch.width * 4
            scores = 16 * batch.rows * engine.decoder.vocab_size * 4
            too_long = most is not None and batch.rows * batch.width > most
            if too_long or weights + 2 * kv + mask + scores > usable:
                del self.batches[key]
                names.append(f"batch {key[1]} of {key[0]}")
        if not self.batches:
            raise ValueError(
                f"{weights / 1e9:.1f} GB of weights and the smallest KV cache do not fit in "
                f"{usable / 1e9:.1f} GB; choose a smaller shape, length or batch"
            )
        return names


# Bytes that a round reads


def size_of(module: nn.Module | None) -> int:
    """Bytes of a module's parameters."""
    return 0 if module is None else sum(tensor.nbytes for tensor in module.parameters())


def weights_held(engine: Engine, drafts: Iterable[DraftConfig]) -> int:
    """Bytes of weights, and of the copies that the kernels and these drafts make of them.

    Copies stay as long as the model, so those of all drafts take memory together.
    """
    decoder = engine.decoder
    own = sum(map(size_of, (decoder.causal_lm, *engine.heads)))
    packed = decoder.packed_bytes if decoder.kernels == "prepacked" else 0
    copies = {copy for draft in drafts for copy in _copies(draft, decoder.depth)}
    return own + packed + sum(decoder.copy_bytes(bits)[part] for bits, part in copies)


def _copies(draft: DraftConfig, depth: int) -> Iterator[tuple[Precision, Part]]:
    """Which copies of a model of `depth` layers a draft reads."""
    layers = draft.approximates_layers(whole=draft.exit_layer == depth)
    if (lm_head := draft.lm_head_precision or draft.precision) is not None:
        yield lm_head, "lm_head"
    if draft.precision is not None:
        yield draft.precision, "heads"
    if draft.precision is not None and layers:
        yield draft.precision, "layers"


def kv_bytes_of_layer(engine: Engine) -> int:
    """Bytes of one token's keys and values in one layer."""
    config, decoder = engine.decoder.config, engine.decoder
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * width * (1 if decoder.kv_cache_dtype == "int8" else decoder.dtype.itemsize)


def bytes_a_round(engine: Engine, draft: DraftConfig | None, tokens: int) -> int | None:
    """Bytes of weights and KV that one round reads, counted once per pass.

    `None` for drafters other than `none`, `early_exit` and `tree`. `tokens` are those in the KV
    cache, all rows together; no draft is one token a round.

    A chain or tree of k levels from an exit after E of L layers: k + 1 passes over the first E
    layers (k drafts, and the last draft before it is verified), k over the head and the LM head,
    and one over the other layers and the LM head. Where a head drafts all tokens in one pass, k is
    1. If the first E layers draft approximately, k passes over them, and one over all layers.
    """
    decoder = engine.decoder
    kv_of_token = kv_bytes_of_layer(engine)
    kv = tokens * kv_of_token
    layers = [size_of(layer) + kv for layer in decoder.layers]
    unembed = size_of(decoder.lm_head)
    if draft is None or draft.drafter == "none":
        return sum(layers) + unembed
    if draft.drafter not in ("early_exit", "tree"):
        return None
    head = engine.head(draft)
    levels = min(draft.most_tokens, head.longest or draft.most_tokens)
    drafting = 1 if head.drafts_at_once else levels
    seen = kv if draft.window is None else min(kv, (draft.window + draft.sinks) * kv_of_token)
    own = bytes_read(head, draft.precision) + (seen if head.layer is not None else 0)
    own += bytes_read(decoder.lm_head, draft.lm_head_precision or draft.precision)
    below = layers[: head.exit_layer]
    if draft.approximates_layers(whole=head.exit_layer == decoder.depth):
        first = decoder.layers[: head.exit_layer]
        below = [bytes_read(layer, draft.precision) + seen for layer in first]
    return sum(layers) + unembed + drafting * (own + sum(below))


def read_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes per second of reading memory: the best of a few sums over a large buffer."""
    buffer = torch.ones((1 << 30) if device.type == "cuda" else (1 << 26), device=device)
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        float(buffer.sum())  # waits for the device
        seconds.append(time.perf_counter() - began)
    return buffer.nbytes / min(seconds)


def usable_memory(device: torch.device) -> float:
    """Bytes that a benchmark may fill, weights included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _USABLE * (free + torch.cuda.memory_reserved(device))
    return _USABLE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

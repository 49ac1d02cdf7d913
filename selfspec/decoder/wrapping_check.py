"""The check when a model is wrapped: rounds compute what the model's plain decoding computes.

Two rows of different lengths are prefilled, drafted for and verified, and the logits compared. This
runs on a small random model of the same class, in milliseconds. The model itself is not touched,
whatever its size, dtype, devices, hooks and state. Only where its class makes no small model, the
first call of `generate` begins with the same rounds of the model itself.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from selfspec.config import JsonObject
from selfspec.decoder.cache import SlotCache
from selfspec.decoder.decoder import Decoder
from selfspec.decoder.devices import at_hand
from selfspec.decoder.families import LOOP, attention_of
from selfspec.decoder.foreign_code import with_wrapped
from selfspec.decoder.passes import Span

_PROMPTS = (7, 4)  # tokens of each row's prompt

# The small model. Numbers of a config whose name matches are reduced to these.
_HEADS, _HEAD_DIM, _LAYERS = 4, 16, 3
_REDUCED = {
    r"vocab_size": 64,
    r"(hidden_size|n_embd|d_model|word_embed_proj_dim)": _HEADS * _HEAD_DIM,
    r"(num_attention_heads|n_heads?)": _HEADS,
    r"(qk_rope_|qk_nope_|v_)?head_dim": _HEAD_DIM,
    r"qk_head_dim": 2 * _HEAD_DIM,
    r"rotary_dim": _HEAD_DIM // 2,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|n_inner)": 64,
    r".*_lora_rank": 16,
    r"linear_(key|value)_head_dim": _HEAD_DIM,
    r"linear_num_key_heads": 2,
    r"linear_num_value_heads": 4,
    r"(num|n)_(routed_|local_)?experts": 4,
    r"num_experts_per_tok": 2,
    r"(n|topk)_group": 1,
    r".*(chunk|block)_size": 16,
}
_PER_LAYER = re.compile(r"layer|type|pattern")  # lists with an entry for every layer
_PERIOD = re.compile(r"period|interval|offset|pattern|step")  # of layers of another kind

_Problem = str | None  # the reason why a model is refused

_Codes = tuple[object, ...]  # of a function and those that it wraps
# Class, config, and the code of the attention, of all modules and of the loop over tokens.
_Key = tuple[type, str, _Codes, frozenset[_Codes]]

_known: dict[_Key, _Problem] = {}  # what was found so far
_unknown: set[_Key] = set()  # those of which no small model can be made


def check_passes(model: PreTrainedModel) -> bool:
    """Raise ValueError if rounds of a model of this class and config differ from plain decoding.

    The result is kept.

    Returns:
        Whether it is known; if not, no small model can be made: `check_itself` at the first call.
    """
    key = _key(model)
    if key not in _known and key not in _unknown:
        alone = torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False)
        with alone[0], alone[1], warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of configs
            torch.default_generator.manual_seed(0)
            small = small_model(model)
            if small is None:
                _unknown.add(key)
            else:
                _known[key] = difference(small)
    return _is_right(key)


@torch.no_grad()
def check_itself(model: PreTrainedModel) -> bool:
    """`check_passes` with the model itself, which takes as long as about 20 tokens.

    It is put off while the model is in training mode, in which every pass may be another, and if
    its weights are not in memory.
    """
    key = _key(model)
    if key not in _known and not model.training and at_hand(model):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            _known[key] = difference(model)
        _unknown.discard(key)
    return _is_right(key)


def _key(model: PreTrainedModel) -> _Key:
    """What a result holds for; somebody may patch the methods of classes."""
    kinds = {type(module) for module in model.modules()}
    methods = {getattr(kind, "forward", None) for kind in kinds}
    methods |= {getattr(type(model), name) for name in LOOP}
    attention = _codes(ALL_ATTENTION_FUNCTIONS.get(attention_of(model)))
    return type(model), repr(model.config), attention, frozenset(map(_codes, methods))


def _codes(function: object) -> _Codes:
    """The code of a function and of those that it wraps; functions would keep closures alive."""
    return tuple(getattr(part, "__code__", type(part)) for part in with_wrapped(function))


def _is_right(key: _Key) -> bool:
    """Whether a class and config is known to be right; raises ValueError if it is wrong."""
    problem = _known.get(key)
    if problem is not None:
        raise ValueError(problem)
    return key in _known


@torch.no_grad()
def small_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """A small random float32 model of the same class that runs, or `None` if none can be made.

    A class that does not take the reduced config may take its own, which may be small enough.
    """
    made = _random(model, _reduced)
    return _random(model, copy.deepcopy) if made is None else made


def _random(
    model: PreTrainedModel, reduced: Callable[[PreTrainedConfig], PreTrainedConfig]
) -> PreTrainedModel | None:
    try:
        config = reduced(model.config)
        with torch.device("meta"):
            if type(model)(config).num_parameters() > 4_000_000:  # not small
                return None
        attention = model.config._attn_implementation
        with torch.device("cpu"):
            small = type(model)._from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
        for parameter in small.eval().parameters():
            if parameter.ndim > 1:  # large enough that positions matter
                parameter.normal_(0, 0.2)
            elif parameter.is_floating_point():  # norms and biases start alike everywhere
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        Decoder(small)
        logits = _plainly(small, torch.ones(2, dtype=torch.long, device="cpu"), 1)
        float(logits.sum())  # fails in a mode in which tensors have no values
    except Exception:  # of any kind: every family has rules of its own for its config
        return None
    return small if at_hand(small) else None


@torch.no_grad()
def difference(model: PreTrainedModel) -> str | None:
    """How rounds of `model` differ from its own decoding, or `None`."""
    name, instead = type(model).__name__, "use the model's own generate"
    vocab = model.config.get_text_config(decoder=True).vocab_size
    texts = torch.randint(1, vocab, (len(_PROMPTS), 12), device="cpu").to(model.device)
    # Logits have variance 1: rounding makes 1e-5, in half precision 1e-1, a wrong position 1.
    tolerance = 0.1 if model.dtype.itemsize > 2 else 0.5
    try:
        ours = _by_rounds(Decoder(model), texts)
    except Exception as problem:
        reason = str(problem).partition("\n")[0]
        return (
            f"{name} cannot be run layer by layer ({type(problem).__name__}: {reason}); {instead}"
        )
    rows = zip(texts, _PROMPTS, ours, strict=True)
    if all(
        _error(logits, _plainly(model, text, prompt)) < tolerance for text, prompt, logits in rows
    ):
        return None
    return (
        f"{name} gives other logits when rows of different lengths are drafted for and verified "
        f"than in plain decoding: it does something outside its layers that selfspec does not "
        f"know; {instead}"
    )


def _error(logits: Tensor, own: Tensor) -> float:
    """The largest error of a logit, in standard deviations."""
    own = own[: len(logits)]
    return float((logits - own).abs().max() / own.std())


def _plainly(model: PreTrainedModel, text: Tensor, prompt: int) -> Tensor:
    """`[n, vocab]` logits after a prompt and each later token, as in the model's own `generate`."""
    prepare: Any = model.prepare_inputs_for_generation
    update: Any = model._update_model_kwargs_for_generation
    kept: dict[str, Any] = {
        "attention_mask": torch.ones_like(text[None, :prompt]),
        "position_ids": torch.arange(prompt, device=text.device)[None],
        "use_cache": True,
    }
    parts = []
    for start, end in pairwise([0, *range(prompt, len(text) + 1)]):
        counts = {"next_sequence_length": end - start, "is_first_iteration": start == 0}
        output = model(**prepare(text[None, :end], **counts, **kept), return_dict=True)
        kept = update(output, kept, is_encoder_decoder=False)
        parts.append(output.logits[0, -1:])
    return torch.cat(parts)


def _by_rounds(decoder: Decoder, texts: Tensor) -> list[Tensor]:
    """`[n, vocab]` logits after each row's prompt and later tokens, computed in rounds."""
    slots = decoder.new_slots(len(texts))
    with decoder:
        slots.will_commit = _PROMPTS
        everything = Span(0, decoder.depth)
        prompts = [text[:count] for text, count in zip(texts, _PROMPTS, strict=True)]
        block = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        parts = [decoder.run(block, everything, slots, unembed=True).output]
        kept: list[tuple[int, ...]] = [_PROMPTS]
        slots.commit(_PROMPTS)
        for accepted in ((0, 2), (3, 1)):  # drafts of each row, of three
            parts.append(_verified(decoder, slots, texts, accepted))
            kept.append(tuple(count + 1 for count in accepted))
            slots.commit(kept[-1])
    joined = [
        torch.cat([part[row, : counts[row]] for part, counts in zip(parts, kept, strict=True)])
        for row in range(len(texts))
    ]
    return [logits[prompt - 1 :] for logits, prompt in zip(joined, _PROMPTS, strict=True)]


def _verified(
    decoder: Decoder, slots: SlotCache, texts: Tensor, accepted: tuple[int, ...]
) -> Tensor:
    """Logits of a block of drafts, made at the first exit; the last drafts are wrong ones."""
    rows = zip(texts, slots.lengths, accepted, strict=True)
    block = torch.stack(
        [torch.cat([text[at : at + 1 + count], text[: 3 - count]]) for text, at, count in rows]
    )
    exit_layer = min(1, decoder.depth - 1)
    hidden = None
    if exit_layer:
        drafted = [
            decoder.run(block[:, at : at + 1], Span(0, 1), slots, offset=at).hidden
            for at in range(block.shape[1])
        ]
        hidden = torch.cat(drafted, dim=1)
    return decoder.run(block, Span(exit_layer, decoder.depth), slots, hidden, unembed=True).output


# The small model's config


def _reduced(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a small model: fewer layers of every kind, and everything narrower."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    for part in (config, *_parts(config)):
        _reduce(part)
    return config


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts(value)


def _reduce(config: PreTrainedConfig) -> None:
    kept = _kept_layers(config)
    key_heads = getattr(config, "num_key_value_heads", None)
    shared = key_heads not in (None, 1, getattr(config, "num_attention_heads", None))
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, _reduced_number(name, value))
        elif isinstance(value, dict) and name == "rope_parameters":
            _set(config, name, _reduced_rope(value))
        elif kept and _is_per_layer(name, value, config.num_hidden_layers):
            _set(config, name, [value[index] for index in kept])  # pyright: ignore
    if key_heads not in (None, 1):
        _set(config, "num_key_value_heads", _HEADS // 2 if shared else _HEADS)
    if kept:
        config.num_hidden_layers = len(kept)


def _set(config: PreTrainedConfig, name: str, value: object) -> None:
    try:
        setattr(config, name, value)
    except AttributeError:  # a property
        pass


def _reduced_number(name: str, value: int) -> int:
    if name.endswith(("token_id", "token_index")):
        return min(value, 0)  # the texts do not have token 0
    limits = [least for pattern, least in _REDUCED.items() if re.fullmatch(pattern, name)]
    return min([value, *limits])


def _reduced_rope(parameters: JsonObject) -> JsonObject:
    """Rotary parameters whose lists fit the small heads."""
    half = int(_HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
    fitting: JsonObject = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _reduced_rope(value)
        elif name in ("short_factor", "long_factor"):
            value = value[:half]
        elif name == "mrope_section":
            value = [half - 2 * (half // 3), half // 3, half // 3]
        fitting[name] = value
    return fitting


def _is_per_layer(name: str, value: object, layers: int) -> bool:
    listed = isinstance(value, (list, tuple)) and len(value) == layers
    return listed and _PER_LAYER.search(name) is not None


def _kept_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of layers that are enough to have every kind of them."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return []
    own = vars(config).items()
    lists = [value for name, value in own if _is_per_layer(name, value, count)]
    kinds = [repr([each[index] for each in lists]) for index in range(count)]
    kept = {kinds.index(kind) for kind in kinds}
    periods = [n + 1 for name, n in own if isinstance(n, int) and _PERIOD.search(name)]
    others = (index for index in range(count) if index not in kept)
    while len(kept) < min(count, max(_LAYERS, *periods, 0)):
        kept.add(next(others))
    return sorted(kept)

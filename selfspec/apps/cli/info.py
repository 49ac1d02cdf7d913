"""`selfspec info`: describes a target and its heads."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.table import Table

from selfspec.apps.cli.common import (
    Reporter,
    Source,
    command,
    in_units,
    quiet_transformers,
    resolve,
)

if TYPE_CHECKING:
    from torch import nn

    from selfspec.config import DraftConfig, JsonObject
    from selfspec.decoder import Decoder
    from selfspec.decoder.cache import SlotCache
    from selfspec.drafters.engine import Engine
    from selfspec.schedule.profile import Profile


_TOKENS = (200_000, 1_000_000, 5_000_000)  # of text that a head would see


@partial(command, source=("model", "heads"))
def info(
    console: Reporter,
    source: Source,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens for which to compute the KV size.",
            show_default="the model's positions",
        ),
    ] = None,
) -> None:
    """Describe a target and its heads: shape, memory, and the default draft."""
    from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

    from selfspec.decoder.checkpoints import folder_of, load_config
    from selfspec.heads import HEADS_CONFIG, ships_head
    from selfspec.schedule.profile import PROFILE_NAME, cached_profiles

    name, path = resolve(source.model)
    config = load_config(path)
    more = (HEADS_CONFIG, PROFILE_NAME, ADAPTER_CONFIG_NAME)
    beside = any((Path(folder_of(path)) / file).is_file() for file in more)
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    has_head = depth is not None and ships_head(path, depth)
    # Which of the profiles is valid, the weights tell.
    has_more = beside or has_head or bool(cached_profiles(config))
    is_bare = source.heads is None and not has_more
    engine, profile = _without_weights(path) if is_bare else None, None
    if engine is None:
        spec = source.load_spec()
        engine, profile = spec.engine, spec.profile
    facts = {"model": name, **describe(engine, context, profile)}
    console.print(info_table(facts))
    console.answer(facts)


def _without_weights(path: Path | str) -> Engine | None:
    """The target on the meta device, without weights; `None` if its family cannot run there."""
    import torch

    from selfspec.decoder import Decoder
    from selfspec.decoder.checkpoints import auto_class, load_config
    from selfspec.drafters.engine import Engine

    quiet_transformers()
    config = load_config(path)
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=config.dtype or torch.float32)
        engine = Engine(Decoder(model))
        slots_of_two_tokens(engine.decoder)
    except RuntimeError:
        return None
    return engine


def slots_of_two_tokens(decoder: Decoder) -> SlotCache:
    """The slots of a row after two passes over one token, to measure its KV and states."""
    import torch

    from selfspec.decoder import Span

    slots = decoder.new_slots(1)
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
        decoder.run(token, Span(0, decoder.depth), slots)
        slots.commit([1])
        decoder.run(token, Span(0, decoder.depth), slots)
    return slots


class Count(int):
    """A number that is shown with a unit prefix: 12.9 M."""

    unit = ""

    def __format__(self, spec: str) -> str:
        """Ignores the format."""
        return in_units(int(self), self.unit)


class Bytes(Count):
    """A size in bytes: 1.5 GB."""

    unit = "B"


def describe(engine: Engine, context: int | None, profile: Profile | None = None) -> JsonObject:
    """A target's facts as plain values."""
    from selfspec.config import Precision

    decoder = engine.decoder
    config, sizes = decoder.config, slots_of_two_tokens(decoder).sizes
    context = context or decoder.max_positions or 4096
    per_token, attending = sum(sizes.token), sum(size > 0 for size in sizes.token)
    windows = Counter(window for window in decoder.windows if window is not None)
    weights = _weights(decoder.causal_lm)
    tuned = profile and {
        "temperature": profile.temperature,
        "draft": _of_draft(engine, profile.draft),
    }
    return {
        "architecture": type(decoder.causal_lm).__name__,
        "layers": decoder.depth,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "vocab_size": decoder.vocab_size,
        "positions": decoder.max_positions,
        "attention": getattr(config, "_attn_implementation", "eager"),
        "full_layers": attending - windows.total(),
        "sliding_windows": [{"window": w, "layers": n} for w, n in sorted(windows.items())],
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "parameters": weights["parameters"],
        "weight_bytes": weights["bytes"],
        "packed_bytes": Bytes(decoder.packed_bytes),
        "kv_bytes_per_token": Bytes(per_token),
        "context": context,
        "kv_bytes": Bytes(per_token * context),
        "recurrent_layers": len(decoder.recurrent_layers),
        "state_bytes": Bytes(sizes.state),
        "state_bytes_per_draft": Bytes(sizes.pending),
        "low_precision": [
            {
                "precision": precision,
                "bytes": {k: Bytes(size) for k, size in decoder.copy_bytes(precision).items()},
            }
            for precision in get_args(Precision)
        ],
        "exit_heads": [
            {"kind": head.kind, "exit_layer": head.exit_layer, **_weights(head)}
            for head in engine.heads
        ],
        "default_draft": _of_draft(engine, engine.default_draft),
        "profile": tuned or {},
        "fitting": {} if engine.heads else expected_of_fitting(decoder),
    }


def _weights(module: nn.Module) -> dict[str, Count]:
    parameters = list(module.parameters())
    return {
        "parameters": Count(sum(each.numel() for each in parameters)),
        "bytes": Bytes(sum(each.numel() * each.element_size() for each in parameters)),
    }


def _of_draft(engine: Engine, draft: DraftConfig) -> JsonObject:
    from selfspec.drafters import make_drafter

    reader = getattr(make_drafter(engine, draft), "reader", None)
    head = reader and reader.head
    return {
        **draft.model_dump(include={"drafter", "schedule", *_HOW}),
        "num_draft_tokens": draft.most_tokens,
        "exit_layer": head and head.exit_layer,
        "head": head and head.kind,
    }


def expected_of_fitting(decoder: Decoder) -> JsonObject:
    """The head that `selfspec fit` would choose for a million tokens of text.

    Its draft cost is in plain steps, its speedups over plain decoding by the tokens it has seen.
    """
    from selfspec.apps.bench.forecast import COVERAGE, Advice, device_speed
    from selfspec.decoder.devices import fitting_device

    speed = device_speed(decoder, fitting_device(), decoder.dtype)
    coverage = {size: share for size, share in COVERAGE.items() if size < decoder.vocab_size}
    best = Advice.of(decoder, speed, coverage | {0: 1.0}, _TOKENS[1]).best
    speedups = {tokens: best.after(tokens).speedup for tokens in _TOKENS}
    return {**best.head, "draft_cost": best.cost, "speedups": speedups}


_ROWS = {
    "model": "{model} ({architecture})",
    "layers": "{layers}, width {hidden_size}",
    "attention": "{attention}, {full_layers} layers over everything{sliding_windows}",
    "attention heads": "{attention_heads}, {kv_heads} for keys and values",
    "vocabulary": "{vocab_size:,}",
    "positions": "{positions}",
    "weights": "{parameters} parameters in {dtype}, {weight_bytes}",
    "packed weights": "{packed_bytes} more with the kernels prepacked, the default\n"
    "on a CPU if there is memory; `selfspec.prepack_(model)` drops the unpacked ones",
    "KV": "{kv_bytes_per_token} a token, {kv_bytes} for {context:,} tokens",
    "recurrent states": "{state_bytes} a row, as much again during a round, and "
    "{state_bytes_per_draft} a token of a round, in {recurrent_layers} layers",
    "low precision": "{low_precision}",
    "exit heads": "{exit_heads}",
    "default draft": "{default_draft}",
    "profile": "{profile}",
    "with a head": "{fitting}",
}
# Rows that are left out if the fact is zero or missing.
_OPTIONAL = {
    "packed weights": "packed_bytes",
    "recurrent states": "recurrent_layers",
    "profile": "profile",
    "with a head": "fitting",
}
_COPIES = "{precision}: {lm_head} for the LM head, {heads} for heads, {layers} for the layers"
_HEAD = "{kind} after layer {exit_layer}: {parameters} parameters, {bytes}"
# Keys of a draft that make it approximate, in words.
_HOW = {
    "precision": "{} weights",
    "lm_head_precision": "LM head in {}",
    "window": "{} recent keys",
}
_FITTING = (
    "{kind} at exit {exit_layer}, drafting {size} tokens; a draft would cost {draft_cost:.2f} of a "
    "step;\nexpected over plain decoding, by tokens of text: {gains}\n"
    "fit one: selfspec fit {model} --text FILES"
)


def info_table(facts: JsonObject) -> Table:
    """The facts as a table."""
    windows = (", {layers} over {window} tokens".format(**w) for w in facts["sliding_windows"])
    copies = (_COPIES.format(**c, **c["bytes"]) for c in facts["low_precision"])
    heads = (_HEAD.format(**head) for head in facts["exit_heads"])
    shown = {
        **facts,
        "sliding_windows": "".join(windows),
        "positions": f"{facts['positions']:,}" if facts["positions"] else "no limit",
        "low_precision": "\n".join(copies),
        "exit_heads": "\n".join(heads) or "none fitted",
        "default_draft": _draft_in_words(facts["default_draft"]),
    }
    if tuned := facts["profile"]:
        which = "when sampling" if tuned["temperature"] else "when decoding greedily"
        shown["profile"] = f"{which}, by `selfspec tune`:\n{_draft_in_words(tuned['draft'])}"
    if fitting := facts["fitting"]:
        gains = (f"{x:.1f}x after {in_units(tokens)}" for tokens, x in fitting["speedups"].items())
        size = f"{fitting['vocab_size']:,}" if fitting["vocab_size"] else "all"
        shown["fitting"] = _FITTING.format(
            **fitting, size=size, gains=", ".join(gains), model=facts["model"]
        )
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, text in _ROWS.items():
        if name not in _OPTIONAL or facts[_OPTIONAL[name]]:
            table.add_row(name, text.format(**shown))
    return table


def _draft_in_words(draft: JsonObject) -> str:
    if draft["drafter"] == "none":
        return "none: plain decoding"
    size, parts = f"{draft['num_draft_tokens']} tokens a round", list[str]()
    if draft["head"] is not None:
        parts.append("exit after layer {exit_layer} ({head} head)".format(**draft))
    approximate = [words.format(draft[key]) for key, words in _HOW.items() if draft[key]]
    if draft["drafter"] != "auto":
        return f"{draft['drafter']}: {', '.join([*parts, *approximate, size])}"
    tried = draft["head"] == "shared" and not approximate
    when = "only if it agrees with the last layer" if tried else "where that is faster"
    return (
        "auto: lookup where the text repeats itself, plain decoding elsewhere;\n"
        f"the {', '.join([*parts, *approximate])} {when}"
    )

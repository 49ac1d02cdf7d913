"""`selfspec info`: describes a target and its heads."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

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
    from selfspec.config import DraftConfig
    from selfspec.decoder import Decoder
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
    from selfspec.decoder.checkpoints import folder_of
    from selfspec.heads import CONFIG_NAME
    from selfspec.schedule.profile import PROFILE_NAME

    name, path = resolve(source.model)
    beside = any((Path(folder_of(path)) / file).is_file() for file in (CONFIG_NAME, PROFILE_NAME))
    is_bare = source.heads is None and not beside and not _ships_head(path)
    engine, profile = _without_weights(path) if is_bare else None, None
    if engine is None:
        spec = source.load_spec()
        engine, profile = spec.engine, spec.profile
    facts = {"model": name, **describe(engine, context, profile)}
    console.print(info_table(facts))
    console.answer(facts)


def _ships_head(path: Path | str) -> bool:
    """Whether the checkpoint has a head of its own, such as a multi-token prediction layer."""
    from selfspec.decoder.checkpoints import load_config
    from selfspec.heads import ships_head

    config = load_config(path).get_text_config(decoder=True)
    depth = getattr(config, "num_hidden_layers", None)
    return depth is not None and ships_head(path, depth)


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
        cache_bytes(engine.decoder)
    except RuntimeError:
        return None
    return engine


class CacheBytes(NamedTuple):
    """Measured sizes of the KV cache of one row.

    Attributes:
        token: keys and values of a token, in each layer.
        states: the recurrent states.
        draft: inputs that recurrent layers keep of a token until its round is committed.
    """

    token: list[int]
    states: int
    draft: int


def cache_bytes(decoder: Decoder) -> CacheBytes:
    """Run two tokens, and measure the size of their KV and states."""
    import torch

    from selfspec.decoder import Span

    slots = decoder.new_slots(1)
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.long, device=decoder.device)
        decoder.run(token, Span(0, decoder.depth), slots)
        slots.commit([1])
        decoder.run(token, Span(0, decoder.depth), slots)
    return CacheBytes(slots.token_bytes, *slots.state_bytes)


def describe(engine: Engine, context: int | None, profile: Profile | None = None) -> dict[str, Any]:
    """A target's facts as plain values."""
    from selfspec.config import Precision

    decoder = engine.decoder
    config, model = decoder.config, decoder.causal_lm
    context = context or decoder.max_positions or 4096
    sizes = cache_bytes(decoder)
    per_token, attending = sum(sizes.token), len([size for size in sizes.token if size])
    windows = Counter(window for window in decoder.windows if window is not None)
    return {
        "architecture": type(model).__name__,
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
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "packed_bytes": decoder.packed_bytes,
        "kv_bytes_per_token": per_token,
        "context": context,
        "kv_bytes": per_token * context,
        "recurrent_layers": len(decoder.recurrent_layers),
        "state_bytes": sizes.states,
        "state_bytes_per_draft": sizes.draft,
        "low_precision": [
            {"precision": precision, "bytes": decoder.copy_bytes(precision)}
            for precision in get_args(Precision)
        ],
        "exit_heads": [
            {
                "kind": head.kind,
                "exit_layer": head.exit_layer,
                "parameters": sum(p.numel() for p in head.parameters()),
                "bytes": sum(p.numel() * p.element_size() for p in head.parameters()),
            }
            for head in engine.heads
        ],
        "default_draft": _of_draft(engine, engine.default_draft),
        "profile": {
            "temperature": profile.temperature,
            "draft": _of_draft(engine, profile.draft),
        }
        if profile
        else {},
        "fitting": {} if engine.heads else expected_of_fitting(decoder),
    }


def _of_draft(engine: Engine, draft: DraftConfig) -> dict[str, Any]:
    has_exit = draft.drafter in ("early_exit", "tree", "cascade", "auto")
    head = engine.head(draft) if has_exit else None
    return {
        **draft.model_dump(include={"drafter", "schedule"}),
        "num_draft_tokens": draft.most_tokens,
        "exit_layer": head and head.exit_layer,
        "head": head and head.kind,
    }


def expected_of_fitting(decoder: Decoder) -> dict[str, Any]:
    """The head that `selfspec fit` would choose for a million tokens of text.

    Its draft cost is in plain steps; its speedups over plain decoding go by the tokens that it has
    seen.
    """
    import torch

    from selfspec.apps.bench.forecast import COVERAGE, Advice, device_speed, forecast

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    speed = device_speed(decoder, device, decoder.dtype)
    coverage = {size: share for size, share in COVERAGE.items() if size < decoder.vocab_size}
    best = Advice.of(decoder, speed, coverage | {0: 1.0}, _TOKENS[1]).best
    speedups = {tokens: forecast(decoder, speed, best, tokens).speedup for tokens in _TOKENS}
    return {**best.head, "draft_cost": best.cost, "speedups": speedups}


def info_table(facts: dict[str, Any]) -> Table:
    """The facts as a table."""
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    attention = [f"{facts['attention']}, {facts['full_layers']} layers over everything"]
    attention += [f"{w['layers']} over {w['window']} tokens" for w in facts["sliding_windows"]]
    heads = [
        f"{head['kind']} after layer {head['exit_layer']}: "
        f"{in_units(head['parameters'])} parameters, {in_units(head['bytes'], 'B')}"
        for head in facts["exit_heads"]
    ]
    rows = {
        "model": f"{facts['model']} ({facts['architecture']})",
        "layers": f"{facts['layers']}, width {facts['hidden_size']}",
        "attention": ", ".join(attention),
        "attention heads": f"{facts['attention_heads']}, {facts['kv_heads']} for keys and values",
        "vocabulary": f"{facts['vocab_size']:,}",
        "positions": f"{facts['positions']:,}" if facts["positions"] else "no limit",
        "weights": f"{in_units(facts['parameters'])} parameters in {facts['dtype']}, "
        f"{in_units(facts['weight_bytes'], 'B')}",
        "packed weights": f"{in_units(facts['packed_bytes'], 'B')} more with the kernels "
        "prepacked, the default\non a CPU if there is memory; `selfspec.prepack_(model)` drops the "
        "unpacked ones",
        "KV": f"{in_units(facts['kv_bytes_per_token'], 'B')} a token, "
        f"{in_units(facts['kv_bytes'], 'B')} for {facts['context']:,} tokens",
        "recurrent states": f"{in_units(facts['state_bytes'], 'B')} a row, as much again during a "
        f"round, and {in_units(facts['state_bytes_per_draft'], 'B')} a token of a round, in "
        f"{facts['recurrent_layers']} layers",
        "low precision": "\n".join(map(_low_precision, facts["low_precision"])),
        "exit heads": "\n".join(heads) or "none fitted",
        "default draft": _default_draft(facts["default_draft"]),
    }
    if facts["profile"]:
        tuned = facts["profile"]
        which = "when sampling" if tuned["temperature"] else "when decoding greedily"
        rows["profile"] = f"{which}, by `selfspec tune`:\n{_default_draft(tuned['draft'])}"
    if not facts["packed_bytes"]:
        del rows["packed weights"]
    if not facts["recurrent_layers"]:
        del rows["recurrent states"]
    if facts["fitting"]:
        rows["with a head"] = _fitting(facts["model"], facts["fitting"])
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _low_precision(copies: dict[str, Any]) -> str:
    """What the copies take that drafts with this precision read."""
    sizes = {part: in_units(size, "B") for part, size in copies["bytes"].items()}
    return (
        f"{copies['precision']}: {sizes['lm_head']} for the LM head, {sizes['heads']} for heads, "
        f"{sizes['layers']} for the layers"
    )


def _default_draft(draft: dict[str, Any]) -> str:
    """A draft, in words."""
    if draft["drafter"] == "none":
        return "none: plain decoding"
    if draft["drafter"] == "auto":
        return (
            "auto: lookup where the text repeats itself, plain decoding elsewhere;\nthe exit after "
            f"layer {draft['exit_layer']} ({draft['head']} head) only if it agrees with the last "
            "layer"
        )
    if draft["head"] is None:
        return f"{draft['drafter']}: {draft['num_draft_tokens']} tokens a round"
    return (
        f"{draft['drafter']}: exit after layer {draft['exit_layer']} ({draft['head']} head), "
        f"{draft['num_draft_tokens']} tokens a round"
    )


def _fitting(model: str, fitting: dict[str, Any]) -> str:
    """The speedup to expect from a fitted head, and how to fit one."""
    gains = ", ".join(
        f"{gain:.1f}x after {in_units(tokens)}" for tokens, gain in fitting["speedups"].items()
    )
    size = f"{fitting['vocab_size']:,}" if fitting["vocab_size"] else "all"
    return (
        f"{fitting['kind']} at exit {fitting['exit_layer']}, drafting {size} tokens; a draft would "
        f"cost {fitting['draft_cost']:.2f} of a step;\nexpected over plain decoding, by tokens of "
        f"text: {gains}\nfit one: selfspec fit {model} --text FILES"
    )

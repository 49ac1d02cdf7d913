"""Defaults of a fit, which depend on the target, the text and the available memory."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from selfspec import DEMO_MODEL
from selfspec.apps.bench.forecast import COVERAGE, Advice, Candidate, device_speed
from selfspec.config import parse, read_config
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import auto_class, load_config, load_tokenizer
from selfspec.decoder.devices import fitting_device
from selfspec.heads.hub import DEMO

from ..data import tokenize
from ..loop.checkpoint import Checkpoints
from ..loop.script import CONFIG_NAME
from .fitting import FitConfig, stored_dtype
from .heads import new_head, saved_configs

OUTPUT = "outputs/fit"
TEXT = Path(__file__).parents[1] / "text"
_DEMO_TEXT = {
    "data": [{"files": [str(TEXT / "garden.txt")], "clean": "prose"}],
    "held_out": {"novels": {"files": [str(TEXT / "hound.txt")], "clean": "prose"}},
}
_PASSES = 2  # over the text
_FEWEST, _MOST = 100, 10_000  # steps
_BATCH = 4  # blocks of a step on a CPU
_UNROLL = 0.6  # share of the run before which only the first draft is trained
_DEPTHS = 3  # drafts in a row after that
_KEPT = 2**25  # bytes: the allocator of a CPU returns larger tensors to the system after every use
_DISK = 0.1  # share of the free space that features may take
_RATE, _WIDTH = 0.006, 256  # learning rate of heads up to this width


def complete(
    given: Mapping[str, Any],
    source: str,
    show: Callable[[Advice], None] | None = None,
    force: bool = False,
) -> FitConfig:
    """The config of a fit: `given`, and defaults for all other keys.

    Without `heads`, the run that is in the output folder goes on with its own, and a new one with
    those in `start`; else the head is chosen that is expected to be the fastest on this device.

    Args:
        given: keys of `FitConfig`, nested. `data` may be left out only for the demo target.
        source: where the keys are from, for error messages.
        show: takes the candidates before one is chosen.
        force: choose a head even if none is expected to pay.

    Raises:
        FileNotFoundError: the text has no files.
        ValueError: a key is unknown or has a bad value, there is no text, or no head is expected to
            pay.
    """
    text = default_text(given)
    target = given.get("target", DEMO)
    decoder = _without_weights(DEMO_MODEL if target == DEMO else target)
    chosen = {"output": OUTPUT, **text, **_of_target(decoder, given.get("loss", {}))}
    config = parse(FitConfig, _filled(given, chosen), source)
    counted = _count(config, given.get("loop", {}))
    chosen["loop"] = _of_size(counted, given.get("loop", {}))
    before = _config_of_run(config)
    if "heads" in before:
        chosen["heads"] = before["heads"]
        chosen["measure"]["num_draft_tokens"] = before["measure"]["num_draft_tokens"]
    elif config.start is not None:
        # Published files do not say all of a head: it is made, and checked, with the weights.
        chosen["heads"] = saved_configs(config.load_target()[0].decoder, config.start)
    elif "heads" not in given:
        best = _choose(config, decoder, counted, show, force)
        chosen["heads"] = [best.head]
        chosen["measure"]["num_draft_tokens"] = best.num_draft_tokens
    config = parse(FitConfig, _filled(given, chosen), source)
    chosen["loop"]["micro_batch_size"] = _blocks_of_a_pass(config, decoder)
    again = "features" in before  # a run keeps reading a cache, or the target itself
    chosen["features"] = before["features"] if again else _features(config, decoder, counted)
    return parse(FitConfig, _filled(given, chosen), source)


def default_text(given: Mapping[str, Any]) -> dict[str, Any]:
    """Default `data` and `held_out` of the demo target; empty if `given` has `data`.

    Raises:
        ValueError: there is no `data`, and the target is not the demo target.
    """
    target = given.get("target", DEMO)
    if "data" in given:
        return {}
    if target != DEMO:
        raise ValueError(
            f"there is no text for {target}; give --text FILES: best are the model's own outputs "
            "(selfspec regenerate makes them from prompts), or text similar to what it will write"
        )
    return _DEMO_TEXT


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, completed by `defaults` section by section."""
    both = {
        key: _filled(given[key], defaults[key])
        for key in given.keys() & defaults.keys()
        if isinstance(given[key], Mapping) and isinstance(defaults[key], Mapping)
    }
    return {**defaults, **given, **both}


def _without_weights(source: str | Path) -> Decoder:
    """The target on the meta device."""
    config = load_config(source)
    with torch.device("meta"):
        return Decoder(auto_class(config).from_config(config, dtype=torch.float32))


def _of_target(decoder: Decoder, loss: Mapping[str, Any]) -> dict[str, Any]:
    """The loss, the rate and what is measured; `heads` are chosen later, from the text."""
    # With attention biases by key index, a head's layer cannot be unrolled over its own drafts.
    depths = loss.get("depths", 1 if decoder.counts_keys else _DEPTHS)
    weights = [0.5**depth for depth in range(depths)]  # a later draft is reached less often
    # Adam's rate for matrices falls with their width (Yang et al. 2022).
    rate = _RATE * min(1.0, _WIDTH / decoder.config.hidden_size)
    return {
        "heads": [{"kind": "block", "exit_layer": 1}],
        "loss": {"depths": depths, "depth_weights": weights, "unroll_from": _UNROLL},
        "optimizer": {"lr": rate, "warmup": 0.05, "decay": 0.8},
        "measure": {"depths": depths, "blocks": 48, "prompts": 4, "new_tokens": 64},
    }


def _config_of_run(config: FitConfig) -> dict[str, Any]:
    """The config of the run that is in the output folder; empty if there is none.

    A run without a checkpoint goes on only with the same target and text: it holds nothing yet.
    """
    path, own = Path(config.output) / CONFIG_NAME, config.model_dump(mode="json")
    before = read_config(path, ()) if path.is_file() else {}
    same = all(before.get(name) == own[name] for name in ("target", "start", "data"))
    return before if same or Checkpoints(path.parent).steps() else {}


def _features(config: FitConfig, decoder: Decoder, counted: _Counted) -> dict[str, Any] | None:
    """A cache of the target's features, if the text is read again and there is space for them.

    It saves the target's pass, most of the time of a fit, from the second reading on.
    """
    if counted.text is None or counted.tokens < _PASSES * counted.text:
        return None
    streams = {layer for head in config.heads for layer in new_head(decoder, head).input_layers}
    numbers = counted.text * decoder.config.hidden_size * (len(streams) + 1)
    folder = Path(config.output)
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if numbers * torch.bfloat16.itemsize > _DISK * shutil.disk_usage(there).free:
        return None
    dtype = "bfloat16" if config.loop.precision == "bf16" else "float32"
    return {"folder": str(folder / "features"), "dtype": dtype, "keep": False}


class _Counted(NamedTuple):
    """The training text, counted.

    Attributes:
        steps: that go over it as often as a fit does.
        tokens: that they see.
        text: its tokens, or `None` if it is longer than what they see.
        learned: `[vocab]` how often each token is a target in all but every tenth document.
        others: `[vocab]` the same in every tenth document.
    """

    steps: int
    tokens: int
    text: int | None
    learned: Tensor
    others: Tensor

    def coverage(self, size: int) -> float:
        """Share of the other documents' tokens among the `size` most frequent ones."""
        others = self.others if self.others.any() else self.learned
        kept = self.learned.argsort(descending=True, stable=True)[:size]
        return float(others[kept].sum() / others.sum())


def _count(config: FitConfig, given: Mapping[str, Any]) -> _Counted:
    """Count the tokens; counting stops where the maximum of steps is reached."""
    step = given.get("batch_size", _batch_size()) * config.block_size
    most = given.get("steps", _MOST) * step
    tokenizer, vocab = load_tokenizer(config.source), _vocab_size(config)
    counts, tokens, whole = torch.zeros(2, vocab, dtype=torch.long), 0, True
    read = (tokenize(source, tokenizer, silent=True) for source in config.data)  # again by the fit
    for number, document in enumerate(chain.from_iterable(read)):
        trained = zip(document.tokens, document.trained, strict=True)
        learned = torch.tensor([token for token, used in trained if used], dtype=torch.long)
        counts[int(number % 10 == 9)] += learned.bincount(minlength=vocab)
        tokens += len(document.tokens)
        if tokens * _PASSES >= most:
            whole = False
            break
    steps = given.get("steps") or min(_MOST, max(_FEWEST, math.ceil(tokens * _PASSES / step)))
    return _Counted(steps, steps * step, tokens if whole else None, *counts)


def _vocab_size(config: FitConfig) -> int:
    return load_config(config.source).get_text_config(decoder=True).vocab_size


def _choose(
    config: FitConfig,
    decoder: Decoder,
    counted: _Counted,
    show: Callable[[Advice], None] | None,
    force: bool,
) -> Candidate:
    """The head that is expected to be the fastest after the run."""
    sizes = [size for size in COVERAGE if size < decoder.vocab_size]
    coverage = {size: counted.coverage(size) for size in sizes} | {0: 1.0}
    speed = device_speed(decoder, fitting_device(), stored_dtype(config) or torch.float32)
    advice = Advice.of(decoder, speed, coverage, counted.tokens)
    if show is not None:
        show(advice)
    if not force:
        advice.check()
    return advice.best


def _batch_size() -> int:
    return 32 if torch.accelerator.is_available() else _BATCH


def _of_size(counted: _Counted, given: Mapping[str, Any]) -> dict[str, Any]:
    """Steps for the size of the text, and evaluations."""
    fifth = max(1, counted.steps // 5)
    return {
        "steps": counted.steps,
        "batch_size": given.get("batch_size", _batch_size()),
        "eval_every": fifth,
        "save_every": fifth,
    }


def _blocks_of_a_pass(config: FitConfig, decoder: Decoder) -> int:
    """The most blocks that divide a batch and fit into memory."""
    batch, fitting = config.loop.batch_size, _rows_that_fit(config, decoder)
    return max(n for n in range(1, batch + 1) if batch % n == 0 and n <= max(1, fitting))


def _rows_that_fit(config: FitConfig, decoder: Decoder) -> int:
    """Number of blocks whose pass takes half of the memory that the weights leave free."""
    heads = [new_head(decoder, head) for head in config.heads]
    fitted = sum(p.numel() for head in heads for p in head.parameters())
    weights = sum(p.numel() for p in decoder.causal_lm.parameters())
    depths, width = config.loss.depths, decoder.config.hidden_size
    trimmed = not config.loss.schedule.reads_all and all(h.vocab_size for h in config.heads)
    vocab = max(h.vocab_size for h in config.heads) if trimmed else decoder.vocab_size
    # In float32. Per position: logits, log-probabilities and gradients of target and drafts, and
    # activations for a layer's backward pass. Per weight of a head: its gradient and Adam's means.
    position = 4 * ((2 + 3 * depths) * vocab + 40 * depths * width)
    left = _free_bytes() - 4 * weights - 16 * fitted
    rows = int(left / 2 / (position * config.block_size))
    if torch.accelerator.is_available():
        return rows
    return min(rows, _KEPT // (4 * vocab * config.block_size))


def _free_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available

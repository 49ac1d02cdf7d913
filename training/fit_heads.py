"""Fits exit heads to a frozen target, measures them on held-out text, and saves them."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from .data import Mixture
from .exits.drafts import HeldOutDrafts
from .exits.features import open_features, streams_of
from .exits.fitting import FitConfig, write_heads
from .exits.heads import build_heads, go_on_from, heads_with, trim_heads, with_saved_options
from .exits.measure import open_held_out
from .exits.task import ExitTask
from .loop.checkpoint import Checkpoints, digest, target_facts
from .loop.loop import Loop
from .loop.parallel import processes, whole
from .loop.script import CONFIG_NAME, run_folder, run_script
from .measure_heads import measure_saved


def fit(config: FitConfig) -> Path:
    """Run a fit, or go on with the one in its folder; returns the folder of the heads."""
    with run_folder(config, Path(config.output), config.identity) as output:
        return _fit(config, output)


def _fit(config: FitConfig, output: Path) -> Path:
    spec, tokenizer = config.load_target()
    if not config.loop.fsdp:  # trimmed LM heads are made where the target is
        spec.model.to(processes().device)
    decoder = spec.decoder
    torch.manual_seed(config.loop.seed)
    configs = config.heads
    if config.start:
        configs = with_saved_options(configs, decoder, config.start)
    heads = build_heads(decoder, configs)
    if config.start:
        go_on_from(heads, decoder, config.start)
    data, held_out = config.read_text(tokenizer)
    trim_heads(decoder, heads, config.heads, data.sources)
    open_held_out(decoder, heads, held_out, config.measure)  # fail now, not after the fit
    first = next(iter(held_out.values()))
    watched = HeldOutDrafts(decoder, heads, first, config.measure.depths, config.measure.watched)
    reader = None
    if config.features and Checkpoints(output).steps()[-1:] != [config.loop.steps]:
        reader = open_features(config.features, decoder, streams_of(heads), data.sources)
    task = ExitTask(decoder, heads, config.loss, watched, reader)
    identity = {**config.identity, "model": target_facts(decoder), "text": _text_facts(data)}
    loop = Loop(task, data, config.loop, config.optimizer, output, identity)
    loop.run()
    weights = [_whole(head) for head in heads]
    if loop.main:
        if config.loop.fsdp:  # a target in shards is of no use to one process
            spec = config.load_target()[0]
        fitted = heads_with(weights, spec.decoder, configs)
        for head in fitted:
            head.facts["data"] = config.text_summary
        write_heads(config, fitted, spec, output / CONFIG_NAME)
        if config.features and not config.features.keep:
            shutil.rmtree(config.features.folder, ignore_errors=True)
        measure_saved(config, spec, held_out)
    return config.folder


def _text_facts(data: Mixture) -> str:
    """Tells training text from any other."""
    return digest([sha256(blocks.tokens.numpy().tobytes()).hexdigest() for blocks in data.sources])


def _whole(head: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in head.state_dict().items()}


if __name__ == "__main__":
    run_script(fit, FitConfig, __doc__)

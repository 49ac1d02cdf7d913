"""Optimizers and the learning-rate schedule, as functions of config and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from selfspec.config import StrictConfig


class OptimizerConfig(StrictConfig):
    """What updates the weights.

    Attributes:
        name: `adamw` for every parameter, or `muon` (Jordan et al. 2024) for the matrices inside
            layers and AdamW for embeddings, the LM head, norms and biases.
        lr: peak learning rate of AdamW.
        muon_lr: peak learning rate of Muon.
        weight_decay: decoupled weight decay of matrices.
        betas: AdamW's decay rates.
        warmup: share of the run over which the rate rises from 0.
        decay: share of the run, at its end, over which the rate falls to `final`.
        final: the last rate, as a share of the peak.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    muon_lr: float = Field(default=0.02, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = Field(default=0.02, ge=0, le=1)
    decay: float = Field(default=0.4, ge=0, le=1)
    final: float = Field(default=0.0, ge=0, le=1)


def make_optimizers(module: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """Optimizers for the parameters of `module` that are trained.

    Raises:
        ValueError: nothing is trained, or Muon has no matrix to train.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    words = _word_vectors(module)
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in words]
    others = [p for p in trained if p.ndim != 2 or id(p) in words]
    if not trained:
        raise ValueError("nothing is trained: every parameter is frozen")
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    kept = {"params": others, "weight_decay": 0.0}
    if config.name == "adamw":
        groups = [group for group in (decayed, kept) if group["params"]]
        return [_with_base(AdamW(groups, lr=config.lr, betas=config.betas))]
    if not matrices:
        raise ValueError("muon trains matrices inside layers, and there is none; use adamw")
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
    optimizers: list[Optimizer] = [_with_base(muon)]
    if others:
        optimizers.append(_with_base(AdamW([kept], lr=config.lr, betas=config.betas)))
    return optimizers


def _word_vectors(module: nn.Module) -> set[int]:
    """Ids of the parameters of embeddings and LM heads."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    heads = [head for model in models if (head := model.get_output_embeddings()) is not None]
    return {id(p) for part in (*tables, *heads) for p in part.parameters()}


def rate_scale(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step relative to its peak: rise, plateau, linear fall."""
    warmup, decay = config.warmup * steps, config.decay * steps
    rise = min(1.0, (step + 1) / warmup) if warmup >= 1 else 1.0
    fall = min(1.0, (steps - step) / decay) if decay >= 1 else 1.0
    return rise * (config.final + (1 - config.final) * fall)


def set_rate(optimizers: Sequence[Optimizer], scale: float) -> None:
    """Set every group's learning rate to `scale` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def _with_base(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer

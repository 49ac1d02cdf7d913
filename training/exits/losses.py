"""Losses between draft and target distributions, position by position."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor
from torch.autograd import Function
from typing_extensions import Self

from selfspec.config import StrictConfig, unknown_name

LossName = Literal["ce", "kl", "tv", "acceptance"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
NO_TOKEN = -100


class LossSchedule(StrictConfig):
    """Which loss is used when.

    Attributes:
        loss: the first, or only, loss.
        then: the loss that replaces it later, if any.
        switch: share of the run before the replacement begins.
        blend: share of the run over which the weight moves linearly from one to the other.
    """

    loss: LossName = "kl"
    then: Literal["acceptance"] | None = None
    switch: float = Field(default=0.6, ge=0, le=1)
    blend: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="after")
    def _second_loss_arrives(self) -> Self:
        if self.then == self.loss:
            raise ValueError(f"then must differ from loss, got {self.then!r} twice; leave it out")
        if self.then and self.switch + self.blend > 1:
            raise ValueError(
                f"switch + blend must be at most 1, got {self.switch} + {self.blend}: "
                "the run would end before its second loss has full weight"
            )
        return self

    @property
    def reads_all(self) -> bool:
        """Whether a trimmed head's loss reads the target's logits of all tokens."""
        return self.loss != "kl" or self.then is not None

    def weights(self, progress: float) -> dict[str, float]:
        """Weights of the losses after the share `progress` of the run.

        They add up to 1; a loss of weight 0 is left out.
        """
        if self.then is None or progress < self.switch:
            return {self.loss: 1.0}
        moved = (progress - self.switch) / self.blend if self.blend else 1.0
        if moved >= 1:
            return {self.then: 1.0}
        return {self.loss: 1 - moved, self.then: moved} if moved > 0 else {self.loss: 1.0}


def draft_losses(
    wanted: Collection[str],
    target_logits: Tensor,
    draft_logits: Tensor,
    next_tokens: Tensor | None = None,
    vocab_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Losses `[...]` of every position, by name; gradients flow to `draft_logits` only.

    * `ce`: -log q(next token), the loss of language modelling. It is 0 where the next token is
      -100 or cannot be drafted.
    * `kl`: Σ p log(p / q), forward, the usual loss of distillation. p is restricted to the tokens
      that can be drafted (a trimmed vocabulary, the candidates of a DFlash2 head) and normalised,
      because the divergence of p itself is infinite.
    * `tv`: total variation, ½ Σ |p - q| = 1 - Σ min(p, q): the probability that a draft drawn from
      q is rejected (Leviathan et al. 2023, theorem 3.5). Exact over a trimmed vocabulary.
    * `acceptance`: -log Σ min(p, q), the logarithm of the acceptance rate itself. It has the
      minimum and the direction of `tv`, but its gradient is divided by the rate, so that positions
      with bad drafts, which hardly move under `tv`, count. Exact over a trimmed vocabulary.

    Only the shared log-softmaxes are kept for the backward pass: two float32 buffers of the size of
    the draft logits, and a third if `kl` over a trimmed vocabulary is one of several losses.

    Args:
        wanted: names of losses.
        target_logits: `[..., vocab]`.
        draft_logits: `[..., vocab]`, or `[..., N]` over a trimmed vocabulary.
        next_tokens: `[...]` the text's next token, -100 for none; `ce` needs them.
        vocab_ids: `[N]` the tokens of a trimmed vocabulary, each once.

    Raises:
        ValueError: a loss is unknown, or the shapes do not match.
    """
    _check(target_logits, draft_logits, vocab_ids)
    for name in wanted:
        if name not in LOSSES:
            raise ValueError(unknown_name("loss", name, LOSSES))
    log_q = _log_probs(draft_logits)
    losses: dict[str, Tensor] = {}
    if "ce" in wanted:
        losses["ce"] = _cross_entropy(log_q, next_tokens, vocab_ids)
    if losses.keys() == set(wanted):
        return losses
    log_p = _target_log_probs(target_logits, vocab_ids)
    if "kl" in wanted:
        never = log_q == -torch.inf
        within = log_p if vocab_ids is None else log_p.log_softmax(-1)
        if bool(never.any()):
            within = log_p.masked_fill(never, -torch.inf).log_softmax(-1)
        losses["kl"] = _Divergence.apply(within, log_q)
    if "tv" in wanted or "acceptance" in wanted:
        log_alpha = _log_overlap(log_p, log_q)
        losses |= {"tv": -log_alpha.expm1(), "acceptance": -log_alpha}
    return {name: losses[name] for name in wanted}


@torch.no_grad()
def acceptance_rate(
    target_logits: Tensor, draft_logits: Tensor, vocab_ids: Tensor | None = None
) -> Tensor:
    """α `[...]` = Σ min(p, q), the probability that a draft is accepted (Leviathan et al. 2023).

    Args:
        target_logits: `[..., vocab]`.
        draft_logits: `[..., vocab]`, or `[..., N]` over a trimmed vocabulary.
        vocab_ids: `[N]` the tokens of a trimmed vocabulary.
    """
    _check(target_logits, draft_logits, vocab_ids)
    log_p = _target_log_probs(target_logits, vocab_ids)
    return _log_overlap(log_p, _log_probs(draft_logits)).exp()


@torch.no_grad()
def agreement(
    target_logits: Tensor, draft_logits: Tensor, vocab_ids: Tensor | None = None
) -> Tensor:
    """Whether the draft's most likely token is the target's, `[...]`: greedy acceptance.

    Args:
        target_logits: `[..., vocab]`.
        draft_logits: `[..., vocab]`, or `[..., N]` over a trimmed vocabulary, which never agrees if
            the target's most likely token is outside.
        vocab_ids: `[N]` the tokens of a trimmed vocabulary.
    """
    _check(target_logits, draft_logits, vocab_ids)
    drafted = draft_logits.argmax(-1)
    if vocab_ids is not None:
        drafted = vocab_ids[drafted]
    return drafted == target_logits.argmax(-1)


def _check(target_logits: Tensor, draft_logits: Tensor, vocab_ids: Tensor | None) -> None:
    width = target_logits.shape[-1] if vocab_ids is None else len(vocab_ids)
    expected = (*target_logits.shape[:-1], width)
    if draft_logits.shape != expected:
        raise ValueError(
            f"draft_logits must be {expected} for target_logits {tuple(target_logits.shape)} "
            f"and {'no' if vocab_ids is None else width} vocab_ids, got {tuple(draft_logits.shape)}"
        )


def _log_probs(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _target_log_probs(logits: Tensor, vocab_ids: Tensor | None) -> Tensor:
    """Log p at the draft's tokens; over a trimmed vocabulary p does not add up to 1."""
    log_p = _log_probs(logits.detach())
    return log_p if vocab_ids is None else log_p.index_select(-1, vocab_ids)


class _Divergence(Function):
    """Σ p log(p / q); autograd would keep p and a mask for the backward pass."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
        ctx.save_for_backward(log_p)
        p, ratio = log_p.exp(), log_p - log_q
        # p log p is 0 in the limit p = 0, where the product is undefined.
        return ratio.masked_fill_(p == 0, 0).mul_(p).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (log_p,) = ctx.saved_tensors
        return None, log_p.exp().mul_(-grads[0][..., None])


class _LogOverlap(Function):
    """log Σ min(p, q), computed in logs because the sum itself may underflow."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_alpha = torch.minimum(log_p, log_q).logsumexp(-1)
        ctx.save_for_backward(log_p, log_q, log_alpha)
        return log_alpha

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        log_p, log_q, log_alpha = ctx.saved_tensors
        share = torch.minimum(log_p, log_q).sub_(log_alpha[..., None]).exp_()
        return None, share.mul_(log_q < log_p).mul_(grads[0][..., None])


def _log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    # Rounding may make the sum of equal distributions exceed 1.
    return _LogOverlap.apply(log_p, log_q).clamp(max=0)


def _cross_entropy(log_q: Tensor, next_tokens: Tensor | None, vocab_ids: Tensor | None) -> Tensor:
    if next_tokens is None or next_tokens.shape != log_q.shape[:-1]:
        got = None if next_tokens is None else tuple(next_tokens.shape)
        raise ValueError(f"ce needs next_tokens of shape {tuple(log_q.shape[:-1])}, got {got}")
    places = next_tokens if vocab_ids is None else _places(next_tokens, vocab_ids)
    there = places != NO_TOKEN
    chosen = log_q.gather(-1, places.where(there, 0)[..., None]).squeeze(-1)
    there &= chosen > -torch.inf
    return -chosen.where(there, 0)


def _places(tokens: Tensor, vocab_ids: Tensor) -> Tensor:
    """Index of every token in `vocab_ids`; -100 for tokens outside."""
    in_order, order = vocab_ids.sort()
    place = torch.searchsorted(in_order, tokens).clamp(max=len(vocab_ids) - 1)
    return order[place].where(in_order[place] == tokens, NO_TOKEN)

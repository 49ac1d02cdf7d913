"""Parts that kinds of heads are made of, copied from the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from selfspec.decoder import Decoder, weight_of

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def own_norm(decoder: Decoder) -> nn.Module:
    """A copy of the target's final norm.

    Raises:
        ValueError: the target has none, or has more than the LM head behind it.
    """
    check_tail(decoder)
    if decoder.final_norm is None:
        name = type(decoder.causal_lm).__name__
        raise ValueError(f"{name} has no final norm to start an exit head from")
    return decoder.copy(decoder.final_norm)


def check_tail(decoder: Decoder) -> None:
    """Raise ValueError where the LM head does not read the final norm's output (small OPTs)."""
    width = decoder.config.hidden_size
    reads = getattr(decoder.lm_head, "in_features", width)
    if reads != width:
        raise ValueError(
            f"{type(decoder.causal_lm).__name__} projects {width} to {reads} between its final "
            "norm and its LM head, which exit heads cannot; use head='shared', untrimmed"
        )


def placed(module: ModuleT, decoder: Decoder, exit_layer: int) -> ModuleT:
    """New parts where the exit is, in the dtype of the target's final norm."""
    norm = decoder.final_norm
    parameters = iter(()) if norm is None else norm.parameters()
    like = next(parameters, torch.empty(0, dtype=decoder.dtype))
    return module.to(decoder.device_at(exit_layer), like.dtype)


# Smaller or adapted LM heads, made of the target's own.


@torch.no_grad()
def trimmed_readout(decoder: Decoder, vocab_ids: Tensor) -> nn.Linear:
    """The rows of the target's LM head for `vocab_ids`, gathered once into one piece.

    Raises:
        ValueError: the LM head's rows cannot be taken, or read something else than the final norm.
    """
    check_tail(decoder)
    weight = decoder.lm_head_weight
    bias = None if decoder.lm_head.bias is None else weight_of(decoder.lm_head, "bias")
    ids = vocab_ids.to(weight.device)
    # Without memory of its own, and without drawing weights that would be thrown away.
    trimmed = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    trimmed.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        trimmed.bias = nn.Parameter(bias[ids], requires_grad=False)
    return trimmed


# What an exit head is: a small module that turns an exit's hidden states into draft logits.


class ExitHead(nn.Module):
    """An early exit behind the first `exit_layer` layers.

    A head maps the residual stream at its exit to the input of the target's LM head; the target's
    own tail (`Decoder.unembed`) makes logits of it, so LM-head weights are shared, never stored.

    A head may have a decoder layer of its own (`layer`). Then `enter` makes the layer's input, the
    layer runs with its KV beside the target's, and `forward` reads what it leaves. Such a head may
    also read what the target made of the tokens before (`feature_layers`).

    Attributes:
        kind: the head's name in configs and files.
        exit_layer: number of layers below the exit.
        is_plain: whether the exit goes through the target's own norm and LM head as it is.
        layer: the head's own decoder layer, or `None`.
        place: the target's layer in whose place that layer runs, and so the type of its attention.
        feature_layers: residual streams (by the number of layers below) of verified tokens that
            the head reads; empty for most kinds.
        vocab_ids: `[n]` tokens that the head can draft, rising; `None` drafts all.
        readout: what stands in for the target's LM head, or `None`.
        calibrators: P(accept) of a drafted token, by the way of decoding (`greedy`, `sampled`);
            empty until they are fitted.
        facts: what is known of it: the text it was fitted on (`data`), figures by domain
            (`held_out`); plain values, for files and cards.
    """

    kind: ClassVar[str]
    lowest_exit: ClassVar[int] = 1
    place: int = 0
    feature_layers: tuple[int, ...] = ()
    vocab_ids: Tensor | None

    def __init__(self, exit_layer: int):
        super().__init__()
        self.exit_layer = exit_layer
        self.register_buffer("vocab_ids", None)
        self.layer: nn.Module | None = None
        self.calibrators = nn.ModuleDict()
        self.facts: dict[str, Any] = {}
        # Made of the target's weights, which are not the head's to store or to train.
        self._readout: tuple[nn.Module, ...] = ()

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: Any) -> ExitHead:
        """A head for `decoder`, as it is before any training."""
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """What `build` needs, besides the exit layer, to make a head of this shape."""
        return {}

    @property
    def readout(self) -> nn.Module | None:
        """What stands in for the target's LM head."""
        return self._readout[0] if self._readout else None

    @property
    def is_plain(self) -> bool:
        """Whether a shallow pass may go straight through the target's own norm and LM head."""
        return False

    @property
    def joining(self) -> list[nn.Module]:
        """What `join` runs through: once a round, where the rest of the head runs once a draft."""
        return []

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """Draft only the tokens `vocab_ids`: a smaller LM head, and q is zero for any other.

        The output stays exact, for verification knows no trimming (as in FR-Spec, Zhao et al.
        2025).

        Raises:
            ValueError: the ids are no rising sequence of the target's token ids, or the target's
                LM head has no rows to take.
        """
        check_vocab_ids(decoder, vocab_ids)
        readout = trimmed_readout(decoder, vocab_ids.to(torch.long))
        self.vocab_ids = vocab_ids.to(readout.weight.device, torch.long)
        self._readout = (readout,)

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head fits `decoder`."""
        check_exit_layer(decoder, self.exit_layer, self.lowest_exit)
        if self.vocab_ids is not None:
            check_vocab_ids(decoder, self.vocab_ids)

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Input `[rows, width, hidden]` of the head's own layer.

        Args:
            hidden: `[rows, width, hidden]` residual stream at the exit.
            features: `[rows, width, hidden]` what is known of the token before each: the joined
                deep features (`join`), or what the head's own layer left; `None` for a head that
                reads none.
        """
        return hidden

    def join(self, features: list[Tensor]) -> Tensor:
        """One state `[rows, width, hidden]` of the residual streams at `feature_layers`."""
        raise NotImplementedError(f"a {self.kind} head reads no features")

    def forward(self, hidden: Tensor) -> Tensor:
        """Input `[rows, width, hidden]` of the LM head.

        Args:
            hidden: `[rows, width, hidden]` residual stream at the exit, or what the head's own
                layer left.
        """
        raise NotImplementedError

    def logits(self, decoder: Decoder, hidden: Tensor) -> Tensor:
        """Draft logits `[rows, width, n]` over `vocab_ids`, or over all tokens."""
        return decoder.unembed(self(hidden), self.readout)

    def spread(self, logits: Tensor, decoder: Decoder) -> Tensor:
        """Logits over all tokens, -inf for those that the head cannot draft."""
        if self.vocab_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], decoder.vocab_size), float("-inf"))
        return whole.index_copy_(-1, self.vocab_ids.to(logits.device), logits)


def check_exit_layer(decoder: Decoder, exit_layer: int, lowest: int = 1) -> int:
    """Return `exit_layer` if something lies below and above it, else raise ValueError."""
    if not lowest <= exit_layer < decoder.depth:
        raise ValueError(
            f"exit_layer must be in [{lowest}, {decoder.depth - 1}], got {exit_layer}; "
            f"the model has {decoder.depth} layers, and an exit needs layers below and above it"
        )
    return exit_layer


def check_vocab_ids(decoder: Decoder, ids: Tensor) -> None:
    """Raise ValueError unless `ids` are token ids of `decoder`, rising."""
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim != 1 or not len(ids):
        raise ValueError(
            "vocab_ids must be token ids, whole numbers in one dimension, got shape "
            f"{tuple(ids.shape)} of {ids.dtype}"
        )
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= decoder.vocab_size:
        raise ValueError(
            f"vocab_ids must be in [0, {decoder.vocab_size - 1}], got {least} to {most}; "
            "was another tokenizer used?"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("vocab_ids must rise, each token once; sort them with unique()")


def check_distinct(heads: Sequence[ExitHead]) -> None:
    """Raise ValueError where two heads have the same kind and exit layer."""
    for index, head in enumerate(heads):
        if any((h.kind, h.exit_layer) == (head.kind, head.exit_layer) for h in heads[:index]):
            raise ValueError(
                f"two heads of kind {head.kind!r} at exit_layer {head.exit_layer}; "
                "give each exit one head of a kind"
            )


def check_width(decoder: Decoder, width: int, kind: str) -> None:
    """Raise ValueError unless a head of this width fits `decoder`."""
    own = decoder.config.hidden_size
    if width != own:
        raise ValueError(
            f"a {kind} of width {width} does not fit a target of width {own}; "
            "load the target it was fitted to"
        )

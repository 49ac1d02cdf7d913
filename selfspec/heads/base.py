"""What an exit head is: a small module that makes draft logits from the hidden states at an exit.

Legend: rows = sequences of a batch; width = tokens of each; n = tokens that a head can draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from selfspec.config import OWN_NAME, JsonObject, Options, unknown_name
from selfspec.decoder import Decoder, weight_of
from selfspec.heads.mask import MaskHidden, MaskToken
from selfspec.sampling.vocabulary import DraftVocabulary

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ExitHead(nn.Module):
    """An early exit after the first `exit_layer` layers of a target.

    A head maps the residual stream at its exit to the input of the target's LM head. The target's
    own `Decoder.unembed` makes logits from that, so LM head weights are shared and never stored.

    A head may have a decoder layer of its own (`layer`). Then `enter` makes the input of that
    layer, the layer runs with its KV beside the target's, and `forward` reads its output. Such a
    head may also read the target's hidden states of earlier tokens (`feature_layers`).

    A new kind subclasses this, sets `kind`, and defines `build`, `options` and `forward`;
    `register_head` makes it known.

    Attributes:
        kind: the head's name in configs and files.
        lowest_exit: the lowest exit layer that the kind can have.
        highest_exit: the highest one; `None`: the last but one of the target's layers.
        exit_layer: number of layers below the exit.
        width: width of the residual stream it was made for; `None` if any width will do.
        layer: the head's own decoder layer, or `None`.
        place: index of the target's layer that `layer` is a copy of. It decides the kind of
            attention.
        feature_layers: residual streams of verified tokens that the head reads, by the number of
            layers below each; empty for most kinds.
        vocab_ids: `[n]` the tokens that the head can draft, in rising order; `None` for all.
        calibrators: acceptance probabilities of drafted tokens, for `greedy` and for `sampled`
            decoding; empty until they are fitted.
        skips_first: whether the head drafts nothing after the first token of a sequence, which has
            no token before it that features could come from, and its layer has no key for it.
        drafts_at_once: whether all drafts of a round are made in one pass: over a `mask`, or, if
            the head has no layer, by `all_logits`.
        mask: the mask of a head with a layer that `drafts_at_once`.
        confidence: maps what `forward` returns to the log odds `[..., 1]` that the target accepts a
            sampled draft (SpecDec++, Huang et al. 2024); `None` if the head has no such output.
        longest: the most tokens that the head drafts in a round; `None` if there is no limit.
        facts: what is known about the head: its training data (`data`) and its measurements by
            domain (`held_out`). Plain values, which go into files and model cards.
    """

    kind: ClassVar[str]
    lowest_exit: ClassVar[int] = 1
    highest_exit: ClassVar[int | None] = None
    skips_first: ClassVar[bool] = False
    drafts_at_once: bool = False
    width: int | None = None
    place: int = 0
    longest: int | None = None
    feature_layers: tuple[int, ...] = ()
    vocab_ids: Tensor | None

    def __init__(self, exit_layer: int):
        super().__init__()
        self.exit_layer = exit_layer
        self.register_buffer("vocab_ids", None)
        self.layer: nn.Module | None = None
        self.mask: MaskToken | MaskHidden | None = None
        self.confidence: nn.Linear | None = None
        self.calibrators = nn.ModuleDict()
        self.facts: JsonObject = {}
        # In a tuple, because it shares the target's weights: it is neither stored nor trained.
        self._lm_head: tuple[nn.Module, ...] = ()

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int, **options: object) -> ExitHead:
        """An untrained head for `decoder`."""
        raise NotImplementedError(f"a {cls.kind} head defines no build")

    @property
    def options(self) -> JsonObject:
        """The options with which `build` makes a head of this shape."""
        return {}

    @property
    def lm_head(self) -> nn.Module | None:
        """The trimmed or adapted LM head, or `None` where the target's own is used."""
        return self._lm_head[0] if self._lm_head else None

    @property
    def input_layers(self) -> tuple[int, ...]:
        """All residual streams that the head reads, the one at its exit first."""
        return (self.exit_layer, *self.feature_layers)

    @property
    def is_plain(self) -> bool:
        """Whether the head is nothing but the target's own norm and LM head."""
        return False

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """Draft only the tokens in `vocab_ids`, with a smaller LM head.

        The draft probability of all other tokens is zero. The output stays exact, because
        verification uses the whole vocabulary (as in FR-Spec, Zhao et al. 2025).

        Raises:
            ValueError: the ids are not token ids of the target in rising order, or rows cannot be
                taken from the target's LM head.
        """
        check_vocab_ids(decoder, vocab_ids)
        lm_head = trimmed_lm_head(decoder, vocab_ids.to(torch.long))
        self.vocab_ids = vocab_ids.to(lm_head.weight.device, torch.long)
        self._lm_head = (lm_head,)

    @classmethod
    def check_exit(cls, decoder: Decoder, exit_layer: int) -> int:
        """Return `exit_layer` if a head of this kind can exit there, else raise ValueError."""
        highest = decoder.depth - 1 if cls.highest_exit is None else cls.highest_exit
        if cls.lowest_exit <= exit_layer <= highest:
            return exit_layer
        if highest == 0:
            raise ValueError(
                f"{cls.kind} heads draft from the embeddings; "
                f"exit_layer must be 0, got {exit_layer}"
            )
        raise ValueError(
            f"exit_layer must be in [{cls.lowest_exit}, {highest}], got {exit_layer}; the model "
            f"has {decoder.depth} layers, and an exit needs layers below and above it"
        )

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head fits `decoder`."""
        self.check_exit(decoder, self.exit_layer)
        if self.vocab_ids is not None:
            check_vocab_ids(decoder, self.vocab_ids)
        if self.width not in (None, decoder.config.hidden_size):
            raise ValueError(
                f"a {self.kind} head of width {self.width} does not fit a target of width "
                f"{decoder.config.hidden_size}; load the target it was fitted to"
            )

    def embed(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        """Embeddings `[rows, width, hidden]` that a standalone layer of the head starts from."""
        return decoder.embed(tokens)

    def mask_inputs(self, decoder: Decoder) -> tuple[Tensor, Tensor]:
        """Embedding and features `[hidden]` that stand for a token that is not drafted yet."""
        assert isinstance(self.mask, MaskToken)
        return self.mask.embedding, self.mask.features

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Input `[rows, width, hidden]` of the head's own layer.

        Args:
            hidden: `[rows, width, hidden]` residual stream at the exit.
            features: `[rows, width, hidden]` features of the token before each. They come from
                `fuse_features` where the target has verified that token, else they are the output
                of the head's own layer. `None` for a head without `feature_layers`.
        """
        return hidden

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """Fuse the residual streams at `feature_layers` into one state `[rows, width, hidden]`."""
        raise NotImplementedError(f"a {self.kind} head reads no features")

    def forward(self, hidden: Tensor) -> Tensor:
        """Input `[rows, width, hidden]` of the LM head.

        Args:
            hidden: `[rows, width, hidden]` output of the head's own layer, or the residual stream
                at the exit if the head has no layer. Verification resumes from that stream, so it
                must not be changed in place.
        """
        raise NotImplementedError(f"a {self.kind} head defines no forward")

    def logits(self, decoder: Decoder, hidden: Tensor, depth: int = 0) -> Tensor:
        """Draft logits `[rows, width, n]` over `vocab_ids`, or over all tokens.

        Args:
            decoder: the target.
            hidden: what `forward` takes.
            depth: index of the draft, for a head that drafts all positions together.
        """
        return decoder.unembed(_read(self, hidden), self.lm_head)

    def draft_logits(self, decoder: Decoder, hidden: Tensor, depth: int, tokens: Tensor) -> Tensor:
        """Logits of draft `depth` if the tokens before it are known.

        Args:
            decoder: the target.
            hidden: `[rows, width, hidden]` input of `forward`.
            depth: index of the draft.
            tokens: `[rows, width]` the token before each draft.
        """
        logits = self.logits(decoder, hidden, depth)
        if not depth or not isinstance(self.mask, MaskToken) or not self.mask.rank:
            return logits
        gate = self.mask.of_state(self(hidden))
        return logits + self.mask.bias(gate, self.mask.code(decoder.embed(tokens)))

    def acceptance_odds(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Log odds `[rows, width]` that a sampled draft is accepted; they train nothing else.

        Args:
            hidden: `[rows, width, hidden]` input of `forward`.
            tokens: `[rows, width]` the token before each draft.
        """
        assert self.confidence is not None
        return self.confidence(self(hidden).detach())[..., 0]

    def all_logits(self, decoder: Decoder, hidden: Tensor) -> Tensor:
        """Logits of all drafts `[rows, longest, n]`, for such a head without a layer.

        Args:
            decoder: the target.
            hidden: `[rows, 1, hidden]` from `fuse_features`, at the token before the pending one.
        """
        raise NotImplementedError(f"a {self.kind} head drafts token by token")

    def vocabulary(self, decoder: Decoder) -> DraftVocabulary:
        """The tokens of the head's logits."""
        return DraftVocabulary(decoder.vocab_size, self.vocab_ids)


def _read(head: ExitHead, hidden: Tensor) -> Tensor:
    """What `forward` returns; ValueError if an LM head cannot read it."""
    read = head(hidden)
    if isinstance(read, Tensor) and read.shape == hidden.shape:
        return read
    given = f"shape {tuple(read.shape)}" if isinstance(read, Tensor) else type(read).__name__
    raise ValueError(
        f"`forward` of the {head.kind} head ({type(head).__qualname__}) returned {given}, expected "
        f"hidden states of the shape of its input, {tuple(hidden.shape)}"
    )


# The kinds

HEAD_KINDS: dict[str, type[ExitHead]] = {}
"""Every registered kind of head, by its name."""

HeadT = TypeVar("HeadT", bound=ExitHead)


def register_head(head_type: type[HeadT]) -> type[HeadT]:
    """Make a kind of head known by its `kind`, so that files and configs can name it.

    Use it as a class decorator. A class that is defined again, in a notebook for example, replaces
    its earlier definition.

    Raises:
        ValueError: another class has registered this kind, the class is not a kind of head, or it
            has a method by its former name.
    """
    is_head: bool = isinstance(head_type, type) and issubclass(head_type, ExitHead)
    if not is_head or not hasattr(head_type, "kind"):
        name = getattr(head_type, "__qualname__", repr(head_type))
        raise ValueError(
            f"{name} must be a subclass of ExitHead with a `kind`, which is its name in configs "
            "and files"
        )
    if hasattr(head_type, "join"):
        raise ValueError(f"{head_type.__qualname__}.join is called fuse_features now; rename it")
    known = HEAD_KINDS.setdefault(head_type.kind, head_type)
    if (known.__module__, known.__qualname__) != (head_type.__module__, head_type.__qualname__):
        raise ValueError(
            f"head kind {head_type.kind!r} is already registered by {known.__module__}."
            f"{known.__qualname__}; give {head_type.__qualname__} another kind"
        )
    HEAD_KINDS[head_type.kind] = head_type
    return head_type


def head_class(kind: str) -> type[ExitHead]:
    """The class of a kind; ValueError lists the known ones."""
    if kind not in HEAD_KINDS:
        raise ValueError(unknown_name("head kind", kind, list(HEAD_KINDS)) + OWN_NAME)
    return HEAD_KINDS[kind]


def build_head(decoder: Decoder, kind: str, exit_layer: int, options: Options) -> ExitHead:
    """An untrained head for `decoder`.

    Args:
        decoder: the target.
        kind: the head's kind.
        exit_layer: number of layers below the exit.
        options: options of the kind, such as a rank.

    Raises:
        ValueError: the kind is unknown, the exit layer out of range, or an option unknown or of
            the wrong type.
    """
    head_type = head_class(kind)
    head_type.check_exit(decoder, exit_layer)
    try:
        head = head_type.build(decoder, exit_layer, **options)
    except TypeError as error:
        raise ValueError(f"{kind} head: options {dict(options)} do not fit: {error}") from None
    if not isinstance(head, ExitHead):
        raise ValueError(
            f"{head_type.__qualname__}.build returned {type(head).__name__}, expected the head"
        )
    for name in options:
        if name not in head.options:
            raise ValueError(unknown_name(f"option of the {kind} head", name, list(head.options)))
    return head


# Checks


def check_vocab_ids(decoder: Decoder, ids: Tensor) -> None:
    """Raise ValueError unless `ids` are token ids of `decoder` in rising order."""
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


def check_feature_layers(decoder: Decoder, layers: Sequence[int], exit_layer: int) -> None:
    """Raise ValueError unless verification from the exit computes these residual streams."""
    if not layers or not all(exit_layer <= layer <= decoder.depth for layer in layers):
        raise ValueError(
            f"feature_layers must be in [{exit_layer}, {decoder.depth}], got {list(layers)}; "
            "verification resumes at the exit and computes nothing below it"
        )


def check_distinct(heads: Sequence[ExitHead]) -> None:
    """Raise ValueError if two heads have the same kind and exit layer, TypeError for no heads."""
    if not isinstance(heads, Sequence):
        raise TypeError(f"heads are a list of exit heads, got a {type(heads).__name__}")
    for index, head in enumerate(heads):
        if not isinstance(head, ExitHead):
            raise TypeError(
                f"a head is an ExitHead, got {type(head).__name__}; load_heads reads a folder"
            )
        if any((h.kind, h.exit_layer) == (head.kind, head.exit_layer) for h in heads[:index]):
            raise ValueError(
                f"two heads of kind {head.kind!r} at exit_layer {head.exit_layer}; "
                "give each exit one head of a kind"
            )


# Parts that heads take from their target


def copy_final_norm(decoder: Decoder) -> nn.Module:
    """A copy of the target's final norm.

    Raises:
        ValueError: the target has none, or its LM head does not read the norm's output.
    """
    check_lm_head_input(decoder)
    if decoder.final_norm is None:
        name = type(decoder.causal_lm).__name__
        raise ValueError(f"{name} has no final norm to start an exit head from")
    return decoder.copy(decoder.final_norm)


def move_to_exit(module: ModuleT, decoder: Decoder, exit_layer: int) -> ModuleT:
    """New modules on the device of the exit, in the dtype of the target's final norm."""
    norm = decoder.final_norm
    parameters = iter(()) if norm is None else norm.parameters()
    like = next(parameters, torch.empty(0, dtype=decoder.dtype))
    return module.to(decoder.device_at(exit_layer), like.dtype)


@torch.no_grad()
def trimmed_lm_head(decoder: Decoder, vocab_ids: Tensor) -> nn.Linear:
    """A linear layer with the rows of the target's LM head for `vocab_ids`.

    Raises:
        ValueError: the rows cannot be taken, or the LM head does not read the final norm's output.
    """
    check_lm_head_input(decoder)
    weight = decoder.lm_head_weight
    bias = None if decoder.lm_head.bias is None else weight_of(decoder.lm_head, "bias")
    ids = vocab_ids.to(weight.device)
    # On the meta device, so that no weights are allocated and drawn only to be replaced.
    trimmed = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    trimmed.weight = nn.Parameter(weight[ids], requires_grad=False)
    if bias is not None:
        trimmed.bias = nn.Parameter(bias[ids], requires_grad=False)
    return trimmed


def check_lm_head_input(decoder: Decoder) -> None:
    """Raise ValueError if there is a projection in front of the LM head, as in small OPTs."""
    width = decoder.config.hidden_size
    reads = getattr(decoder.lm_head, "in_features", width)
    if reads != width:
        raise ValueError(
            f"{type(decoder.causal_lm).__name__} projects {width} to {reads} between its final "
            "norm and its LM head, which exit heads cannot; use head='shared', untrimmed"
        )


def is_plain_norm(norm: nn.Module | None) -> bool:
    """Whether a norm is an RMSNorm that multiplies by its weight (in Gemma it is 1 + weight)."""
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return False
    change = norm(torch.ones_like(weight)) - weight
    largest: float = change.abs().max().tolist()
    return largest < 0.02

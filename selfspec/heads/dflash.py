"""DFlash (2026): a block of drafts in one pass over features of the verified tokens.

Legend: rows = sequences of a batch; width = tokens of each; block = tokens of a block: the anchor,
which is the newest token, and masks; n = tokens that a head can draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from selfspec.config import JsonObject, Options, unknown_name
from selfspec.decoder import Decoder, Packing, device_of, is_quantized
from selfspec.heads.base import (
    ExitHead,
    check_feature_layers,
    check_lm_head_input,
    check_vocab_ids,
    is_plain_norm,
    move_to_exit,
    register_head,
)
from selfspec.heads.correction import MARKOV_TYPES, CandidateSelector, MarkovHead
from selfspec.heads.llama_layer import (
    Rotary,
    layer_config,
    layer_config_like,
    transformers_config,
)

Angles = tuple[Tensor, Tensor]  # cosines and sines of a rotary embedding


class Reach(NamedTuple):
    """Which keys a row of a block sees in a layer: all of them, if nothing is set.

    Attributes:
        window: the sliding window in tokens.
        from_anchor: whether the window is measured from the anchor, for all rows alike.
        causal: whether a row sees only those before it in the block.
    """

    window: int | None = None
    from_anchor: bool = False
    causal: bool = False

    @classmethod
    def of(cls, layer: int, options: Options) -> Reach:
        """The reach of a layer of a head with these options."""
        windows, causal = options["windows"], options["causal"]
        from_anchor = options["window_from_anchor"]
        return cls(windows[layer] if windows else None, from_anchor, bool(causal and causal[layer]))

    def sees(self, keys: Tensor, queries: Tensor, anchors: Tensor) -> Tensor:
        """Whether queries see keys, given the positions of both and of the block's anchor."""
        seen = torch.ones_like(keys + queries, dtype=torch.bool)
        if self.causal:
            seen = seen & (keys <= queries)
        if self.window is not None and self.from_anchor:
            seen = seen & (keys >= anchors - self.window)
        elif self.window is not None:
            seen = seen & ((keys - queries).abs() < self.window)
        return seen


class BlockConv(nn.Module):
    """A short causal convolution over a block, before and after a sublayer (DFlash2, z-lab 2026).

    Its kernels are learned ones plus what a projection of the sublayer's input adds to each group
    of channels.

    Args:
        width: channels.
        taps: tokens that it reads: itself and those before it.
        group: channels with a common addition.
    """

    def __init__(self, width: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input `[..., block, hidden]`, and what `finish` adds to its kernel."""
        added = self.kernel_projection(hidden)
        added = added.view(*hidden.shape[:-1], 2, self.taps, hidden.shape[-1] // self.group)
        before, after = added.repeat_interleave(self.group, dim=-1).unbind(-3)
        return self._convolve(hidden, before, 0), after

    def finish(self, hidden: Tensor, added: Tensor) -> Tensor:
        """The sublayer's output `[..., block, hidden]`, convolved."""
        return self._convolve(hidden, added, 1)

    def _convolve(self, hidden: Tensor, added: Tensor, which: int) -> Tensor:
        block, kernels = hidden.shape[-2], self.base_kernel[which] + added
        convolved = torch.zeros_like(hidden)
        for tap in range(self.taps):
            before = pad(hidden, (0, 0, tap, 0))[..., :block, :]
            convolved = convolved + kernels[..., tap, :] * before
        return convolved


class DFlashAttention(nn.Module):
    """Qwen3's attention, for queries of a block and keys of the block and of the context."""

    def __init__(self, config: Qwen3Config, biases: Sequence[str]):
        super().__init__()
        width, shared = config.hidden_size, config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = config.head_dim or width // config.num_attention_heads
        queries, keys = (count * self.head_dim for count in (config.num_attention_heads, shared))
        self.q_proj = nn.Linear(width, queries, bias="self_attn.q_proj" in biases)
        self.k_proj = nn.Linear(width, keys, bias="self_attn.k_proj" in biases)
        self.v_proj = nn.Linear(width, keys, bias="self_attn.v_proj" in biases)
        self.o_proj = nn.Linear(queries, width, bias="self_attn.o_proj" in biases)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)

    def queries(self, states: Tensor, angles: Angles) -> Tensor:
        """`[rows, heads, width, head_dim]` the queries of `states`."""
        queries = self.q_norm(self._heads(self.q_proj(states)))
        return apply_rotary_pos_emb(queries, queries, *angles)[0]

    def keys_values(self, states: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """`[rows, key heads, width, head_dim]` the keys and values of `states`."""
        keys = self.k_norm(self._heads(self.k_proj(states)))
        return apply_rotary_pos_emb(keys, keys, *angles)[1], self._heads(self.v_proj(states))

    def joined(self, attended: Tensor) -> Tensor:
        """`[rows, width, hidden]` the output, from that of all heads."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DFlashLayer(nn.Module):
    """A decoder layer over a block, whose attention also sees the context.

    Args:
        config: the layer's config.
        biases: the linear maps with a bias.
        index: index of the cache's layer that holds its keys and values.
        reach: which keys it sees.
        taps: tokens that the convolutions around its sublayers read; 0 for no convolutions.
        group: channels that share what is added to their kernels.
    """

    def __init__(
        self,
        config: Qwen3Config,
        biases: Sequence[str],
        index: int,
        reach: Reach,
        taps: int,
        group: int,
    ):
        super().__init__()
        self.index, self.reach, width = index, reach, config.hidden_size
        self.self_attn = DFlashAttention(config, biases)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.attention_conv = BlockConv(width, taps, group) if taps else None
        self.mlp_conv = BlockConv(width, taps, group) if taps else None

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """What attention reads `[..., block, hidden]`, and what `leave` needs."""
        return _prepared(self.attention_conv, self.input_layernorm(hidden))

    def leave(self, hidden: Tensor, attended: Tensor, added: Tensor | None) -> Tensor:
        """The layer's output `[..., block, hidden]` from its input and that of its attention."""
        hidden = hidden + _finished(self.attention_conv, attended, added)
        read, added = _prepared(self.mlp_conv, self.post_attention_layernorm(hidden))
        return hidden + _finished(self.mlp_conv, self.mlp(read), added)


def _prepared(conv: BlockConv | None, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    return (hidden, None) if conv is None else conv.prepare(hidden)


def _finished(conv: BlockConv | None, hidden: Tensor, added: Tensor | None) -> Tensor:
    return hidden if conv is None or added is None else conv.finish(hidden, added)


@register_head
class DFlashHead(ExitHead):
    """A DFlash head, with what DSpark and DFlash2 add to it.

    The residual streams at `feature_layers` of every verified token are mapped to one state, from
    which all layers of the head make the token's keys and values. A block of the newest token, the
    anchor, and masks runs over these and over itself. Its row k, if `sample_from_anchor`, drafts
    the token after its own position; otherwise it drafts the token at its own position, and the
    anchor's row drafts nothing. The LM head and the embeddings are the target's, as they are,
    without what the target does before and after; or the head's own.

    Args:
        decoder: the target.
        options: what `options` returns.
    """

    kind = "dflash"
    lowest_exit = highest_exit = 0
    skips_first = True

    def __init__(self, decoder: Decoder, options: Options):
        super().__init__(0)
        self._options = dict(options)
        width: int = decoder.config.hidden_size
        made, biases = transformers_config(options["layer"]), options["layer"]["biases"]
        self.width, self.drafts_at_once = width, True
        self.feature_layers = tuple(self._options["feature_layers"])
        self.block_size: int = self._options["block_size"]
        self.mask_token: int = self._options["mask_token"]
        self.first_row = 0 if self._options["sample_from_anchor"] else 1
        self.longest = self.block_size - self.first_row
        taps, group = self._options["conv_kernel_size"], self._options["conv_group_size"]
        self.layer = nn.ModuleList(
            DFlashLayer(made, biases, index, Reach.of(index, options), taps, group)
            for index in range(self._options["num_hidden_layers"])
        )
        self.rotary = Rotary(made)
        self.fc = nn.Linear(len(self.feature_layers) * width, width, bias=False)
        self.hidden_norm = LlamaRMSNorm(width, made.rms_norm_eps)
        self.norm = LlamaRMSNorm(width, made.rms_norm_eps)
        tokens, drafts = self._options["embedding"], self._options["vocabulary"]
        self.embed_tokens = nn.Embedding(tokens, width) if tokens else None
        self.readout = nn.Linear(width, drafts, bias=False) if drafts else None
        vocab = decoder.vocab_size
        self.markov_head = _markov_head(options, width, vocab, drafts or vocab)
        self.candidate_selector = _candidate_selector(options, width, vocab)
        self.confidence = _confidence(options, width)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int = 0, **options: Any) -> DFlashHead:
        """An untrained head; where the shapes allow it, its layers start from the target's.

        The options are those of published configs: `layer` (the config of its layers, of Qwen3's
        architecture; default: the target's sizes), `num_hidden_layers` (1), `feature_layers`
        (residual streams by the number of layers below; default 2, half and three before the last),
        `block_size` (8), `mask_token` (default: the last of the vocabulary), `sample_from_anchor`,
        and the rows of an `embedding` and an LM head (`vocabulary`) of its own (0: the target's).

        Of layers with a sliding window: `windows` (one for each layer, or `None`),
        `window_from_anchor` and `causal` (see `Reach`). Factors: `embedding_scale`,
        `output_multiplier`, `softcap`. DSpark: `markov` (rank of the bias), `markov_type`,
        `confidence`, `confidence_with_markov`. DFlash2: `conv_kernel_size`, `conv_group_size`,
        `selector_rank`, `selector_top_k`; 0 for none.

        Raises:
            ValueError: `exit_layer` is not 0, or an option does not fit.
        """
        cls.check_exit(decoder, exit_layer)
        check_lm_head_input(decoder)
        defaults = _defaults(decoder)
        chosen = defaults | {name: options[name] for name in options if name in defaults}
        chosen["layer"] = layer_config({**chosen["layer"], "model_type": "qwen3"})
        _check_options(decoder, chosen)
        head = move_to_exit(cls(decoder, chosen), decoder, exit_layer)
        _start_from(head, decoder)
        return head

    @property
    def options(self) -> JsonObject:
        """The options of `build`."""
        return {**self._options, "feature_layers": list(self.feature_layers)}

    @property
    def lm_head(self) -> nn.Module | None:
        """The head's own LM head, the trimmed one, or `None` where the target's is used."""
        return super().lm_head if self.readout is None else self.readout

    def trim(self, decoder: Decoder, vocab_ids: Tensor) -> None:
        """Draft only these tokens, in rising order; an LM head of its own has their rows."""
        if self.readout is None:
            super().trim(decoder, vocab_ids)
            if self.markov_head is not None:
                self.markov_head.trim(vocab_ids)
            return
        check_vocab_ids(decoder, vocab_ids)
        rows = self.readout.out_features
        if len(vocab_ids) != rows:
            raise ValueError(f"the head's LM head has {rows} rows, got {len(vocab_ids)} tokens")
        self.vocab_ids = vocab_ids.to(self.readout.weight.device, torch.long)

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head, with its feature layers and vocabulary, fits."""
        super().check(decoder)
        check_feature_layers(decoder, self.feature_layers, 0)
        own = self.readout
        if own is not None and self.vocab_ids is None and own.out_features != decoder.vocab_size:
            raise ValueError(
                f"the head's LM head has {own.out_features} rows and no list of their tokens; the "
                f"target has {decoder.vocab_size} tokens"
            )

    # Input

    def embed(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        """The rows of the head's own embeddings, or of the target's without its own scale."""
        own = self.embed_tokens
        rows = decoder.embed(tokens, raw=True) if own is None else own(tokens)
        return rows.to(self.fc.weight) * self._options["embedding_scale"]

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """Map the residual streams to one state, from which all layers make keys and values."""
        weight = self.fc.weight
        return self.hidden_norm(self.fc(torch.cat([s.to(weight) for s in features], dim=-1)))

    # Output

    def forward(self, hidden: Tensor) -> Tensor:
        """The last layer's output after the head's norm."""
        return self.norm(hidden[..., : self.width])

    def logits(self, decoder: Decoder, hidden: Tensor, depth: int = 0) -> Tensor:
        """Draft logits, before they depend on the token before the draft."""
        normed, readout = self(hidden), self.lm_head or decoder.lm_head
        logits = readout(normed.to(device_of(readout))).to(decoder.device)
        logits = logits * self._options["output_multiplier"]
        cap = self._options["softcap"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def draft_logits(self, decoder: Decoder, hidden: Tensor, depth: int, tokens: Tensor) -> Tensor:
        """Logits of draft `depth` if the tokens before it are known."""
        logits, memory = self.logits(decoder, hidden), hidden[..., self.width :]
        corrected, _ = self.correct(logits, hidden, tokens, memory)
        assert corrected is not None
        return corrected

    def first_memory(self, anchors: Tensor, tokens: Tensor) -> Tensor:
        """`[rows, width, any]` the memory of `correct` before the first draft.

        Args:
            anchors: `[rows, width, hidden]` the last layer's output at the anchors.
            tokens: `[rows, width]` the anchors.
        """
        markov = self.markov_head
        rank = 0 if markov is None or markov.joint_proj is None else markov.rank
        memory = anchors.new_zeros((*tokens.shape, rank))
        return self.correct(None, anchors, tokens, memory)[1] if self.first_row else memory

    def correct(
        self, logits: Tensor | None, hidden: Tensor, tokens: Tensor, memory: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Make a draft depend on the token before it.

        Args:
            logits: `[rows, 1 or width, n]` logits of the draft; `None` if only the memory counts.
            hidden: `[rows, 1 or width, hidden]` the last layer's output that it was made from.
            tokens: `[rows, width]` the token before it.
            memory: `[rows, width, any]` of the drafts before it.

        Returns:
            The logits `[rows, width, n]`, and the memory for the next draft.
        """
        markov, selector = self.markov_head, self.candidate_selector
        if markov is not None and (logits is not None or markov.joint_proj is not None):
            bias, memory = markov(self(hidden), tokens, memory)
            return (None if logits is None else logits + bias.to(logits)), memory
        if logits is None:
            return None, memory
        if selector is not None:
            return selector(logits, self(hidden), tokens, self.vocab_ids), memory
        return logits.expand(-1, tokens.shape[1], -1), memory

    def acceptance_odds(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Log odds `[rows, width]` that a sampled draft is accepted; they train nothing else."""
        assert self.confidence is not None
        read = self(hidden).detach()
        if self.markov_head is not None and self._options["confidence_with_markov"]:
            code = self.markov_head.markov_w1(tokens).detach()
            read = torch.cat([read.to(code).expand(*code.shape[:-1], -1), code], dim=-1)
        return self.confidence(read)[..., 0]


class DFlashRunner:
    """Runs the layers of a head over blocks, whose attention also sees the context.

    The context is what `fuse_features` makes of the tokens before a block.

    Args:
        decoder: the target.
        head: the head.
    """

    def __init__(self, decoder: Decoder, head: DFlashHead):
        self._decoder, self._head, self._layers = decoder, head, _layers(head)

    def remember(self, context: Tensor, positions: Tensor, cache: Cache) -> None:
        """Store keys and values of verified tokens.

        Args:
            context: `[rows, width, hidden]` what `fuse_features` made of their features.
            positions: `[rows, width]` their positions.
            cache: takes them, at the index of each layer.
        """
        angles = self._head.rotary(context, positions)
        for layer in self._layers:
            cache.update(*layer.self_attn.keys_values(context, angles), layer.index)

    def run(self, anchors: Tensor, positions: Tensor, first: Tensor, cache: Cache) -> Tensor:
        """Run the layers over one block in each row.

        Args:
            anchors: `[rows, 1]` the newest token.
            positions: `[rows, block]` positions of the block.
            first: `[rows]` the first position that the context has keys for.
            cache: keys and values of the context, by position; takes those of the block.

        Returns:
            `[rows, block, hidden]` the last layer's output.
        """
        hidden = self._head.embed(self._decoder, self._blocks(anchors)[:, 0])
        angles = self._head.rotary(hidden, positions)
        masks: dict[Reach, Tensor] = {}
        for layer in self._layers:
            attention = layer.self_attn
            read, added = layer.enter(hidden)
            keys, values = cache.update(*attention.keys_values(read, angles), layer.index)
            if layer.reach not in masks:
                masks[layer.reach] = _mask(layer.reach, positions, first, keys.shape[2])
            attended = scaled_dot_product_attention(
                attention.queries(read, angles),
                keys,
                values,
                attn_mask=masks[layer.reach].to(read.device),
                enable_gqa=True,
            )
            hidden = layer.leave(hidden, attention.joined(attended), added)
        return hidden

    def run_packed(self, context: Tensor, packing: Packing, tokens: Tensor) -> Tensor:
        """Run the layers over the block of every token, all blocks at the same time.

        Args:
            context: `[rows, width, hidden]` what `fuse_features` made for all tokens.
            packing: which tokens are of one document.
            tokens: `[rows, width]` the tokens, each the anchor of a block.

        Returns:
            `[rows, width, block, hidden]` the last layer's output.
        """
        block = self._head.block_size
        hidden = self._head.embed(self._decoder, self._blocks(tokens))
        anchors = packing.positions[..., None]
        positions = anchors + torch.arange(block, device=tokens.device)
        of_context = self._head.rotary(context, packing.positions)
        of_blocks = self._head.rotary(hidden, positions.flatten(1))
        same = packing.documents[:, :, None] == packing.documents[:, None]
        known = (same & (packing.positions[:, None] < anchors))[:, :, None]
        for layer in self._layers:
            attention, reach = layer.self_attn, layer.reach
            read, added = layer.enter(hidden)
            keys, values = attention.keys_values(context, of_context)
            own_keys, own_values = attention.keys_values(read.flatten(1, 2), of_blocks)
            queries = attention.queries(read.flatten(1, 2), of_blocks)
            attended = _attend(
                queries,
                (
                    keys,
                    values,
                    known
                    & reach.sees(
                        keys=packing.positions[:, None, None],
                        queries=positions[..., None],
                        anchors=anchors[..., None],
                    ),
                ),
                (
                    own_keys,
                    own_values,
                    reach.sees(positions[:, :, None], positions[..., None], anchors[..., None]),
                ),
                block,
            )
            attended = attention.joined(attended).unflatten(1, (-1, block))
            hidden = layer.leave(hidden, attended, added)
        return hidden

    def _blocks(self, tokens: Tensor) -> Tensor:
        """`[rows, width, block]` a token and masks after it."""
        head = self._head
        masks = tokens[..., None].new_full((*tokens.shape, head.block_size - 1), head.mask_token)
        return torch.cat([tokens[..., None], masks], dim=-1)


def _layers(head: DFlashHead) -> list[DFlashLayer]:
    return list(head.layer)  # pyright: ignore


def _mask(reach: Reach, positions: Tensor, first: Tensor, end: int) -> Tensor:
    """`[rows, 1, block, end]` whether rows of a block see the keys in the slots 0 to `end` - 1."""
    slots = torch.arange(end, device=positions.device)
    anchors, last = positions[:, :1, None], positions[:, -1:, None]
    seen = reach.sees(slots, positions[..., None], anchors)
    return (seen & (slots <= last) & (slots >= first[:, None, None]))[:, None]


def _attend(
    queries: Tensor,
    context: tuple[Tensor, Tensor, Tensor],
    own: tuple[Tensor, Tensor, Tensor],
    block: int,
) -> Tensor:
    """Attention of a block at every token over the context before it and over itself.

    Args:
        queries: `[rows, heads, width * block, head_dim]`.
        context: keys and values `[rows, key heads, width, head_dim]`, and
            `[rows, width, block, width]` which of them each query sees.
        own: keys and values `[rows, key heads, width * block, head_dim]` of the blocks, and
            `[rows, width, block, block]` which of their own block's they see.
        block: rows of a block.

    Returns:
        `[rows, heads, width * block, head_dim]`.
    """
    keys, values, seen = context
    groups = queries.shape[1] // keys.shape[1]
    split = queries.unflatten(2, (-1, block)) * queries.shape[-1] ** -0.5
    keys, values, *mine = (x.repeat_interleave(groups, 1) for x in (keys, values, *own[:2]))
    own_keys, own_values = (x.unflatten(2, (-1, block)) for x in mine)
    scores = torch.cat(
        [torch.einsum("bhwqd,bhkd->bhwqk", split, keys), split @ own_keys.transpose(-1, -2)], -1
    )
    visible = torch.cat([seen.expand(*seen.shape[:2], block, -1), own[2]], dim=-1)[:, None]
    probs = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    of_context, of_own = probs.split([keys.shape[2], block], dim=-1)
    attended = torch.einsum("bhwqk,bhkd->bhwqd", of_context, values) + of_own @ own_values
    return attended.flatten(2, 3)


# Making a head


def _markov_head(options: Options, width: int, tokens: int, drafts: int) -> MarkovHead | None:
    rank = options["markov"]
    return MarkovHead(options["markov_type"], rank, width, tokens, drafts) if rank else None


def _candidate_selector(options: Options, width: int, tokens: int) -> CandidateSelector | None:
    rank = options["selector_rank"]
    return CandidateSelector(rank, width, tokens, options["selector_top_k"]) if rank else None


def _confidence(options: Options, width: int) -> nn.Linear | None:
    reads_token = options["markov"] if options["confidence_with_markov"] else 0
    return nn.Linear(width + reads_token, 1) if options["confidence"] else None


@torch.no_grad()
def _start_from(head: DFlashHead, decoder: Decoder) -> None:
    """Copy what fits of the target's last layer with attention, and its last hidden state."""
    without = decoder.device.type == "meta"
    if without or any(is_quantized(weight) for weight in decoder.layers.parameters()):
        return
    final = None if decoder.final_norm is None else decoder.copy(decoder.final_norm)
    at = decoder.attention_layers[-1] if decoder.attention_layers else -1
    source = dict(decoder.copy(decoder.layers[at]).named_parameters())
    for layer in _layers(head):
        for name, weight in layer.named_parameters():
            found = source.get(name)
            plain = "norm" not in name or is_plain_norm(final)
            if plain and found is not None and found.shape == weight.shape:
                weight.copy_(found)
    if final is not None and is_plain_norm(final):
        head.norm.weight.copy_(final.weight)  # pyright: ignore
    head.fc.weight.zero_()
    head.fc.weight[:, -head.fc.out_features :].fill_diagonal_(1)


# Options


def _defaults(decoder: Decoder) -> JsonObject:
    depth = decoder.depth
    return {
        "layer": layer_config_like(decoder),
        "num_hidden_layers": 1,
        "feature_layers": sorted({min(2, depth - 1), depth // 2, max(1, depth - 3)}),
        "block_size": 8,
        "mask_token": decoder.vocab_size - 1,
        "sample_from_anchor": False,
        "embedding": 0,
        "vocabulary": 0,
        "windows": [],
        "window_from_anchor": False,
        "causal": [],
        "embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "softcap": None,
        "markov": 0,
        "markov_type": "vanilla",
        "confidence": False,
        "confidence_with_markov": False,
        "conv_kernel_size": 0,
        "conv_group_size": 16,
        "selector_rank": 0,
        "selector_top_k": 16,
    }


def _check_options(decoder: Decoder, options: Options) -> None:
    """Raise ValueError, naming the option, unless they fit the target and one another."""
    width, count = options["layer"]["hidden_size"], options["num_hidden_layers"]
    check_feature_layers(decoder, options["feature_layers"], 0)
    if width != decoder.config.hidden_size:
        raise ValueError(
            f"a dflash head of width {width} does not fit a target of width "
            f"{decoder.config.hidden_size}, whose hidden states it reads"
        )
    shortest = 1 if options["sample_from_anchor"] else 2
    limits: Sequence[tuple[str, int, int]] = (
        ("num_hidden_layers", 1, 1_000),
        ("block_size", shortest, 10_000),
        ("mask_token", 0, (options["embedding"] or decoder.vocab_size) - 1),
        ("markov", 0, 1_000_000),
        ("conv_kernel_size", 0, options["block_size"]),
        ("selector_rank", 0, 1_000_000),
        ("selector_top_k", 1, decoder.vocab_size),
    )
    for name, least, most in limits:
        if name == "selector_top_k" and not options["selector_rank"]:
            continue
        if type(options[name]) is not int or not least <= options[name] <= most:
            raise ValueError(f"{name} must be in [{least}, {most}], got {options[name]!r}")
    for name in ("windows", "causal"):
        if len(options[name]) not in (0, count):
            raise ValueError(f"{name} must have one entry for each of {count} layers")
    for window in options["windows"]:
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"windows must hold whole numbers >= 1 or null, got {window!r}")
    group = options["conv_group_size"]
    if options["conv_kernel_size"] and (group < 1 or width % group):
        raise ValueError(
            f"conv_group_size must divide the width {width}, got {options['conv_group_size']}"
        )
    if options["markov_type"] not in MARKOV_TYPES:
        raise ValueError(unknown_name("markov_type", options["markov_type"], MARKOV_TYPES))
    if options["markov"] and options["selector_rank"]:
        raise ValueError("a dflash head has a Markov bias or a selector, not both")
    if options["confidence_with_markov"] and not options["markov"]:
        raise ValueError("confidence_with_markov=True reads the Markov code; set markov, its rank")

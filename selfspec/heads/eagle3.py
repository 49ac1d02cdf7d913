"""EAGLE-3 (Li et al. 2025): a layer that reads a token and three hidden states of the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from selfspec.config import JsonObject, Options
from selfspec.decoder import Decoder, is_quantized
from selfspec.heads.base import (
    ExitHead,
    check_feature_layers,
    check_lm_head_input,
    check_vocab_ids,
    is_plain_norm,
    move_to_exit,
    register_head,
)
from selfspec.heads.llama_layer import LlamaLayer, layer_config, layer_config_like
from selfspec.heads.mask import MaskHidden


class DecoderLayer(LlamaLayer):
    """A plain decoder layer, as the layers of a head after its first one."""

    def __init__(self, config: Options, place: int):
        super().__init__(config, place)
        self.input_layernorm = LlamaRMSNorm(self.width, config["rms_norm_eps"])

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Output `[rows, width, hidden]` for an input of the same shape."""
        normed = self.input_layernorm(hidden)
        return self.attend(normed, hidden, attention_mask, position_ids, past_key_values)


class Eagle3Layer(LlamaLayer):
    """The layer of an EAGLE-3 head: attention reads the token's embedding beside the features.

    Plain layers may follow it.

    Args:
        config: what `layer_config` returns.
        place: index of the cache's layer that it writes.
        norm_before_residual: whether the residual stream starts from the normed features.
        norm_output: whether the output is normed, and so fed back.
        depth: number of layers, this one and the plain ones after it.
    """

    def __init__(
        self,
        config: Options,
        place: int,
        norm_before_residual: bool = False,
        norm_output: bool = False,
        depth: int = 1,
    ):
        super().__init__(config, place, inputs=2)
        rest = (DecoderLayer(config, place + i) for i in range(1, depth))
        self.depth, self.rest = depth, nn.ModuleList(rest)
        self.norm_before_residual = norm_before_residual
        eps = config["rms_norm_eps"]
        self.input_layernorm = LlamaRMSNorm(self.width, eps)
        self.hidden_norm = LlamaRMSNorm(self.width, eps)
        self.norm = LlamaRMSNorm(self.width, eps) if norm_output else None

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Output `[rows, width, hidden]` for `[rows, width, 2 hidden]` embeddings and features."""
        embedded, features = hidden.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        read = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        output = self.attend(read, residual, attention_mask, position_ids, past_key_values)
        for layer in self.rest:
            output = layer(output, attention_mask, position_ids, past_key_values)
        return output if self.norm is None else self.norm(output)


@register_head
class Eagle3Head(ExitHead):
    """An EAGLE-3 head, as EAGLE, SpecForge and speculators publish them and engines serve them.

    The token at position t enters the layer with its embedding and g(t-1). At a verified position
    g fuses the residual streams at `feature_layers`; at a drafted position it is the output of the
    head's own layer. The LM head, over a draft vocabulary, and the embeddings may be the head's own
    or the target's.

    A parallel head (P-EAGLE, Hui et al. 2026) makes all drafts of a round in one pass. For every
    draft after the first it reads a mask, which has the embedding of an unused token and learned
    hidden states in place of the target's.

    Args:
        exit_layer: 0, the embeddings.
        decoder: the target.
        options: what `options` returns.
    """

    kind = "eagle3"
    lowest_exit = highest_exit = 0
    skips_first = True

    def __init__(self, exit_layer: int, decoder: Decoder, options: Options):
        super().__init__(exit_layer)
        self._options = dict(options)
        config = self._options["layer"]
        self.feature_layers = tuple(self._options["feature_layers"])
        target_width: int = decoder.config.hidden_size
        self.width, self.place = target_width, decoder.depth - 1
        width, streams = config["hidden_size"], len(self.feature_layers)
        eps, output_normed = config["rms_norm_eps"], self._options["norm_output"]
        before = self._options["norm_before_residual"]
        count = self._options["num_hidden_layers"]
        self.layer = Eagle3Layer(config, self.place, before, output_normed, count)
        self.fc = nn.Linear(streams * target_width, width, bias=False)
        if self._options["parallel"]:
            self.mask = MaskHidden(self._options["mask_token"], streams * target_width)
            self.drafts_at_once = True
        joined, each = self._options["norm_before_fc"], self._options["fc_norm"]
        self.input_norm = LlamaRMSNorm(streams * target_width, eps) if joined else None
        norms = (LlamaRMSNorm(target_width, eps) for _ in self.feature_layers)
        self.fc_norm = nn.ModuleList(norms) if each else None
        self.norm = None if output_normed else LlamaRMSNorm(width, eps)
        tokens, drafts = self._options["embedding"], self._options["vocabulary"]
        self.embed_tokens = nn.Embedding(tokens, width) if tokens else None
        self.readout = nn.Linear(width, drafts, bias=False) if drafts else None

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int = 0, **options: Any) -> Eagle3Head:
        """An untrained head; where the shapes allow it, its layer starts from the target's layers.

        The options are those of published configs: `layer` (the layer's config; default: the
        target's sizes), `feature_layers` (residual streams by the number of layers below; default
        2, half and three before the last), `num_hidden_layers` (1), `norm_before_residual`,
        `norm_before_fc`, `fc_norm`, `norm_output`, the rows of an `embedding` and an LM head
        (`vocabulary`) of its own (0: the target's), and `raw_embedding` (whether the target's rows
        are read as they are stored, as engines do for published heads, or scaled if the target
        scales them; default: False). With `parallel` the head makes all drafts of a round in one
        pass; its `mask_token` (default: the last of the vocabulary) should be one that no text has.

        Raises:
            ValueError: `exit_layer` is not 0, or an option does not fit.
        """
        cls.check_exit(decoder, exit_layer)
        depth = decoder.depth
        defaults: JsonObject = {
            "layer": layer_config_like(decoder),
            "feature_layers": sorted({min(2, depth - 1), depth // 2, max(1, depth - 3)}),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embedding": 0,
            "raw_embedding": False,
            "vocabulary": 0,
            "num_hidden_layers": 1,
            "parallel": False,
            "mask_token": decoder.vocab_size - 1,
        }
        chosen = defaults | {name: options[name] for name in options if name in defaults}
        chosen["layer"] = layer_config(chosen["layer"])
        check_feature_layers(decoder, chosen["feature_layers"], exit_layer)
        _check_counts(decoder, chosen)
        width, of_target = chosen["layer"]["hidden_size"], decoder.config.hidden_size
        if not (chosen["embedding"] and chosen["vocabulary"]):
            check_lm_head_input(decoder)
            if width != of_target:
                raise ValueError(
                    f"an {cls.kind} head of width {width} needs embeddings and an LM head of its "
                    f"own beside a target of width {of_target}"
                )
        head = move_to_exit(cls(exit_layer, decoder, chosen), decoder, exit_layer)
        head._start_from(decoder)
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
            return super().trim(decoder, vocab_ids)
        check_vocab_ids(decoder, vocab_ids)
        rows = self.readout.out_features
        if len(vocab_ids) != rows:
            raise ValueError(f"the head's LM head has {rows} rows, got {len(vocab_ids)} tokens")
        self.vocab_ids = vocab_ids.to(self.readout.weight.device, torch.long)

    def check(self, decoder: Decoder) -> None:
        """Raise ValueError unless the head, with its feature layers and vocabulary, fits."""
        super().check(decoder)
        check_feature_layers(decoder, self.feature_layers, self.exit_layer)
        own = self.readout
        if own is not None and self.vocab_ids is None and own.out_features != decoder.vocab_size:
            raise ValueError(
                f"the head's LM head has {own.out_features} rows and no list of their tokens; the "
                f"target has {decoder.vocab_size} tokens"
            )

    def embed(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        """The head's own embeddings, or the target's."""
        if self.embed_tokens is None:
            return decoder.embed(tokens, raw=self._options["raw_embedding"])
        return self.embed_tokens(tokens)

    def mask_inputs(self, decoder: Decoder) -> tuple[Tensor, Tensor]:
        """The mask token's embedding, and its hidden states fused as the target's are."""
        assert isinstance(self.mask, MaskHidden)
        hidden = self.mask.hidden
        token = torch.tensor([self.mask.token], device=hidden.device)
        return self.embed(decoder, token)[0], self.fuse_features(
            list(hidden.chunk(len(self.feature_layers)))
        )

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """Map the residual streams to one state, normed before if the head asks for it."""
        weight = self.fc.weight
        streams = [states.to(weight) for states in features]
        if self.fc_norm is not None:
            streams = [norm(s) for norm, s in zip(self.fc_norm, streams, strict=True)]
        joined = torch.cat(streams, dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """`[rows, width, 2 hidden]` embeddings beside features."""
        assert features is not None
        return torch.cat([hidden.to(features), features], dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output after the head's norm."""
        return hidden if self.norm is None else self.norm(hidden)

    def logits(self, decoder: Decoder, hidden: Tensor, depth: int = 0) -> Tensor:
        """Draft logits; an LM head of its own is used as it is, without the target's scaling."""
        if self.readout is None:
            return super().logits(decoder, hidden)
        return self.readout(self(hidden))

    @torch.no_grad()
    def _start_from(self, decoder: Decoder) -> None:
        """Copy what fits of the target's first and last layer with attention.

        The last layer's weights read the features, the first one's the embedding, and the features
        start as the last of their streams. From there training needs fewer steps than from random
        weights.
        """
        without = decoder.device.type == "meta"
        if without or any(is_quantized(weight) for weight in decoder.layers.parameters()):
            return
        ends = (
            [decoder.attention_layers[i] for i in (0, -1)] if decoder.attention_layers else (0, -1)
        )
        first, last = (dict(decoder.copy(decoder.layers[i]).named_parameters()) for i in ends)
        final = None if decoder.final_norm is None else decoder.copy(decoder.final_norm)
        plain_norms = is_plain_norm(final)
        assert isinstance(self.layer, Eagle3Layer)
        for name, weight in self.layer.named_parameters():
            layer = first if name.startswith("input_layernorm") else last
            source = layer.get(name.replace("hidden_norm", "input_layernorm"))
            if source is None or ("norm" in name and not plain_norms):
                continue
            if (
                source.ndim == 2
                and name in first
                and weight.shape == (source.shape[0], 2 * source.shape[1])
            ):
                source = torch.cat([first[name].to(source.device), source], dim=1)
            if source.shape == weight.shape:
                weight.copy_(source)
        for further in self.layer.rest:  # which add nothing at first
            assert isinstance(further, DecoderLayer)
            further.self_attn.o_proj.weight.zero_()
            further.mlp.down_proj.weight.zero_()
        own = self.layer.norm if self.norm is None else self.norm
        if plain_norms and own is not None and len(own.weight) == self.width:
            own.weight.copy_(final.weight)  # pyright: ignore
        width = self.fc.out_features
        if width == self.width:
            self.fc.weight.zero_()
            self.fc.weight[:, -width:].fill_diagonal_(1)


def _check_counts(decoder: Decoder, options: Options) -> None:
    """Raise ValueError, naming the option, for a number that does not fit the target."""
    count, token = options["num_hidden_layers"], options["mask_token"]
    if options["embedding"] not in (0, decoder.vocab_size):
        raise ValueError(
            f"embedding must be 0, for the target's, or the target's {decoder.vocab_size} tokens, "
            f"got {options['embedding']!r}"
        )
    rows = options["vocabulary"]
    if type(rows) is not int or not 0 <= rows <= decoder.vocab_size:
        raise ValueError(f"vocabulary must be in [0, {decoder.vocab_size}], got {rows!r}")
    if count < 1:
        raise ValueError(f"num_hidden_layers must be at least 1, got {count}")
    tokens = options["embedding"] or decoder.vocab_size
    if options["parallel"] and not 0 <= token < tokens:
        raise ValueError(f"mask_token must be a token id in [0, {tokens - 1}], got {token}")

"""EAGLE and EAGLE-2 (Li et al. 2024): a layer that reads a token and the target's last state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from selfspec.config import JsonObject, Options
from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead, check_lm_head_input, move_to_exit, register_head
from selfspec.heads.llama_layer import LlamaLayer, layer_config, layer_config_like


class EagleLayer(LlamaLayer):
    """A decoder layer without a norm in front of its attention."""

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Output `[rows, width, hidden]` for an input of the same shape."""
        return self.attend(hidden, hidden, attention_mask, position_ids, past_key_values)


@register_head
class EagleHead(ExitHead):
    """A head of EAGLE or EAGLE-2, which differ only in how drafts become a tree.

    The token at position t enters the layer as W [e(t), h(t-1)] + b. At a verified position h is
    the target's output after its final norm; at a drafted position it is the output of the head's
    own layer, from which the target's LM head also makes the logits.

    Args:
        exit_layer: 0, the embeddings.
        decoder: the target.
        layer: the layer's config.
        bias: whether the map has a bias.
        embedding: rows of an embedding of the head's own; 0 for the target's.
        raw_embedding: whether the target's rows are read as they are stored, as engines do for
            published heads, or scaled if the target scales them (Gemma).
    """

    kind = "eagle"
    lowest_exit = highest_exit = 0
    skips_first = True

    def __init__(
        self,
        exit_layer: int,
        decoder: Decoder,
        layer: Options,
        bias: bool,
        embedding: int,
        raw_embedding: bool,
    ):
        super().__init__(exit_layer)
        width: int = decoder.config.hidden_size
        self.width, self.place = width, decoder.depth - 1
        self.feature_layers = (decoder.depth,)
        self._config, self._raw_embedding = dict(layer), raw_embedding
        self.layer = EagleLayer(layer, self.place)
        self.fc = nn.Linear(2 * width, width, bias=bias)
        self.embed_tokens = nn.Embedding(embedding, width) if embedding else None
        # In a tuple, because it stays a part of the target.
        self._final_norm = (decoder.final_norm or nn.Identity(),)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int = 0, **options: Any) -> EagleHead:
        """An untrained head.

        The options are `layer` (the layer's config; default: the target's sizes), `bias`, the rows
        of an `embedding` of its own, and `raw_embedding` (default: False).

        Raises:
            ValueError: `exit_layer` is not 0, or the layer's width is not the target's.
        """
        cls.check_exit(decoder, exit_layer)
        check_lm_head_input(decoder)
        config = layer_config(options.get("layer") or layer_config_like(decoder))
        if config["hidden_size"] != decoder.config.hidden_size:
            raise ValueError(
                f"an {cls.kind} head of width {config['hidden_size']} does not fit a target of "
                f"width {decoder.config.hidden_size}, whose LM head it uses"
            )
        bias, embedding = options.get("bias", True), options.get("embedding", 0)
        raw = options.get("raw_embedding", False)
        head = cls(exit_layer, decoder, config, bias, embedding, raw)
        return move_to_exit(head, decoder, exit_layer)

    @property
    def options(self) -> JsonObject:
        """The options of `build`."""
        embedding = 0 if self.embed_tokens is None else self.embed_tokens.num_embeddings
        return {
            "layer": self._config,
            "bias": self.fc.bias is not None,
            "embedding": embedding,
            "raw_embedding": self._raw_embedding,
        }

    def embed(self, decoder: Decoder, tokens: Tensor) -> Tensor:
        """The head's own embeddings, or the target's."""
        if self.embed_tokens is None:
            return decoder.embed(tokens, raw=self._raw_embedding)
        return self.embed_tokens(tokens)

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """The target's last hidden state after its final norm."""
        (last,) = features
        return self._final_norm[0](last)

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Embeddings and features mapped to one state."""
        assert features is not None
        features = features.to(self.fc.weight)
        return self.fc(torch.cat([hidden.to(features), features], dim=-1))

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output as it is."""
        return hidden

"""Multi-token prediction (DeepSeek-AI 2024): the drafting layer that a checkpoint ships with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from selfspec.config import JsonObject, Options
from selfspec.decoder import Decoder, find_layers, is_mixer
from selfspec.heads.base import ExitHead, copy_final_norm, move_to_exit, register_head


class MtpLayer(nn.Module):
    """A decoder layer of the target's class, followed by a norm.

    Args:
        block: the decoder layer.
        norm: the norm; its output is what the head is fed back.
    """

    def __init__(self, block: nn.Module, norm: nn.Module):
        super().__init__()
        self.block, self.norm = block, norm

    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> Tensor | tuple[object, ...]:
        """What the layer returns, its hidden states normed."""
        output = self.block(hidden_states, *args, **kwargs)
        if isinstance(output, tuple):
            return (self.norm(output[0]), *output[1:])
        return self.norm(output)


@register_head
class MtpHead(ExitHead):
    """The multi-token prediction layer of DeepSeek-V3, GLM-4.5, MiMo and others.

    The token at position t enters the layer as W [norm e(t), norm h(t-1)]. At a verified position h
    is the target's output after its final norm; at a drafted position it is the output of the
    layer, which so is used again for every draft, as in vLLM and SGLang.

    Args:
        exit_layer: 0, the embeddings.
        decoder: the target.
        options: what `options` returns.
    """

    kind = "mtp"
    lowest_exit = highest_exit = 0
    skips_first = True

    def __init__(self, exit_layer: int, decoder: Decoder, options: Options):
        super().__init__(exit_layer)
        self._options = dict(options)
        width: int = decoder.config.hidden_size
        self.width, self.place = width, _full_attention(decoder)
        self.feature_layers = (decoder.depth,)
        self.embedding_norm = copy_final_norm(decoder)
        self.hidden_norm = copy_final_norm(decoder)
        self.projection = nn.Linear(2 * width, width, bias=self._options["bias"])
        if not decoder.attention_layers:
            decoder.check_layer(self.place)
        block = one_layer(decoder, self._options["sparse"])
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = self.place  # pyright: ignore[reportArgumentType]
        norm = copy_final_norm(decoder) if self._options["norm"] else None
        feeds_norm = norm is not None and self._options["feeds_normed"]
        self.layer = MtpLayer(block, norm) if norm is not None and feeds_norm else block
        self.norm = None if feeds_norm else norm
        # In a tuple, because it stays a part of the target.
        self._final_norm = (decoder.final_norm or nn.Identity(),)

    @classmethod
    def build(cls, decoder: Decoder, exit_layer: int = 0, **options: object) -> MtpHead:
        """An untrained head.

        The options are `sparse` (whether the layer has experts; default: as the target's last),
        `hidden_first` (the order of the two inputs), `bias` of the projection, `norm` (whether
        there is one after the layer), and `feeds_normed` (whether its output is fed back).

        Raises:
            ValueError: `exit_layer` is not 0, or the target has no final norm.
        """
        cls.check_exit(decoder, exit_layer)
        experts = any("experts" in name for name, _ in decoder.layers[-1].named_modules())
        defaults = {
            "sparse": experts,
            "hidden_first": False,
            "bias": False,
            "norm": True,
            "feeds_normed": True,
        }
        chosen = defaults | {name: options[name] for name in options if name in defaults}
        return move_to_exit(cls(exit_layer, decoder, chosen), decoder, exit_layer)

    @property
    def options(self) -> JsonObject:
        """The options of `build`."""
        return dict(self._options)

    def fuse_features(self, features: list[Tensor]) -> Tensor:
        """The target's last hidden state after its final norm."""
        (last,) = features
        return self._final_norm[0](last)

    def enter(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """Normed embeddings and features, mapped to one state."""
        assert features is not None
        features = features.to(self.projection.weight)
        parts = [self.embedding_norm(hidden.to(features)), self.hidden_norm(features)]
        if self._options["hidden_first"]:
            parts.reverse()
        return self.projection(torch.cat(parts, dim=-1))

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output after the head's norm, unless the layer has normed it."""
        return hidden if self.norm is None else self.norm(hidden)


def _full_attention(decoder: Decoder) -> int:
    """Index of the last layer with full attention, or of the last with attention."""
    attending = decoder.attention_layers or [decoder.depth - 1]
    full = [index for index in attending if decoder.windows[index] is None]
    return (full or attending)[-1]


def one_layer(
    decoder: Decoder, sparse: bool, weights: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """A decoder layer of the target's family with full attention.

    Transformers builds a model of one layer, so that a checkpoint's tensors are converted as for
    the target's own layers (fused experts, for example).

    Args:
        decoder: the target.
        sparse: whether the layer has experts.
        weights: the layer's tensors by their names in a checkpoint; `None` for random ones.

    Raises:
        ValueError: tensors are missing, or belong to nothing in the layer.
    """
    causal_lm, config = decoder.causal_lm, copy.deepcopy(decoder.causal_lm.config)
    _shrink(config.get_text_config(decoder=True), decoder.depth, sparse)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would report that embeddings are missing
    try:
        if weights is None:
            model = type(causal_lm)._from_config(config, dtype=decoder.dtype)
        else:
            prefix = next(n for n, m in causal_lm.named_modules() if m is decoder.layers) + ".0."
            load: Any = type(causal_lm).from_pretrained
            model, report = load(
                None,
                config=config,
                state_dict={prefix + name: tensor for name, tensor in weights.items()},
                dtype=decoder.dtype,
                ignore_mismatched_sizes=True,  # they are named below
                output_loading_info=True,
            )
            missing = [n for n in report["missing_keys"] if n.startswith(prefix)]
            found = {
                "lacks": missing,
                "has unknown tensors": report["unexpected_keys"],
                "has tensors of another shape": map(str, report["mismatched_keys"]),
            }
            told = {what: sorted(names) for what, names in found.items()}
            faults = [f"{what} {names}" for what, names in told.items() if names]
            if faults:
                raise ValueError(f"its layer {', '.join(faults)}")
    finally:
        logging.set_verbosity(verbosity)
    _, _, layers = find_layers(model, 1)
    if any(map(is_mixer, layers.modules())):
        raise ValueError(
            f"the only layer of a {type(causal_lm).__name__} is recurrent, so that selfspec cannot "
            "build one with attention"
        )
    return layers[0].eval()


def _shrink(config: PreTrainedConfig, depth: int, sparse: bool) -> None:
    """Make this the config of a model of one layer and one token."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[-1:])
    kinds: dict[str, object] = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_interval": 1,
    }
    for name, value in kinds.items():
        if getattr(config, name, None) is not None and name in vars(config):
            setattr(config, name, value)
    config.num_hidden_layers = 1
    config.vocab_size = 1
    config.pad_token_id = None
    vars(config).pop("quantization_config", None)

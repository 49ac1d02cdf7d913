"""Copies of linear layers in 8 or 4 bits, which passes that draft read in place of the weights.

Rounding is to the nearest of equally spaced values: 8 bits with one scale a row, 4 bits with a
scale and a zero for each group of inputs. The products are torch's own, with bfloat16 activations;
states in another dtype are cast. A draft may be anything, so this changes no output.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from selfspec.config import Precision
from selfspec.decoder.devices import is_sharded
from selfspec.decoder.kernels.prepacked import (
    Bundle,
    Linear,
    LinearForward,
    bundles,
    out_by_in,
    same_sums,
    sum_of,
)
from selfspec.decoder.passes import Approximation, CurrentPass
from selfspec.decoder.quantized import is_quantized

Part = Literal["layers", "heads", "lm_head"]

_OPS: Any = torch.ops.aten

_DTYPE = torch.bfloat16  # of activations: in the others these products are slower than plain ones
# Tokens that a product takes together. With more of them, on a CPU, one of the full weights is as
# fast, and so it is taken.
_MOST_TOKENS = {"cpu": 4, "cuda": 16}
_OUTPUTS = 16  # 4-bit products compute a multiple of this number
# Inputs with a common scale. That of most 4-bit files, so that a checkpoint made from one gets its
# own values back.
_GROUP = 32


class LowPrecisionLinears:
    """Low-precision copies of a model's linear layers, read while an approximation is active.

    They are made by the first pass that reads them, and again if weights have changed since the
    last call.

    Args:
        current: the pass in progress. Only passes, and heads behind them, read copies: a logits
            processor that calls the model meanwhile gets the model's own output.

    Attributes:
        wanted: what calls have asked for so far.
        active: the precision of each part now; no entry for the model's own weights.
    """

    def __init__(self, current: CurrentPass) -> None:
        self.wanted: set[tuple[Precision, Part]] = set()
        self.active: dict[Part, Precision] = {}
        self._current = current
        self._copies: dict[Part, list[_Copies]] = {}
        self._fresh: set[tuple[Precision, Part]] = set()

    def want(self, approximation: Approximation) -> None:
        """Note that a call will read copies."""
        self.wanted.update(_needs(approximation))

    def forwards(
        self, parts: Mapping[Part, Sequence[nn.Module]]
    ) -> Iterator[tuple[Linear, LinearForward]]:
        """The linear layers of wanted parts, each with its replacement."""
        self._copies, self._fresh = {}, set()
        for part in parts.keys() & {part for _, part in self.wanted}:
            copies = self._copies[part] = []
            for modules in _linears(parts[part]):
                copy = _Copies(modules)
                copies.append(copy)
                product, takes = partial(self._product, part, copy), partial(self._takes, part)
                bundle = Bundle(modules, product, takes)
                for index, module in enumerate(modules):
                    yield module, bundle.forward(index, module.forward)

    def use(self, approximation: Approximation | None) -> None:
        """Read what an approximation names from now on; `None` for the model's own weights."""
        needs = () if approximation is None else _needs(approximation)
        for need in needs:
            if need not in self._fresh:
                precision, part = need
                for copy in self._copies.get(part, ()):
                    copy.refresh(precision)
                self._fresh.add(need)
        self.active = {part: precision for precision, part in needs}

    def reads_layers(self) -> bool:
        """Whether copies of layers are read now, those of heads included."""
        return not self.active.keys() <= {"lm_head"}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that there are."""
        return sum(copy.nbytes for copies in self._copies.values() for copy in copies)

    def _takes(self, part: Part, input: Tensor) -> bool:
        if part not in self.active or not self._drafts(part):
            return False
        tokens = input.numel() // input.shape[-1]
        return tokens <= _MOST_TOKENS[input.device.type] and not torch.is_grad_enabled()

    def _drafts(self, part: Part) -> bool:
        """Whether the calling thread drafts with this part; heads also run behind passes."""
        current = self._current
        return current.owner == threading.get_ident() if part == "heads" else current.gated

    def _product(self, part: Part, copy: _Copies, input: Tensor) -> Tensor:
        return copy.product(self.active[part], input)


def _needs(approximation: Approximation) -> list[tuple[Precision, Part]]:
    precision = approximation.precision
    wanted: list[tuple[Precision | None, Part]] = [
        (approximation.lm_head_precision, "lm_head"),
        (precision, "heads"),
        (precision if approximation.layers else None, "layers"),
    ]
    return [(each, part) for each, part in wanted if each is not None]


# The copies of one bundle


class _Held(NamedTuple):
    weights: RoundedWeights
    sums: list[Tensor]


# By the first of the layers, as long as it lives. Wrappers of one model share copies.
_HELD: WeakKeyDictionary[nn.Module, dict[Precision, _Held]] = WeakKeyDictionary()


class _Copies:
    """Copies of linear layers with the same input, by precision."""

    def __init__(self, modules: Sequence[Linear]):
        self._modules = modules
        self._held = _HELD.setdefault(modules[0], {})

    @torch.no_grad()
    def refresh(self, precision: Precision) -> None:
        """Make the copy, unless there is one of the weights as they are."""
        parts = [p.detach() for m in self._modules for p in (m.weight, m.bias) if p is not None]
        sums = [sum_of(part) for part in parts]
        held = self._held.get(precision)
        if held is None or not same_sums(held.sums, sums):
            # Copies outlive this call, and what surrounds it.
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
                weights = KINDS[precision](self._modules)
            if held is not None and weights.move_into(held.weights):
                weights = held.weights
            self._held[precision] = _Held(weights, sums)

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that there are."""
        made = (tensor for held in self._held.values() for tensor in held.weights.tensors)
        return sum(tensor.nbytes for tensor in made)

    def product(self, precision: Precision, input: Tensor) -> Tensor:
        """Outputs `[..., out]` of all layers for an input `[..., in]`."""
        return self._held[precision].weights(input)


class RoundedWeights(ABC):
    """Rounded weights of linear layers with the same input.

    Args:
        modules: the layers.
    """

    def __init__(self, modules: Sequence[Linear]):
        weights = [out_by_in(module) for module in modules]
        self.outputs, self.inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
        biased = modules[0].bias is not None
        self._bias = torch.cat([m.bias.detach() for m in modules]).to(_DTYPE) if biased else None
        self.tensors = self._pack(weights)

    @abstractmethod
    def _pack(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Round weights `[out, in]`, and bring them into the layout of the product."""

    @abstractmethod
    def _product(self, states: Tensor) -> Tensor:
        """`[tokens, out]` products of bfloat16 states `[tokens, in]`."""

    @staticmethod
    @abstractmethod
    def nbytes(outputs: int, inputs: int) -> int:
        """Bytes of a copy."""

    def move_into(self, other: RoundedWeights) -> bool:
        """Overwrite an earlier copy with this one, for recorded graphs read its tensors.

        Returns:
            Whether it could be: it has the same layers, shapes and device.
        """
        if self._place != other._place:
            return False
        for there, here in zip(other.tensors, self.tensors, strict=True):
            there.copy_(here)
        if self._bias is not None and other._bias is not None:
            other._bias.copy_(self._bias)
        return True

    @property
    def _place(self) -> tuple[object, ...]:
        return self.outputs, self.inputs, self._bias is None, self.tensors[0].device

    def __call__(self, input: Tensor) -> Tensor:
        """Outputs `[..., out]` for an input `[..., in]`, in the dtype that torch's product has."""
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        states = input.reshape(-1, self.inputs).to(_DTYPE)
        output = self._product(states)[:, : self.outputs]
        if self._bias is not None:
            output = output + self._bias
        return output.to(dtype).view(*input.shape[:-1], self.outputs)


class Int8Weights(RoundedWeights):
    """Weights in 8 bits, with one scale a row."""

    def _pack(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        wide, parts = _up(self.inputs, 16), list[tuple[Tensor, Tensor]]()
        for piece in _pieces(weights):
            # Rounded first, so that the numbers are rounded to multiples of the scale in use.
            scales = (piece.abs().amax(-1) / 127).to(_DTYPE)
            steps = piece / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]
            numbers = steps.round().clamp(-127, 127).to(torch.int8)
            parts.append((pad(numbers, (0, wide - self.inputs)), scales))
        numbers, scales = zip(*parts, strict=True)
        return torch.cat(numbers), torch.cat(scales)

    def _product(self, states: Tensor) -> Tensor:
        numbers, scales = self.tensors
        states = _padded(states, numbers.shape[1])
        if states.data_ptr() % 32:  # bytes of the vectors that `_weight_int8pack_mm` loads
            states = states.clone()
        return _OPS._weight_int8pack_mm(states.contiguous(), numbers, scales)

    @staticmethod
    def nbytes(outputs: int, inputs: int) -> int:
        """Bytes of a copy."""
        return outputs * (_up(inputs, 16) + _DTYPE.itemsize)


class Int4Weights(RoundedWeights):
    """Weights in 4 bits, with a scale and a zero for each group of inputs."""

    def _pack(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        wide = _up(self.inputs, _GROUP)
        parts = [
            self._pack_piece(pad(piece, (0, wide - self.inputs, 0, _lack(len(piece)))))
            for piece in _pieces(weights)
        ]
        numbers, scales = zip(*parts, strict=True)
        return torch.cat(numbers), torch.cat(scales, dim=1)

    def _pack_piece(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        numbers, scales, zeros = round_to_4_bits(piece.unflatten(1, (-1, _GROUP)))
        numbers = numbers.flatten(1)
        if piece.device.type == "cpu":
            packed = _OPS._convert_weight_to_int4pack_for_cpu(numbers, 1)
        else:
            bytes_ = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
            # With 2 inner tiles the layout takes multiples of 32 inputs.
            packed = _OPS._convert_weight_to_int4pack(bytes_, 2)
        return packed, torch.stack([scales.T, zeros.T], dim=-1).contiguous()

    def _product(self, states: Tensor) -> Tensor:
        numbers, scales = self.tensors
        states = _padded(states, len(scales) * _GROUP).contiguous()
        on_cpu = states.device.type == "cpu"
        product = _OPS._weight_int4pack_mm_for_cpu if on_cpu else _OPS._weight_int4pack_mm
        return product(states, numbers, _GROUP, scales)

    @staticmethod
    def nbytes(outputs: int, inputs: int) -> int:
        """Bytes of a copy."""
        wide, rows = _up(inputs, _GROUP), _up(outputs, _OUTPUTS)
        return rows * wide // 2 + rows * (wide // _GROUP) * 2 * _DTYPE.itemsize


KINDS: dict[Precision, type[RoundedWeights]] = {"int8": Int8Weights, "int4": Int4Weights}


def round_to_4_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups `[rows, groups, n]` to 16 equally spaced values each.

    Returns:
        Numbers 0 to 15 `[rows, groups, n]` in int32, and `[rows, groups]` scales and zeros in
        bfloat16: a value is `(number - 8) * scale + zero`.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).to(_DTYPE)
    zeros = (low + 8 * scales.float()).to(_DTYPE)
    wide = scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    numbers = ((groups - zeros.float()[..., None]) / wide).round() + 8
    return numbers.clamp(0, 15).to(torch.int32), scales, zeros


def _pieces(weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Rows of several weights, some at a time, in float32."""
    for piece in torch.cat([*weights]).split(256):  # stays in the processor's cache
        yield piece.float()


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _lack(outputs: int) -> int:
    return _up(outputs, _OUTPUTS) - outputs


def _padded(states: Tensor, inputs: int) -> Tensor:
    lack = inputs - states.shape[1]
    return pad(states, (0, lack)) if lack else states


# What can be copied


def _linears(roots: Iterable[nn.Module]) -> Iterator[list[Linear]]:
    """The linear layers in these modules that get copies, grouped by common input."""
    for root in roots:
        yield from bundles(root, _is_linear)


def _is_linear(module: Any) -> TypeGuard[Linear]:
    if type(module) not in (nn.Linear, Conv1D) or "_hf_hook" in module.__dict__:
        return False  # device hooks move its input, or bring its weights
    weight = module.weight
    plain = type(weight) is nn.Parameter and weight.is_floating_point() and not is_quantized(weight)
    # A copy of a smaller one, such as an adapter's, would not be smaller than it.
    return plain and min(weight.shape) >= _GROUP


def copy_bytes(roots: Sequence[nn.Module], precision: Precision) -> int:
    """Bytes of the copies of the linear layers in these modules; 0 if copies are refused."""
    return 0 if _left_out(roots) else _nbytes(roots, precision)


def _nbytes(roots: Iterable[nn.Module], precision: Precision) -> int:
    sizes = [
        (sum(len(out_by_in(m)) for m in modules), out_by_in(modules[0]).shape[1])
        for modules in _linears(roots)
    ]
    return sum(KINDS[precision].nbytes(*size) for size in sizes)


def bytes_read(root: nn.Module, precision: Precision | None) -> int:
    """Bytes of a module's weights that a draft reads, with copies of the linear layers."""
    everything = sum(weight.nbytes for weight in root.parameters())
    if precision is None:
        return everything
    copied = sum(m.weight.nbytes for modules in _linears([root]) for m in modules)
    return everything - copied + _nbytes([root], precision)


def refuse_copies(roots: Sequence[nn.Module], what: str) -> None:
    """Raise ValueError, with the reason, if most of these modules' weights cannot be copied.

    Args:
        roots: the modules.
        what: their name in the message.
    """
    left = _left_out(roots)
    if left:
        name, weight = max(left, key=lambda pair: pair[1].numel())
        raise ValueError(f"precision: {_reason(weight)} ({name} of {what}), {_INSTEAD}")


def _left_out(roots: Sequence[nn.Module]) -> Sequence[tuple[str, Tensor]]:
    """Names and weights of these modules that get no copies, if they are most of all weights."""
    copied = {id(m.weight) for modules in _linears(roots) for m in modules}
    weights = {id(w): (n, w) for r in roots for n, w in r.named_parameters() if w.dim() > 1}
    left = [(name, weight) for key, (name, weight) in weights.items() if key not in copied]
    size = sum(weight.numel() for _, weight in weights.values())
    return left if 2 * sum(weight.numel() for _, weight in left) > size else []


_INSTEAD = "so there is no low-precision copy of it; leave precision out"


def _reason(weight: Tensor) -> str:
    if is_sharded(weight):
        return "a weight is in shards"
    if is_quantized(weight):
        return "a weight is quantized already"
    if weight.dim() == 3:
        return "weights of experts are stacked in three dimensions"
    if weight.is_meta:
        return "a weight is offloaded"
    if min(weight.shape) < _GROUP:
        return f"a weight of shape {tuple(weight.shape)} has fewer than {_GROUP} rows or columns"
    return f"a weight of shape {tuple(weight.shape)} belongs to no plain linear layer"

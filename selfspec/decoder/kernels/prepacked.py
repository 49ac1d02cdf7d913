"""Linear maps with weights in the layout that a CPU computes in, for half precision.

A linear map in half precision brings its weights into blocks before it multiplies, in every call.
In a pass over few tokens that takes as long as the product. Done once and kept, it costs the
weights' memory a second time, and a third time where oneDNN computes many tokens, FBGEMM (`fbgemm`)
a few of them, and memory allows. Maps that read the same states become one product. By oneDNN,
outputs are the same to the bit where torch's own product is oneDNN's, too; in a few shapes it is
not, and rounds differently, as it does for another batch size. So do FBGEMM's products, and
attention of one token by `joins_heads`.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard
from weakref import WeakKeyDictionary

import psutil
import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from selfspec.config import Kernels
from selfspec.decoder.kernels import fbgemm
from selfspec.decoder.kernels.fbgemm import Product

_OPS: Any = torch.ops.mkldnn

HALF = (torch.bfloat16, torch.float16)
_FEW = 4  # tokens up to which FBGEMM is faster than oneDNN

# A prime number, so that weights' rows or columns that change places are seen.
_COLUMNS = 1021

Linear = nn.Linear | Conv1D  # the layers with packed weights or copies
LinearForward = Callable[[Tensor], Tensor]

# Linear layers with the same input, by the names that models share (vLLM merges these, too). If
# one of them gets another input, the result is still right, and slower.
_SISTERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Packed(NamedTuple):
    """Packed weights of one or several linear layers, and checksums of the originals.

    Attributes:
        weight: `[out, in]` of all, concatenated, in oneDNN's layout; `None` where it has no
            kernels, and FBGEMM computes all products.
        bias: `[out]`, or `None`.
        fbgemm: FBGEMM's product; `None` where oneDNN computes all.
        sums: those of each weight and bias (`sum_of`), which reveal changes. Torch's own version
            counter misses those of fused optimizers and of merged adapters.
    """

    weight: Tensor | None
    bias: Tensor | None
    fbgemm: Product | None
    sums: list[Tensor]


# By the first of the layers, as long as it lives. Wrappers of one model share packed weights.
_PACKED: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()


class PrepackedLinears:
    """Packed weights of linear layers, packed again if weights have changed since the last call.

    The check reads all weights at the start of a call, which takes as long as a token or two.

    Args:
        name: the model's name, for the warning.
    """

    def __init__(self, name: str):
        self._name = name
        self._warned = False
        self._both: bool | None = None  # decided once: packing takes the memory that it needs

    def forwards(self, *roots: nn.Module) -> Iterator[tuple[nn.Module, LinearForward]]:
        """The linear layers in these modules that can be packed, each with its replacement."""
        found = False
        if self._both is None:
            self._both = _fits(_bytes_of(roots, _is_packable, both=True))
        for root in roots:
            for modules in bundles(root, _is_packable):
                packed = _pack(modules, self._both)
                if packed is None:
                    continue
                found, bundle = True, _bundle(modules, packed)
                for index, module in enumerate(modules):
                    yield module, bundle.forward(index, module.forward)
        if not found and not self._warned and not _half_on_cpu(roots):
            self._warned = True
            warnings.warn(
                f"nothing of {self._name} can be prepacked: it takes a model in half precision on "
                "a CPU; the model runs as it is: leave kernels out to get no warning",
                stacklevel=2,
            )


def choose_kernels(*roots: nn.Module) -> Kernels:
    """`"prepacked"` in half precision on a CPU if packed copies fit, else `"direct"`."""
    fits = _fits(_bytes_of(roots, _is_packable, both=False))
    return "prepacked" if _half_on_cpu(roots) and fits else "direct"


def packed_bytes(*roots: nn.Module) -> int:
    """Bytes that packed copies of linear layers take beside the weights on this CPU.

    0 if it computes in no such dtype. Weights may be on the meta device.
    """
    both = _bytes_of(roots, _can_be_packed, both=True)
    return both if _fits(both) else _bytes_of(roots, _can_be_packed, both=False)


def _bytes_of(
    roots: Iterable[nn.Module], takes: Callable[[nn.Module], TypeGuard[Linear]], both: bool
) -> int:
    """Bytes of packed copies; with `both`, of FBGEMM's beside oneDNN's, too."""
    found = [out_by_in(m) for root in roots for each in bundles(root, takes) for m in each]
    return sum(
        weight.nbytes * (onednn_computes(weight.dtype) + _takes_fbgemm(weight.dtype, both))
        for weight in found
    )


def _fits(copies: int) -> bool:
    """Whether copies of so many bytes leave a quarter of the free memory."""
    return 4 * copies <= 3 * psutil.virtual_memory().available


class Bundle:
    """One or several linear layers with the same input, computed as one product.

    Args:
        modules: the layers.
        product: maps their input to the outputs of all, concatenated.
        takes: whether it computes the product of an input; others are left to the layers.
        fbgemm: FBGEMM's product of the same weights, if there is one.
    """

    def __init__(
        self,
        modules: Sequence[Linear],
        product: LinearForward,
        takes: Callable[[Tensor], bool],
        fbgemm: Product | None = None,
    ):
        self.fbgemm = fbgemm
        self.sizes = [out_by_in(module).shape[0] for module in modules]
        self.product, self.takes = product, takes
        self.held: tuple[Tensor, Tensor] | None = None  # the last input and all outputs

    def forward(self, index: int, plain: LinearForward) -> LinearForward:
        """The replacement for `plain`, the forward of the layer with this index."""
        return _Member(self, index, plain)


class _Member:
    """One linear layer of a bundle: replaces its forward, `plain`."""

    def __init__(self, bundle: Bundle, index: int, plain: LinearForward):
        self.bundle, self.index, self.plain = bundle, index, plain
        self._product, self._takes = bundle.product, bundle.takes
        self._alone, self._last = len(bundle.sizes) == 1, index == len(bundle.sizes) - 1
        self._start, self._size = sum(bundle.sizes[:index]), bundle.sizes[index]

    def __call__(self, input: Tensor) -> Tensor:
        if not self._takes(input):
            return self.plain(input)
        if self._alone:
            return self._product(input)
        held = self.bundle.held  # read once: other threads may write it, too
        if held is None or held[0] is not input:
            held = (input, self._product(input))
        self.bundle.held = None if self._last else held
        return held[1].narrow(-1, self._start, self._size)


def fbgemm_of(forwards: Sequence[LinearForward]) -> Product | None:
    """FBGEMM's product of linear layers that are a bundle; `None` where there is none.

    Low-precision copies that are read in place of it at times are looked through.
    """
    found: list[Bundle] = []
    for forward in forwards:
        while isinstance(forward, _Member) and forward.bundle.fbgemm is None:
            forward = forward.plain
        if not isinstance(forward, _Member):
            return None
        found.append(forward.bundle)
    whole = len(set(found)) == 1 and len(found[0].sizes) == len(found)
    return found[0].fbgemm if whole else None


def joined(forwards: Sequence[LinearForward]) -> LinearForward:
    """Maps the input of several linear layers to the outputs of all, concatenated.

    Args:
        forwards: the layers', which make one product if they are a bundle.
    """
    members = [f for f in forwards if isinstance(f, _Member)]
    if len(members) < len(forwards) or {len(m.bundle.sizes) for m in members} != {len(members)}:
        return lambda input: torch.cat([forward(input) for forward in forwards], dim=-1)
    bundle, plain = members[0].bundle, joined([member.plain for member in members])
    product, takes = bundle.product, bundle.takes
    return lambda input: product(input) if takes(input) else plain(input)


def _bundle(modules: Sequence[Linear], packed: _Packed) -> Bundle:
    dtype = modules[0].weight.dtype

    def takes(input: Tensor) -> bool:
        return may_stand_in(dtype) and input.dtype == dtype

    return Bundle(modules, _product(packed), takes, packed.fbgemm)


def may_stand_in(dtype: torch.dtype) -> bool:
    """Whether what computes in `dtype` may stand in for torch's own code on a CPU now.

    Not where gradients are kept, nor where autocast has torch compute in another dtype.
    """
    if torch.is_grad_enabled():
        return False
    return not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") == dtype


def _product(packed: _Packed) -> LinearForward:
    linear, (weight, bias, few, _) = _OPS._linear_pointwise, packed
    if weight is None:
        assert few is not None
        return few
    if few is None:
        return lambda input: linear(input, weight, bias, "none", [], "")
    most = _FEW * weight.shape[1]

    def product(input: Tensor) -> Tensor:
        if input.numel() <= most:
            return few(input)
        return linear(input, weight, bias, "none", [], "")

    return product


# In place


def prepack_(model: PreTrainedModel) -> None:
    """Pack the linear layers of a model in place: their weights are then held packed only.

    With the kernels `prepacked` they are held twice. The model and whatever wraps it go on to
    generate, with the same output. The model can no longer be trained, saved, copied, moved or
    changed, and neither low-precision copies of its layers nor heads that start from them can be
    made: that raises an error. LM head and embeddings stay as they are; heads and drafts read them.

    Args:
        model: a model in half precision on a CPU.

    Raises:
        ValueError: the model has adapters, or nothing of it can be packed.
    """
    name, lm_head = type(model).__name__, model.get_output_embeddings()
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"the adapters of {name} could not be switched or merged once its weights are packed; "
            "merge them first (merge_and_unload)"
        )
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))

    def takes(module: nn.Module) -> TypeGuard[Linear]:
        return _is_packable(module) and module is not lm_head and uses[id(module.weight)] == 1

    found = [*bundles(model, takes)]
    if not found:
        raise ValueError(
            f"nothing of {name} can be packed in place: it takes linear layers in half precision "
            "on a CPU that computes in it"
        )
    for modules in found:
        _pack_in_place(modules)


class PackedWeight(Tensor):
    """The shape and dtype of a weight that is held packed only; whatever reads it fails.

    As a wrapper it counts as quantized (`is_quantized`), like the tensors of torchao.
    """

    # Shapes and dtypes are at hand.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, weight: Tensor) -> PackedWeight:
        """Stand in for `weight`."""
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        made._is_param = True  # `nn.Parameter(made)` would read it
        return made

    def __repr__(self, **_: object) -> str:
        """Without values."""
        return f"PackedWeight({tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, *call: object) -> NoReturn:
        """Refuse to be read."""
        _refuse()

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse to be copied."""
        _refuse()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled."""
        _refuse()

    # With these two it is a wrapper; they are called by the compiler.

    def __tensor_flatten__(self) -> NoReturn:
        """Refuse to be compiled."""
        _refuse()

    @staticmethod
    def __tensor_unflatten__(*call: object) -> NoReturn:
        """Refuse to be compiled."""
        _refuse()


def _refuse(*call: object) -> NoReturn:
    raise RuntimeError(
        "prepack_ has packed the weights of this model for inference: it can only generate, in its "
        "dtype and without gradients; load it anew to train, save, copy, move or change it"
    )


def _pack_in_place(modules: Sequence[Any]) -> None:
    """Have the layers compute with packed weights for good, and drop the others."""
    packed = _pack(modules, both=False)
    if packed is None:
        return
    if packed.weight is not None:
        packed = packed._replace(fbgemm=None)  # it is asked for to save memory
    dtype = modules[0].weight.dtype
    del _PACKED[modules[0]]
    held: list[tuple[dict[str, object], str, PackedWeight]] = []

    def takes(input: Tensor) -> bool:
        for parameters, name, stand_in in held:
            if parameters[name] is not stand_in:  # somebody has put in another weight
                return False
        return may_stand_in(dtype) and input.dtype == dtype

    bundle = Bundle(modules, _product(packed), takes)
    for index, module in enumerate(modules):
        for name, parameter in [*module.named_parameters(recurse=False)]:
            stand_in = PackedWeight(parameter)
            setattr(module, name, stand_in)
            held.append((module._parameters, name, stand_in))
        module.forward = bundle.forward(index, _refuse)


def joins_heads(model: PreTrainedModel) -> bool:
    """Whether attention of one token is faster with a mask that it does not need.

    If several heads share keys, transformers joins their queries into one product where there is a
    mask, and leaves them to torch where there is none. On a CPU in half precision, torch multiplies
    a single query several times more slowly than two.
    """
    if model.device.type != "cpu" or model.dtype not in HALF:
        return False
    return any(
        getattr(module, "num_key_value_groups", 1) > 1
        and getattr(module.config, "_attn_implementation", None) == "sdpa"
        for module in model.modules()
        if hasattr(module, "config")
    )


def _half_on_cpu(roots: Iterable[nn.Module]) -> bool:
    """Whether any linear layer is in half precision on a CPU."""
    linears = (m for root in roots for m in root.modules() if type(m) in (nn.Linear, Conv1D))
    return any(m.weight.dtype in HALF and m.weight.device.type == "cpu" for m in linears)


def bundles(
    root: nn.Module, takes: Callable[[nn.Module], TypeGuard[Linear]]
) -> Iterator[list[Linear]]:
    """The linear layers in a module for which `takes` holds, grouped by common input.

    Those whose weight PEFT replaces in every call (LoRA by `target_parameters`) are left out.
    """
    if takes(root):
        yield [root]
    for parent in root.modules():
        if isinstance(parent, ParamWrapper):
            continue
        children = {name: m for name, m in parent.named_children() if takes(m)}
        for names in _SISTERS:
            sisters = [children[name] for name in names if name in children]
            if len(sisters) == len(names) and len(set(map(_kind, sisters))) == 1:
                yield sisters
                children = {name: m for name, m in children.items() if name not in names}
        yield from ([module] for module in children.values())


def _is_packable(module: nn.Module) -> TypeGuard[Linear]:
    return _can_be_packed(module) and module.weight.device.type == "cpu"


def _can_be_packed(module: Any) -> TypeGuard[Linear]:
    if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
        return False  # device hooks bring the weights, or an outer call has packed them
    return type(module.weight) is nn.Parameter and packs(module.weight.dtype)


def packs(dtype: torch.dtype) -> bool:
    """Whether weights in this dtype can be packed here."""
    return onednn_computes(dtype) or _takes_fbgemm(dtype, both=False)


def _takes_fbgemm(dtype: torch.dtype, both: bool) -> bool:
    """Whether FBGEMM computes products: of few tokens with `both`, of all where oneDNN does not."""
    return dtype in HALF and fbgemm.is_faster() and (both or not onednn_computes(dtype))


def onednn_computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for weights in this dtype here."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return _OPS._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and _OPS._is_mkldnn_fp16_supported()


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own products in a dtype are fast on a device: not in half on every CPU."""
    return device.type != "cpu" or dtype not in HALF or onednn_computes(dtype)


def most_tokens(dtype: torch.dtype) -> int:
    """Tokens up to which FBGEMM computes products: any number where oneDNN has no kernels."""
    return _FEW if onednn_computes(dtype) else sys.maxsize


def _kind(module: Linear) -> tuple[object, ...]:
    """What layers must have in common to be merged."""
    return type(module), out_by_in(module).shape[1], module.weight.dtype, module.bias is None


def out_by_in(module: Linear) -> Tensor:
    """The weight as `[out, in]`."""
    return module.weight.detach() if type(module) is nn.Linear else module.weight.detach().t()


def _pack(modules: Sequence[Linear], both: bool) -> _Packed | None:
    """Pack layers with the same input, unless they are; `None` if FBGEMM cannot hold the weights.

    Args:
        modules: the layers.
        both: whether FBGEMM's copy may be beside oneDNN's.
    """
    parts = [p.detach() for m in modules for p in (m.weight, m.bias) if p is not None]
    sums = [sum_of(part) for part in parts]
    held = _PACKED.get(modules[0])
    if held is None or not same_sums(held.sums, sums):
        weight = torch.cat([out_by_in(module) for module in modules])
        biased = modules[0].bias is not None
        bias = torch.cat([module.bias.detach() for module in modules]) if biased else None
        product = fbgemm.product(weight, bias) if _takes_fbgemm(weight.dtype, both) else None
        if onednn_computes(weight.dtype):
            # In the layout for 5 tokens. On CPUs with AMX the one for a single token is read 1.3
            # times as slowly, whatever the number of tokens; elsewhere all are alike.
            weight = _OPS._reorder_linear_weight(weight, 5)
        elif product is None:
            return None
        else:
            weight = None
        held = _PACKED[modules[0]] = _Packed(weight, bias, product, sums)
    return held


def same_sums(held: Sequence[Tensor], sums: Sequence[Tensor]) -> bool:
    """Whether these are the checksums (`sum_of`) of the same weights and biases.

    Layers may have joined or left a bundle, or got a bias, and weights may have been moved.
    """
    return [each.device for each in held] == [each.device for each in sums] and all(
        map(torch.equal, held, sums)
    )


def sum_of(part: Tensor) -> Tensor:
    """Sums of the bits of a weight or bias: of every `_COLUMNS`-th word of 64 or 16 bits.

    Wider rows are read in half the time, so they are added up first.
    """
    fits = part.shape[-1] % 4 == 0 == part.storage_offset() % 4
    words = part.contiguous().view(torch.int64 if fits else torch.int16).view(-1)
    wide = 16 * _COLUMNS
    whole = len(words) // wide * wide
    rest = pad(words[whole:], (0, -len(words[whole:]) % _COLUMNS))
    sums = words[:whole].view(-1, wide).sum(0).view(-1, _COLUMNS).sum(0)
    return sums + rest.view(-1, _COLUMNS).sum(0)

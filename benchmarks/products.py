"""Times the products of a model's linear layers on a CPU, as selfspec makes them and otherwise.

    python -m benchmarks.products path/to/checkpoint --dtype float32

For 1 to 8 tokens: milliseconds of all linear maps. Then tokens per second of plain decoding, of two
drafts a round and of the default, in turn, on the same prompts. In bfloat16 FBGEMM is compared with
oneDNN, or with torch where that has no kernels; in float32 transposed products
with torch's. Outputs may differ where two scores are nearly equal; where they first do is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from benchmarks.common import console, new_tokens, parser, take_turns, told
from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer
from selfspec.decoder.kernels import fbgemm, few_tokens
from selfspec.decoder.kernels.prepacked import bundles, onednn_computes, out_by_in

_PROMPTS = (
    "Explain photosynthesis to a ten-year-old.",
    "Write a Python function that reverses a list.",
    "Give me five tips about sleep.",
)
_TURNS = 15


# What selfspec multiplies with, by the dtype: its name, and the module that tells whether it does.
_OWN: dict[str, tuple[str, Any]] = {
    "bfloat16": ("FBGEMM", fbgemm),
    "float32": ("transposed", few_tokens),
}


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear


def products(model: Any) -> dict[str, Callable[[int], None]]:
    """What is timed: all maps of a number of tokens, by name."""
    merged = bundles(model, _is_linear)
    weights = [torch.cat([out_by_in(module) for module in modules]) for modules in merged]
    ops: Any = torch.ops.mkldnn
    if onednn_computes(model.dtype):
        packed = [ops._reorder_linear_weight(weight, 5) for weight in weights]
        others = [
            lambda x, weight=weight: ops._linear_pointwise(x, weight, None, "none", [], "")
            for weight in packed
        ]
    else:
        others = [partial(nn.functional.linear, weight=weight) for weight in weights]
    if model.dtype == torch.float32:
        own = [
            partial(few_tokens.transposed_product, weight=weight, bias=None) for weight in weights
        ]
    else:
        own = [fbgemm.product(weight, None) for weight in weights]

    def multiply(maps: Sequence[Any], tokens: int) -> None:
        for product, weight in zip(maps, weights, strict=True):
            product(torch.ones(tokens, weight.shape[1], dtype=weight.dtype))

    name, kernel = _OWN[str(model.dtype).removeprefix("torch.")]
    found = {_other(model.dtype): partial(multiply, others)}
    faster = kernel.is_faster() and None not in own
    return {**found, name: partial(multiply, own)} if faster else found


def _other(dtype: torch.dtype) -> str:
    """What multiplies otherwise: torch's own where oneDNN has no kernels."""
    return "oneDNN" if onednn_computes(dtype) else "torch"


def decode(given: argparse.Namespace) -> None:
    """Print tokens per second with both."""
    tokenizer = load_tokenizer(given.checkpoint)
    prompts = [torch.tensor([tokenizer(prompt).input_ids]) for prompt in _PROMPTS]
    name, kernel = _OWN[given.dtype]
    asked = {_other(getattr(torch, given.dtype)): lambda: False, name: kernel.is_faster}
    specs = {
        each: SelfSpecModel.from_pretrained(given.checkpoint, given.heads, dtype=given.dtype)
        for each in asked
    }
    speeds: dict[str, list[float]] = {}

    def write(name: str, ids: Tensor, draft: DraftConfig | None, new: int) -> list[int]:
        kernel.is_faster = asked[name]
        output = specs[name].generate(ids, draft=draft, max_new_tokens=new, do_sample=False)
        stats = specs[name].last_stats
        speeds.setdefault(name, []).append(stats.tokens_per_second if stats else 0.0)
        return new_tokens(output, ids)

    drafts = {"none": DraftConfig(drafter="none"), "default": None}
    if given.heads:
        drafts["two drafts"] = DraftConfig(num_draft_tokens=2)
    for label, draft in drafts.items():
        for each in specs:
            write(each, prompts[0], draft, 4)  # packs weights
        speeds.clear()
        for prompt, ids in zip(_PROMPTS, prompts, strict=True):
            calls = {each: partial(write, each, ids, draft, given.max_new_tokens) for each in specs}
            texts = (timed.outputs[0] for timed in take_turns(calls, turns=1).values())
            pairs = enumerate(zip(*texts, strict=False))
            apart = next((index for index, (a, b) in pairs if a != b), None)
            console.print(f"{label}: outputs differ at token {apart}: {prompt}")
        medians = {each: median(found) for each, found in speeds.items()}
        console.print(f"{label}, tokens/s: {told(medians, '{:.1f}')}")


def main() -> None:
    """Print both."""
    made = parser(__doc__, target=False)
    made.add_argument("checkpoint", help="a folder or a GGUF file")
    made.add_argument("--heads", help="a folder of heads for the default draft")
    made.add_argument("--max-new-tokens", type=int, default=48)
    made.add_argument("--dtype", default="bfloat16", choices=[*_OWN])
    given = made.parse_args()
    with torch.inference_mode():
        timed = products(load_causal_lm(given.checkpoint, dtype=getattr(torch, given.dtype)))
        for tokens in (1, 2, 3, 4, 5, 8):
            found = take_turns({name: partial(run, tokens) for name, run in timed.items()}, _TURNS)
            figures = {name: 1000 * median(each.seconds) for name, each in found.items()}
            console.print(f"{tokens} tokens: {told(figures, '{:.1f} ms')}")
    decode(given)


if __name__ == "__main__":
    main()

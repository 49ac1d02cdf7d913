"""Times the products of a model's layers with FBGEMM and without, and decoding with each.

    python -m benchmarks.products path/to/checkpoint

For 1 to 8 tokens: milliseconds of all linear maps below the LM head. Then tokens per second of
plain decoding and of the default with the kernels `prepacked`, with FBGEMM and without, in turn, on
the same prompts. Without it, oneDNN multiplies, or on a CPU for which that has no kernels, torch.
Outputs may differ where two scores are nearly equal; where they first do is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from benchmarks.common import console, new_tokens, parser, take_turns, told
from selfspec import SelfSpecModel
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer
from selfspec.decoder.kernels import fbgemm
from selfspec.decoder.kernels.prepacked import bundles, onednn_computes, out_by_in

_PROMPTS = (
    "Explain photosynthesis to a ten-year-old.",
    "Write a Python function that reverses a list.",
    "Give me five tips about sleep.",
)
_TURNS = 15


# What computes products without FBGEMM: torch's own where oneDNN has no kernels.
_OTHER = "oneDNN" if onednn_computes(torch.bfloat16) else "torch"


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear


def products(model: Any) -> dict[str, Callable[[int], None]]:
    """What is timed: all maps of a number of tokens, by name."""
    merged = bundles(model.get_decoder(), _is_linear)
    weights = [torch.cat([out_by_in(module) for module in modules]) for modules in merged]
    ops: Any = torch.ops.mkldnn
    if _OTHER == "oneDNN":
        packed = [ops._reorder_linear_weight(weight, 5) for weight in weights]
        other = [
            lambda x, weight=weight: ops._linear_pointwise(x, weight, None, "none", [], "")
            for weight in packed
        ]
    else:
        other = [partial(nn.functional.linear, weight=weight) for weight in weights]
    few = [fbgemm.product(weight, None) for weight in weights]

    def multiply(maps: Sequence[Any], tokens: int) -> None:
        for product, weight in zip(maps, weights, strict=True):
            product(torch.ones(tokens, weight.shape[1], dtype=weight.dtype))

    found = {_OTHER: partial(multiply, other)}
    return found if None in few else {**found, "FBGEMM": partial(multiply, few)}


def decode(checkpoint: str, heads: str | None, max_new_tokens: int) -> None:
    """Print tokens per second with FBGEMM and without."""
    tokenizer, is_faster, specs = load_tokenizer(checkpoint), fbgemm.is_faster, {}
    prompts = [torch.tensor([tokenizer(prompt).input_ids]) for prompt in _PROMPTS]
    for name, own in ((_OTHER, lambda: False), ("FBGEMM", is_faster)):
        fbgemm.is_faster = own  # asked when weights are packed, in the first call
        specs[name] = SelfSpecModel.from_pretrained(checkpoint, dtype="bfloat16", heads=heads)
        specs[name].generate(prompts[0], max_new_tokens=4)
    for draft in ("none", None):
        speeds: dict[str, list[float]] = {name: [] for name in specs}

        def write(name: str, ids: Tensor, draft: str | None = draft) -> list[int]:
            options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
            output = specs[name].generate(ids, draft=draft, **options)
            speeds[name].append(specs[name].last_stats.tokens_per_second)  # noqa: B023
            return new_tokens(output, ids)

        for prompt, ids in zip(_PROMPTS, prompts, strict=True):
            found = take_turns({name: partial(write, name, ids) for name in specs}, turns=1)
            pairs = zip(*(timed.outputs[0] for timed in found.values()), strict=False)
            apart = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
            console.print(f"{draft or 'default'}: outputs differ at token {apart}: {prompt}")
        medians = {name: median(each) for name, each in speeds.items()}
        console.print(f"{draft or 'default'}, tokens/s: {told(medians, '{:.1f}')}")


def main() -> None:
    """Print both."""
    made = parser(__doc__, target=False)
    made.add_argument("checkpoint", help="a folder or a GGUF file")
    made.add_argument("--heads", help="a folder of heads for the default draft")
    made.add_argument("--max-new-tokens", type=int, default=48)
    given = made.parse_args()
    with torch.inference_mode():
        timed = products(load_causal_lm(given.checkpoint, dtype=torch.bfloat16))
        for tokens in (1, 2, 3, 4, 5, 8):
            found = take_turns({name: partial(run, tokens) for name, run in timed.items()}, _TURNS)
            figures = {name: 1000 * median(each.seconds) for name, each in found.items()}
            console.print(f"{tokens} tokens: {told(figures, '{:.1f} ms')}")
    decode(given.checkpoint, given.heads, given.max_new_tokens)


if __name__ == "__main__":
    main()

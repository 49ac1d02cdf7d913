"""Times the products of a model's layers by oneDNN and by FBGEMM, and decoding with each.

    python -m benchmarks.products path/to/checkpoint

For 1 to 8 tokens: milliseconds of all linear maps below the LM head. Then tokens per second of
plain decoding and of the default with the kernels `prepacked`, with FBGEMM for a few tokens and
without, in turn, on the same prompts. Outputs may differ where two scores are nearly equal; where
they first do is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from selfspec import SelfSpecModel
from selfspec.decoder.checkpoints import load_causal_lm, load_tokenizer
from selfspec.decoder.kernels import fbgemm
from selfspec.decoder.kernels.prepacked import bundles, out_by_in

_PROMPTS = (
    "Explain photosynthesis to a ten-year-old.",
    "Write a Python function that reverses a list.",
    "Give me five tips about sleep.",
)
_TURNS = 15

console = Console(highlight=False, soft_wrap=True)


def products(model: Any) -> dict[str, Callable[[int], None]]:
    """What is timed: all maps of a number of tokens, by name."""
    merged = bundles(model.get_decoder(), lambda module: type(module) is nn.Linear)
    weights = [torch.cat([out_by_in(module) for module in modules]) for modules in merged]
    ops: Any = torch.ops.mkldnn
    packed = [ops._reorder_linear_weight(weight, 5) for weight in weights]
    few = [fbgemm.product(weight, None) for weight in weights]

    def states(tokens: int, weight: Tensor) -> Tensor:
        return torch.ones(tokens, weight.shape[1], dtype=weight.dtype)

    def by_onednn(tokens: int) -> None:
        for weight in packed:
            ops._linear_pointwise(states(tokens, weight), weight, None, "none", [], "")

    def by_fbgemm(tokens: int) -> None:
        for product, weight in zip(few, weights, strict=True):
            if product is not None:
                product(states(tokens, weight))

    return {"oneDNN": by_onednn, **({} if None in few else {"FBGEMM": by_fbgemm})}


def milliseconds(timed: dict[str, Callable[[int], None]], tokens: int) -> dict[str, float]:
    """Medians over turns in which all are run."""
    seen: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(_TURNS):
        for name, run in timed.items():
            began = time.perf_counter()
            run(tokens)
            seen[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(times) for name, times in seen.items()}


def decode(checkpoint: str, heads: str | None, new_tokens: int) -> None:
    """Print tokens per second with FBGEMM and without."""
    tokenizer, is_faster, specs = load_tokenizer(checkpoint), fbgemm.is_faster, {}
    for name, own in (("oneDNN", lambda: False), ("FBGEMM", is_faster)):
        fbgemm.is_faster = own  # asked when weights are packed, in the first call
        spec = SelfSpecModel.from_pretrained(checkpoint, dtype="bfloat16", heads=heads)
        spec.generate(torch.tensor([tokenizer("Hello").input_ids]), max_new_tokens=4)
        specs[name] = spec
    for draft in ("none", None):
        speeds: dict[str, list[float]] = {name: [] for name in specs}
        for prompt in _PROMPTS:
            ids = torch.tensor([tokenizer(prompt).input_ids])
            texts: list[list[int]] = []
            for name, spec in specs.items():
                out = spec.generate(ids, max_new_tokens=new_tokens, do_sample=False, draft=draft)
                speeds[name].append(spec.last_stats.tokens_per_second)
                texts.append(out[0, ids.shape[1] :].tolist())
            pairs = enumerate(zip(*texts, strict=False))
            apart = next((index for index, (a, b) in pairs if a != b), None)
            console.print(f"{draft or 'default'}: outputs differ at token {apart}: {prompt}")
        told = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in speeds.items())
        console.print(f"{draft or 'default'}, tokens/s: {told}")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder or a GGUF file")
    parser.add_argument("--heads", help="a folder of heads for the default draft")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()
    with torch.inference_mode():
        timed = products(load_causal_lm(arguments.checkpoint, dtype=torch.bfloat16))
        for tokens in (1, 2, 3, 4, 5, 8):
            figures = milliseconds(timed, tokens).items()
            told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in figures)
            console.print(f"{tokens} tokens: {told}")
    decode(arguments.checkpoint, arguments.heads, arguments.max_new_tokens)


if __name__ == "__main__":
    main()

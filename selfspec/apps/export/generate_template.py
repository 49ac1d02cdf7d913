"""Self-speculative decoding for `model.generate(custom_generate=..., trust_remote_code=True)`."""

from typing import Any
from weakref import WeakKeyDictionary

from selfspec import SelfSpecModel

# Exit heads: a folder or a hub id; `None` drafts with the model's own norm and LM head.
# The argument `heads` overrides it.
HEADS: str | None = None

_LOADED: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def generate(
    model: Any, inputs: Any = None, heads: Any = None, draft: Any = None, **options: Any
) -> Any:
    """Generate what `model.generate` would, in less time.

    Args:
        model: a decoder-only causal language model of transformers.
        inputs: `[batch, width]` prompt token ids (or `input_ids=`).
        heads: exit heads, their folder or their hub id, instead of `HEADS`.
        draft: how to draft: a dict with fields of `selfspec.DraftConfig`, or a drafter's name.
        **options: every option of transformers' `generate`.
    """
    source = HEADS if heads is None else heads
    known = _LOADED.setdefault(model, {})
    if source is None or not isinstance(source, str):
        spec = SelfSpecModel(model, heads=source)
    else:
        spec = SelfSpecModel(model, heads=known.get(source, source))
        known[source] = spec.heads
    given = {name: value for name, value in options.items() if value is not None}
    return spec.generate(inputs, draft=draft, **given)

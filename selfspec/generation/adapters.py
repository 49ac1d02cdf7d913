"""What PEFT's own `generate` gives to rows: one adapter each, and where activated LoRA begins.

PEFT does this by hooks, which hold one list for the whole call. Here the list reads as what belongs
to the rows of the pass in progress, so that rows may leave and join.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModelForCausalLM
from peft.tuners.lora.variants import calculate_alora_offsets, is_alora_relevant_in_batch
from torch import nn

from selfspec.drafters.engine import State

_OPTIONS = ("adapter_names", "alora_offsets")


class OfRows(Sequence[Any]):
    """A list with one entry for each row of the pass in progress.

    Args:
        rows: gives the rows, as indices of the call's.
        entry: gives the entry of a row, by its index in the call and in the pass.
    """

    def __init__(self, rows: Callable[[], Sequence[int]], entry: Callable[[int, int], object]):
        self._rows, self._entry = rows, entry

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows())

    def __getitem__(self, index: Any) -> Any:
        """The entry of one row, or those of several."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._entry(self._rows()[index], index)


class RowAdapters:
    """The adapters of the rows of one call.

    Args:
        model: the PEFT model.
        names: `adapter_names`, one per row of the call; `None` if all use the active adapter.
        offsets: `alora_offsets`, one per row of the call; `None` finds the invocation tokens.

    Raises:
        ValueError: PEFT does not know a name, or the model is in training mode.
    """

    def __init__(
        self, model: Any, names: Sequence[str] | None, offsets: Sequence[int | None] | None
    ):
        self.model, self.names, self._offsets = model, names, offsets
        self._state: State | None = None  # the rows that run now
        self._activated = is_activated(model, names) or offsets is not None
        self._first: dict[int, int | None] = {}  # per row, the first token that its adapter sees
        if names is not None:
            with self.hooked():  # PEFT checks the names
                pass

    def check_rows(self, rows: int) -> None:
        """Raise ValueError unless there is one adapter per row."""
        for name, values in zip(_OPTIONS, (self.names, self._offsets), strict=True):
            if values is not None and len(values) != rows:
                raise ValueError(
                    f"{name} has {len(values)} entries for {rows} rows; give one per row"
                )

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While active, PEFT's layers get what belongs to the rows of each pass."""
        names = self.names
        named = None if names is None else OfRows(self._rows, lambda row, index: names[row])
        offsets = OfRows(self._rows, self._offset) if self._activated else None
        hooks = self.model._enable_peft_forward_hooks(adapter_names=named, alora_offsets=offsets)
        hooks.__enter__()
        try:
            yield
        finally:
            hooks.__exit__(None, None, None)  # after an exception PEFT would leave its hooks

    def run_next(self, state: State) -> None:
        """The next passes run the rows of this call."""
        self._state = state

    def read(self, row: int, text: Sequence[int]) -> None:
        """Find where the adapter of a row begins to act in its prompt."""
        if self._activated:
            offset = self._given(row, text) if self._offsets is None else self._offsets[row]
            self._first[row] = None if offset is None else len(text) - offset

    def _given(self, row: int, text: Sequence[int]) -> int | None:
        name = None if self.names is None else [self.names[row]]
        configs, active = self.model.peft_config, self.model.active_adapter
        tokens = torch.tensor([list(text)], device="cpu")
        return calculate_alora_offsets(configs, active, tokens, name)[0]

    def _rows(self) -> Sequence[int]:
        if self._state is None:
            return range(len(self.names or ()))
        return self._state.context.rows

    def _offset(self, row: int, index: int) -> int | None:
        """How many of a row's last tokens in the pass its adapter sees."""
        first, window = self._first[row], self._state and self._state.slots.active
        if first is None:
            return None
        if not window:  # the LM head alone, behind a prompt
            return sys.maxsize
        return window.width - min(max(first - window.starts[index], 0), window.width)


def is_activated(model: object, names: Sequence[str] | None) -> bool:
    """Whether PEFT's `generate` looks for invocation tokens."""
    searches = isinstance(model, PeftModelForCausalLM)
    return searches and is_alora_relevant_in_batch(model, names)  # pyright: ignore[reportArgumentType]


def take_adapters(model: nn.Module, options: MutableMapping[str, Any]) -> RowAdapters | None:
    """The adapters of a call's rows, if they need more than the active adapter does.

    Args:
        model: the model as it was wrapped.
        options: the call's options; PEFT's own are removed.

    Raises:
        ValueError: there is no PEFT model, or its adapters cannot differ from row to row.
    """
    names, offsets = (options.pop(name, None) for name in _OPTIONS)
    tuner: Any = getattr(model, "base_model", None)
    if names is None and offsets is None:
        plain = not hasattr(model, "_enable_peft_forward_hooks") or not is_activated(model, None)
        return None if plain else RowAdapters(model, None, None)
    given = "adapter_names" if names is not None else "alora_offsets"
    if not hasattr(model, "_enable_peft_forward_hooks"):
        raise ValueError(f"{given} needs a PEFT model, got {type(model).__name__}")
    if "_enable_peft_forward_hooks" not in dir(type(tuner)):
        raise ValueError(
            f"{given}: a {type(tuner).__name__} has no adapters per row; choose one adapter for "
            "all rows with set_adapter"
        )
    return RowAdapters(model, names, offsets)

"""The state of a recurrent layer, with rollback of rejected tokens.

The layer keeps the state after the committed tokens and the inputs that its kernel has read since.
When a round is committed, the kernel runs again from that state over the accepted tokens. This does
not read the layer's weights. If all drafts were accepted, the kernel does not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

Inputs = Mapping[int | str, Tensor]


class KernelCall(NamedTuple):
    """A call of a recurrence's kernel.

    Attributes:
        run: continues over some inputs from a state, `None` for an empty one; returns the output
            and the new state. A kernel of one token may overwrite the state it is given.
        inputs: the kernel's arguments that have one entry per token, by position or name.
        time: dimension of the tokens in inputs and output; `None` if the kernel takes one token and
            has no such dimension. Rows are dimension 0.
    """

    run: Callable[[Tensor | None, Inputs], tuple[Tensor, Tensor]]
    inputs: Inputs
    time: int | None

    @property
    def width(self) -> int:
        """Number of tokens."""
        return 1 if self.time is None else next(iter(self.inputs.values())).shape[self.time]

    def part(self, state: Tensor | None, count: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Run over the first `count` tokens of some rows."""
        return self.run(state, {name: self._cut(x, count, rows) for name, x in self.inputs.items()})

    def run_first(
        self, state: Tensor | None, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Run over the first `counts` tokens of each row; the output is 0 elsewhere."""
        groups = by_count(counts)
        if groups.keys() == {self.width}:
            return self.run(state, self.inputs)
        whole: Tensor | None = None
        states: list[tuple[Tensor | None, list[int]]] = []
        for count, rows in groups.items():
            after = _of(state, rows)
            if count:
                output, after = self.part(after, count, rows)
                if whole is None:
                    shape = [len(counts), *output.shape[1:]]
                    if self.time is not None:
                        shape[self.time] = self.width
                    whole = output.new_zeros(shape)
                (whole if self.time is None else whole.narrow(self.time, 0, count))[rows] = output
            states.append((after, rows))
        assert whole is not None
        return whole, _joined(states, len(counts))

    def _cut(self, values: Tensor, count: int, rows: list[int]) -> Tensor:
        if len(rows) < values.shape[0]:
            values = values[rows]
        return values if self.time is None else values.narrow(self.time, 0, count)


def by_count(counts: Sequence[int]) -> dict[int, list[int]]:
    """Groups row indices by their count."""
    groups: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        groups.setdefault(count, []).append(row)
    return groups


@dataclass
class Uncommitted:
    """What a recurrent layer has read since the last commit.

    Attributes:
        read: by number, the last committed inputs of a convolution, followed by those since.
        calls: the calls of the recurrence's kernel.
        state: the recurrence's state after these calls.
        width: number of tokens.
    """

    read: dict[int, Tensor] = field(default_factory=dict)
    calls: list[KernelCall] = field(default_factory=list)
    state: Tensor | None = None
    width: int = 0

    def begin(self, offset: int, width: int) -> None:
        """Begin a pass over `width` tokens, with `offset` before them since the last commit."""
        if offset != self.width:
            raise RuntimeError(
                f"a recurrent layer has run {self.width} tokens since the last commit; the pass "
                f"begins {offset} after it"
            )
        self.width = offset + width

    def run(self, call: KernelCall, committed: Tensor | None) -> Tensor:
        """Run a kernel after the calls so far; the first continues from the committed state."""
        state = self.state if self.calls else committed
        if state is committed and state is not None and call.time is None:
            state = state.clone()
        output, self.state = call.run(state, call.inputs)
        self.calls.append(call)
        return output

    def convs_after(self, counts: Sequence[int]) -> dict[int, Tensor]:
        """The last inputs of the convolutions, once `counts` tokens of each row are committed."""
        return {
            number: _windows(whole, counts, whole.shape[-1] - self.width)
            for number, whole in self.read.items()
        }

    def state_after(self, counts: Sequence[int], committed: Tensor | None) -> Tensor | None:
        """The recurrence's state, once `counts` tokens of each row follow the committed ones."""
        groups = by_count(counts)
        if groups.keys() == {self.width}:
            return self.state
        if not self.calls:
            return committed
        states = [(self._after(n, _of(committed, rows), rows), rows) for n, rows in groups.items()]
        return _joined(states, len(counts))

    def _after(self, count: int, state: Tensor | None, rows: list[int]) -> Tensor | None:
        for call in self.calls:
            if count:
                ran = min(count, call.width)
                _, state = call.part(state, ran, rows)
                count -= ran
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs of these tokens."""
        read = sum(whole[..., -self.width :].nbytes for whole in self.read.values())
        return read + sum(x.nbytes for call in self.calls for x in call.inputs.values())


class RecurrentLayer:
    """The recurrent state of one layer, with the part of transformers' cache API that mixers call.

    A pass over tokens that will be committed (the prompt, or a pending token without drafts)
    updates the state immediately. After any other pass the state changes only at `commit`.

    Attributes:
        convs: by number, `[rows, channels, kernel]` the last committed inputs of a convolution.
        state: `[rows, ...]` the recurrence's state after the committed tokens; `None` before the
            first one, and in layers that only convolve.
        uncommitted: what it has read since these tokens.
    """

    def __init__(self, convs: Mapping[int, Tensor] | None = None, state: Tensor | None = None):
        self.convs, self.state = dict(convs or {}), state
        self.uncommitted = Uncommitted()
        self._width = 0  # tokens of the pass
        self._will_commit: list[int] | None = None  # per row, how many update the state immediately

    def begin(self, offset: int, width: int, will_commit: Sequence[int]) -> None:
        """Begin a pass; one at offset 0 forgets the passes since the last commit.

        Args:
            offset: tokens between the last committed one and the first of the pass.
            width: tokens of the pass.
            will_commit: per row, how many tokens after the committed ones are known to be
                committed later; all 0 if none are.
        """
        if offset == 0:
            self.uncommitted = Uncommitted()
        self.uncommitted.begin(offset, width)
        self._width = width
        self._will_commit = (
            [min(max(n - offset, 0), width) for n in will_commit] if any(will_commit) else None
        )

    @property
    def is_committing(self) -> bool:
        """Whether the pass updates the state immediately."""
        return self._will_commit is not None

    # The cache interface of a mixer

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a pass over one token uses `update_conv_state` as longer passes do."""
        return self._will_commit is None or self._width > 1 or 0 in self._will_commit

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The inputs of a convolution before the pass, `None` if there are none."""
        return self.uncommitted.read.get(state_idx, self.convs.get(state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Append inputs `[rows, channels, width]`; returns them preceded by the kernel's window."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        whole = torch.cat([before, conv_states], dim=-1)
        if self._will_commit is None:
            self.uncommitted.read[state_idx] = whole
        else:
            self.convs[state_idx] = _windows(whole, self._will_commit, conv_kernel_size)
        return whole[..., -conv_kernel_size - self._width :]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrence's state before the pass; `None` if it is empty."""
        return self.uncommitted.state if self.uncommitted.calls else self.state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, **kwargs: object
    ) -> Tensor:
        """Do nothing, because `run` has stored the state."""
        return recurrent_states

    def run(self, call: KernelCall) -> Tensor:
        """Run a kernel from the state before the pass; returns its output."""
        if self._will_commit is None:
            return self.uncommitted.run(call, self.state)
        output, self.state = call.run_first(self.state, self._will_commit)
        return output

    # The interface of the KV cache

    def commit(self, counts: Sequence[int]) -> None:
        """Commit `counts` more tokens in each row; those after them are rejected."""
        if self.uncommitted.width and self._will_commit is None:
            self.convs |= self.uncommitted.convs_after(counts)
            self.state = self.uncommitted.state_after(counts, self.state)
        self.uncommitted = Uncommitted()

    def part(self, rows: Sequence[int]) -> RecurrentLayer:
        """A copy with some rows, in the given order, between rounds."""
        convs = {number: conv[list(rows)] for number, conv in self.convs.items()}
        return RecurrentLayer(convs, None if self.state is None else self.state[list(rows)])

    @classmethod
    def join(cls, parts: Sequence[RecurrentLayer], rows: Sequence[int]) -> RecurrentLayer:
        """One layer with the rows of several; a state that a part lacks is 0."""
        numbers = {number for part in parts for number in part.convs}
        convs = {n: _stacked([part.convs.get(n) for part in parts], rows) for n in numbers}
        has_state = any(part.state is not None for part in parts)
        return cls(convs, _stacked([part.state for part in parts], rows) if has_state else None)

    @classmethod
    def load(cls, layer: LinearAttentionCacheLayerMixin) -> RecurrentLayer:
        """A copy of the states of a transformers cache."""
        convs = {n: conv.clone() for n, conv in layer.conv_states.items() if conv is not None}
        state = layer.recurrent_states[0]
        return cls(convs, None if state is None else state.clone())

    def store(self, layer: LinearAttentionCacheLayerMixin) -> None:
        """Replace the states of a transformers cache."""
        for number, conv in self.convs.items():
            layer.update_conv_state(conv, number)
        if self.state is not None:
            layer.update_recurrent_state(self.state)

    @property
    def nbytes(self) -> int:
        """Bytes of the committed states."""
        state = 0 if self.state is None else self.state.nbytes
        return state + sum(conv.nbytes for conv in self.convs.values())


def _stacked(states: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor:
    """The rows of several states, 0 where there is none."""
    some = next(state for state in states if state is not None)
    pairs = zip(states, rows, strict=True)
    return torch.cat([some.new_zeros(n, *some.shape[1:]) if s is None else s for s, n in pairs])


def _of(state: Tensor | None, rows: list[int]) -> Tensor | None:
    """A copy of the state of some rows."""
    return None if state is None else state[rows]


def _joined(states: Sequence[tuple[Tensor | None, list[int]]], rows: int) -> Tensor | None:
    """The states of all rows; zeros for rows without a state."""
    if len(states) == 1:
        return states[0][0]
    some = next((state for state, _ in states if state is not None), None)
    if some is None:
        return None
    whole = some.new_zeros(rows, *some.shape[1:])
    for state, at in states:
        if state is not None:
            whole[at] = state
    return whole


def _windows(inputs: Tensor, starts: Sequence[int], width: int) -> Tensor:
    """`[rows, channels, width]` a copy of each row's inputs from its start on."""
    if min(starts) == max(starts):
        return inputs[..., starts[0] : starts[0] + width].clone()
    cut = [row[..., at : at + width] for row, at in zip(inputs, starts, strict=True)]
    return torch.stack(cut)

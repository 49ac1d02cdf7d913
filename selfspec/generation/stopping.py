"""Stopping criteria: a block of new tokens is cut at the earliest stop."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)

from selfspec.decoder import Ranks
from selfspec.generation.rounds import StepRecord
from selfspec.sampling.context import Context


class Stops:
    """The stopping criteria of one call.

    Args:
        criteria: the criteria that `generate` prepared.
        ranks: the processes of the model; the first one decides.
    """

    def __init__(self, criteria: StoppingCriteriaList, ranks: Ranks):
        self.ranks = ranks
        self.eos = {
            int(token)
            for criterion in criteria
            if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.flatten()
        }
        # Transformers takes fractions, and stops at the first length that is not below.
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        lengths = [math.ceil(length) for length in lengths if math.isfinite(length)]
        self.max_length: int | None = min(lengths, default=None)
        self.deadlines = [
            criterion.initial_timestamp + criterion.max_time
            for criterion in criteria
            if type(criterion) is MaxTimeCriteria
        ]
        # A subclass may do something else.
        known = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.others: list[StoppingCriteria] = [c for c in criteria if type(c) not in known]

    def remaining(self, context: Context) -> int:
        """The most tokens that an unfinished row may still emit."""
        if self.max_length is None:
            return torch.iinfo(torch.long).max
        return self.max_length - min(context.lengths[row] for row in context.rows)

    def cut(
        self, context: Context, blocks: Sequence[Sequence[int]], scores: StepRecord
    ) -> tuple[list[int], list[bool]]:
        """How many tokens of each row's block are kept, and whether the row stops there.

        Args:
            context: committed tokens; with each row's block written after them if `others` is not
                empty.
            blocks: the new tokens of each unfinished row, in order.
            scores: scores for criteria that read them.
        """
        kept = [len(block) for block in blocks]
        ended = [False] * len(blocks)
        for index, block in enumerate(blocks):
            stop = self._stop_in(block, context.lengths[context.rows[index]])
            if stop is not None:
                kept[index], ended[index] = stop, True
        for index in range(len(blocks)) if self.others else ():
            stop = self._asked(context, index, kept[index], scores)
            if stop is not None:
                kept[index], ended[index] = stop, True
        return self._agreed(kept, ended)

    def _agreed(self, kept: list[int], ended: list[bool]) -> tuple[list[int], list[bool]]:
        """The same in all processes; that of the first one where they could differ."""
        if self.deadlines or self.others:
            kept, flags = self.ranks.first(torch.tensor([kept, ended], device="cpu")).tolist()
            ended = [bool(flag) for flag in flags]
        return kept, ended

    def after_step(
        self, context: Context, tokens: Sequence[int], text: Tensor, scores: StepRecord
    ) -> list[bool]:
        """Whether unfinished rows stop after one more token of every row, as in plain decoding.

        Args:
            context: the text of the rows, which are equally long.
            tokens: the new token of each unfinished row.
            text: `[batch, length]` the text of every row of the call, with the new tokens.
            scores: scores for criteria that read them, with those of the new tokens.
        """
        length, seen = text.shape[1] - 1, scores.steps()
        ended = [self._stop_in([token], length) is not None for token in tokens]
        for criterion in self.others:  # all are called: one may count its calls
            flags = _answer(criterion, text, seen).tolist()
            ended = [flags[row] or end for row, end in zip(context.rows, ended, strict=True)]
        return self._agreed([1] * len(ended), ended)[1]

    def _stop_in(self, block: Sequence[int], length: int) -> int | None:
        """Tokens up to the first stop by token id, length or time."""
        if self.deadlines and time.time() > min(self.deadlines):
            return 1
        stops = [count for count, token in enumerate(block, 1) if token in self.eos][:1]
        if self.max_length is not None and length + len(block) >= self.max_length:
            stops.append(max(1, self.max_length - length))  # the prompt may be longer
        return min(stops, default=None)

    def _asked(self, context: Context, index: int, limit: int, scores: StepRecord) -> int | None:
        """Tokens up to the first stop of the other criteria."""
        row = context.rows[index]
        for count in range(1, limit + 1):
            # Criteria get every row of the call, because they may depend on the row's index.
            tokens = context.tokens[:, : context.lengths[row] + count]
            seen = scores.until(row, index, count)
            # All are called, as in plain decoding: a criterion may count its calls.
            if any([_says_stop(criterion, tokens, seen, row) for criterion in self.others]):
                return count
        return None


class StopOnRequest(StoppingCriteria):
    """Stops all rows on request.

    Args:
        asked: called after every token; generation stops when it returns true.

    Attributes:
        said: whether it has returned true.
    """

    def __init__(self, asked: Callable[[], bool]):
        self.asked, self.said = asked, False

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        """`[batch]` whether to stop, the same for all rows."""
        self.said = self.said or self.asked()
        return torch.full(input_ids.shape[:1], self.said, device=input_ids.device)


def _says_stop(
    criterion: StoppingCriteria, tokens: Tensor, scores: tuple[Tensor, ...] | None, row: int
) -> bool:
    return bool(_answer(criterion, tokens, scores)[row])


def _answer(
    criterion: StoppingCriteria, tokens: Tensor, scores: tuple[Tensor, ...] | None
) -> Tensor:
    """`[rows]` what a criterion says of each row; some say one thing for all."""
    answer: Any = criterion(tokens, scores)  # pyright: ignore[reportArgumentType]
    return torch.as_tensor(answer, device="cpu").expand(tokens.shape[0])


_NEED_TOKENIZER = {"stop_strings": None, "token_healing": False}  # with values that do nothing


def without_tokenizer(
    config: GenerationConfig | None, own: GenerationConfig, options: dict[str, Any]
) -> GenerationConfig | None:
    """Take out what needs the tokenizer, which `generate` does not hand to custom loops.

    Args:
        config: the call's config; it is not changed, a copy is returned.
        own: the model's config.
        options: the call's other options; they override the model's own, `tokenizer` is removed.
    """
    options.pop("tokenizer", None)
    for name, neutral in _NEED_TOKENIZER.items():
        if name in options or getattr(own, name, None) not in (None, neutral):
            options[name] = neutral
        if getattr(config, name, None) not in (None, neutral):
            config = copy.deepcopy(config)
            setattr(config, name, neutral)
    return config


def with_stop_strings(
    criteria: StoppingCriteriaList | None,
    strings: str | list[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> StoppingCriteriaList:
    """The caller's criteria, and one for stop strings, unless the caller has one already.

    Raises:
        ValueError: there are stop strings, and no tokenizer.
    """
    known = StoppingCriteriaList(criteria or [])
    if strings is None:
        return known
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer; pass tokenizer=...")
    if not any(type(criterion) is StopStringCriteria for criterion in known):
        known.append(StopStringCriteria(tokenizer, strings))
    return known

"""Where a block of new tokens is cut: at the earliest stop of any criterion."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
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
from selfspec.sampling.sampler import Context


class Stops:
    """The stopping criteria of one call.

    Args:
        criteria: what `generate` prepared.
        ranks: the processes that write the text; the first one's answers hold.
    """

    def __init__(self, criteria: StoppingCriteriaList, ranks: Ranks):
        self.ranks = ranks
        self.eos = {
            int(token)
            for criterion in criteria
            if isinstance(criterion, EosTokenCriteria)
            for token in criterion.eos_token_id.flatten()
        }
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.max_length: int | None = min(lengths, default=None)
        self.deadlines = [
            criterion.initial_timestamp + criterion.max_time
            for criterion in criteria
            if isinstance(criterion, MaxTimeCriteria)
        ]
        known = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.others: list[StoppingCriteria] = [c for c in criteria if not isinstance(c, known)]

    def remaining(self, length: int) -> int:
        """Tokens that a row of `length` tokens may still emit."""
        if self.max_length is None:
            return torch.iinfo(torch.long).max
        return self.max_length - length

    def cut(
        self, context: Context, blocks: Sequence[Sequence[int]], scores: StepRecord
    ) -> tuple[list[int], list[bool]]:
        """How many tokens of each row's block stand, and whether the row ends there.

        Args:
            context: committed text, with each row's block written after it where there are others
                to ask.
            blocks: the new tokens of each unfinished row, in order.
            scores: what criteria that look at scores are given.
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
        if self.deadlines or self.others:  # the rest follows from the tokens
            kept, flags = self.ranks.first(torch.tensor([kept, ended])).tolist()
            ended = [bool(flag) for flag in flags]
        return kept, ended

    def _stop_in(self, block: Sequence[int], length: int) -> int | None:
        """Tokens up to the first stop that token ids, length or time make."""
        if self.deadlines and time.time() > min(self.deadlines):
            return 1
        stops = [place for place, token in enumerate(block, 1) if token in self.eos][:1]
        if self.max_length is not None and length + len(block) >= self.max_length:
            stops.append(self.max_length - length)
        return min(stops, default=None)

    def _asked(self, context: Context, index: int, limit: int, scores: StepRecord) -> int | None:
        """Tokens up to the first at which one of the other criteria says stop."""
        row = context.rows[index]
        for place in range(1, limit + 1):
            # Criteria see every row of the call, because they may know a row by its index.
            tokens = context.tokens[:, : context.lengths[row] + place]
            seen = scores.until(row, index, place)
            # All are asked, as in plain decoding: a criterion may count its calls.
            if any([_says_stop(criterion, tokens, seen, row) for criterion in self.others]):
                return place
        return None


class StopOnRequest(StoppingCriteria):
    """Ends a text when somebody says so.

    Args:
        asked: asked after every token; once it says yes, the text ends there.

    Attributes:
        said: whether it has said so.
    """

    def __init__(self, asked: Callable[[], bool]):
        self.asked, self.said = asked, False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """`[batch]` whether each row ends here, which is the same for all."""
        self.said = self.said or self.asked()
        return torch.full(input_ids.shape[:1], self.said, device=input_ids.device)


def _says_stop(
    criterion: StoppingCriteria, tokens: Tensor, scores: tuple[Tensor, ...] | None, row: int
) -> bool:
    answer = torch.as_tensor(criterion(tokens, scores))  # pyright: ignore[reportArgumentType]
    return bool(answer.expand(tokens.shape[0])[row])


def without_stop_strings(
    config: GenerationConfig | None,
    own: GenerationConfig,
    criteria: StoppingCriteriaList,
    options: dict[str, Any],
) -> GenerationConfig | None:
    """Turn stop strings into a criterion: `generate` drops the tokenizer for custom loops.

    Args:
        config: the call's; it stays as it is, a copy without stop strings is returned.
        own: the model's, which holds where the call says nothing.
        criteria: gains the criterion.
        options: the call's others, of which `stop_strings` and `tokenizer` are taken.

    Raises:
        ValueError: there are stop strings, and no tokenizer.
    """
    strings = options.pop("stop_strings", None)
    strings = strings or getattr(config, "stop_strings", None) or own.stop_strings
    tokenizer = options.pop("tokenizer", None)
    if not strings:
        return config
    if tokenizer is None:
        raise ValueError("stop_strings need the tokenizer; pass tokenizer=...")
    criteria.append(StopStringCriteria(tokenizer, strings))
    if own.stop_strings:
        options["stop_strings"] = None  # goes before the model's own, which stay as they are
    if config is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
    return config

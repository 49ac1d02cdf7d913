"""Forks of logits processors that have a state: copies that drafts may be shown to.

A processor with a state must not see a draft before it is accepted. A fork may: it starts with the
processor's state, sees the drafts of one round in order, and is thrown away. So it tells which
drafts the processor will allow, and which tokens it will force.

A fork is a logits processor. It may have a method `forced(input_ids)`: after a call with the same
tokens it returns, for each row, the tokens that are expected to follow because the grammar leaves
no choice; `[]` where it leaves one.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec.sampling.processors import Processor, runs_in_blocks


def fork(processor: object) -> Processor | None:
    """A fork of a processor, by its own method `fork()` or an adapter; `None` if there is none."""
    own = getattr(processor, "fork", None)
    if own is not None:
        return own()
    kind = type(processor)
    adapter = _ADAPTERS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if adapter is None else adapter(processor)


def for_request(processor: Processor) -> Processor:
    """A processor for one of several requests, so that each has a state of its own.

    Known processors have none. Of others a fork is made, or else a deep copy, which shares models
    and tokenizers.

    Raises:
        ValueError: it cannot be copied.
    """
    forked = processor if runs_in_blocks(processor) else fork(processor)
    if forked is not None:
        return forked
    large = (torch.nn.Module, PreTrainedTokenizerBase)
    parts = [
        part for part in getattr(processor, "__dict__", {}).values() if isinstance(part, large)
    ]
    try:
        return copy.deepcopy(processor, {id(part): part for part in parts})
    except Exception as error:
        raise ValueError(
            f"{type(processor).__name__} cannot be copied for each request ({error}); give it a "
            "method fork() that returns a copy of it (itself, if it has no state), or call generate"
        ) from error


def _xgrammar(processor: Any) -> Processor | None:
    """A fork of `xgrammar.contrib.hf.LogitsProcessor`."""
    return _of_xgrammar(processor, "matchers", "token_bitmask", processor.compiled_grammars[0])


def _outlines_xgrammar(processor: Any) -> Processor | None:
    """A fork of the logits processor of outlines' backend `xgrammar`."""
    if processor.is_first_token:
        return _copy(processor)
    return _of_xgrammar(processor, "_matchers", "_bitmask", processor.compiled_grammar)


def _of_xgrammar(processor: object, matchers: str, bitmask: str, grammar: Any) -> Processor | None:
    originals = getattr(processor, matchers)
    if not originals:
        return _copy(processor)  # it makes its matchers when it is first called
    if not hasattr(originals[0], "fork"):  # an old version
        return None
    forks = [matcher.fork() for matcher in originals]
    copied = _copy(processor, **{matchers: forks, bitmask: getattr(processor, bitmask).clone()})

    def forced(text: Tensor) -> list[list[int]]:
        strings = [b"" if m.is_terminated() else m.find_jump_forward_string() for m in forks]
        words = Words.of(grammar, grammar.tokenizer_info)
        return [words.spell(string, row) for string, row in zip(strings, text, strict=True)]

    copied.forced = forced
    return copied


class Words:
    """The tokens of a vocabulary by what they stand for.

    Args:
        vocabulary: the bytes of each token.
        special: tokens without bytes.
    """

    _of_grammars: ClassVar[dict[int, Words]] = {}

    def __init__(self, vocabulary: Sequence[bytes], special: Sequence[int]):
        self.words = dict(enumerate(vocabulary))
        for token in special:
            self.words.pop(token, None)
        self.tokens = {word: token for token, word in self.words.items() if word}
        self.longest = max(map(len, self.tokens), default=0)

    @classmethod
    def of(cls, grammar: object, tokenizer: Any) -> Words:
        """Those of xgrammar's `TokenizerInfo`, kept as long as the grammar lives."""
        key = id(grammar)  # it has no hash
        if key not in cls._of_grammars:
            cls._of_grammars[key] = cls(tokenizer.decoded_vocab, tokenizer.special_token_ids)
            weakref.finalize(grammar, cls._of_grammars.pop, key)
        return cls._of_grammars[key]

    def spell(self, string: str | bytes, text: Tensor) -> list[int]:
        """Tokens for a string, each the one that last followed the token before it, if it fits.

        A model has habits: it spells a key as it spelled it before. Elsewhere the longest token is
        taken.

        Args:
            string: what to spell.
            text: `[length]` the tokens before it.
        """
        left = string if isinstance(string, bytes) else string.encode()
        row, tokens = text.tolist() if left else [], []
        while left:
            token = self._habit(left, row) or self._longest(left)
            if token is None:
                break
            tokens.append(token)
            row.append(token)
            left = left[len(self.words[token]) :]
        return tokens

    def _habit(self, string: bytes, row: list[int]) -> int | None:
        """The last token after an earlier occurrence of the row's end that begins `string`."""
        for before, token in zip(row[-2::-1], row[:0:-1], strict=True):
            if before == row[-1]:
                word = self.words.get(token)
                if word and string.startswith(word):
                    return token
        return None

    def _longest(self, string: bytes) -> int | None:
        sizes = range(min(self.longest, len(string)), 0, -1)
        return next((self.tokens[string[:n]] for n in sizes if string[:n] in self.tokens), None)


def _outlines_llguidance(processor: Any) -> Processor | None:
    """A fork of the logits processor of outlines' backend `llguidance`."""
    if processor.is_first_token:
        return _copy(processor)
    forks = [matcher.deep_copy() for matcher in processor.ll_matchers]
    copied = _copy(processor, ll_matchers=forks, bitmask=processor.bitmask.clone())
    copied.forced = lambda text: [matcher.compute_ff_tokens() for matcher in forks]
    return copied


def _outlines_core(processor: Any) -> Processor | None:
    """A fork of the logits processor of outlines' backend `outlines_core`."""
    if processor.is_first_token:
        return _copy(processor)
    return OutlinesCoreFork(processor.index, processor._guides)


class OutlinesCoreFork:
    """Follows an index from the states of some guides, which cannot be copied themselves.

    Args:
        index: the `outlines_core.Index` of all rows.
        guides: the `outlines_core.Guide` of each row.
    """

    def __init__(self, index: Any, guides: Sequence[Any]):
        self._index, self._states = index, [guide.get_state() for guide in guides]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Forbid what the index does not allow after the last token of each row."""
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for row, token in enumerate(input_ids[:, -1].tolist()):
            state = self._index.get_next_state(self._states[row], token)
            self._states[row] = self._states[row] if state is None else state
            tokens = self._index.get_allowed_tokens(self._states[row]) or []
            allowed[row, tokens] = True
        return scores.masked_fill(~allowed, -torch.inf)


def _copy(processor: object, **changed: object) -> Any:
    """A shallow copy with some attributes of its own; methods kept as attributes are its own."""
    copied = copy.copy(processor)
    for name, value in vars(processor).items():
        if isinstance(value, MethodType) and value.__self__ is processor:
            setattr(copied, name, MethodType(value.__func__, copied))
    for name, value in changed.items():
        setattr(copied, name, value)
    return copied


# By the class's name, so that no library is imported for it. A subclass may have more state.
_ADAPTERS: dict[str, Callable[[Any], Processor | None]] = {
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _outlines_llguidance,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _outlines_core,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _outlines_xgrammar,
    "xgrammar.contrib.hf.LogitsProcessor": _xgrammar,
}

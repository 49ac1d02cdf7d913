"""How a draft model reads the target's tokens, and how its logits become the target's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import torch
from tokenizers import Tokenizer
from torch import Tensor

from selfspec.sampling.vocabulary import DraftVocabulary


class TokenMap:
    """Between two models of one tokenizer, whose vocabularies may be padded to different sizes.

    Tokens that both models have are drafted. A token that the draft model lacks is shown to it as
    token 0.

    Args:
        target_size: tokens of the target.
        draft_size: tokens of the draft model.
        device: the draft model's.

    Attributes:
        vocabulary: the tokens that both models have.
    """

    def __init__(self, target_size: int, draft_size: int, device: torch.device):
        self.draft_size = draft_size
        shared = torch.arange(draft_size, device=device) if draft_size < target_size else None
        self.vocabulary = DraftVocabulary(target_size, shared)

    def drafted(self, tokens: Tensor) -> Tensor:
        """The draft model's ids of drafted tokens."""
        return tokens.masked_fill(tokens >= self.draft_size, 0)

    def logits(self, logits: Tensor) -> Tensor:
        """Those of the draft model's logits that are of `vocabulary`."""
        return logits[..., : min(self.vocabulary.size, self.draft_size)]

    def encode(self, tokens: Sequence[int], before: Sequence[int]) -> list[int]:
        """The draft model's ids of a part of the target's text.

        Args:
            tokens: the part.
            before: all tokens before it.
        """
        return [token if token < self.draft_size else 0 for token in tokens]


class SharedTokens(TokenMap):
    """Between two tokenizers, by token-level intersection (Timor et al. 2025, Algorithm 4).

    Tokens that stand for the same bytes in both vocabularies are drafted: the draft model's
    distribution is renormalised on them, and drafts are verified as any others, so every rule stays
    exact. The draft model reads the prompt as its own tokenizer splits it, then the shared tokens
    one by one; what it does not share is decoded and tokenized anew.

    Args:
        target: the target's tokenizer.
        draft: the draft model's tokenizer.
        target_size: tokens of the target.
        draft_size: tokens of the draft model.
        device: the draft model's.

    Raises:
        ValueError: the vocabularies share no token.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Tokenizer,
        target_size: int,
        draft_size: int,
        device: torch.device,
    ):
        super().__init__(target_size, draft_size, device)
        self._target, self._draft = _unlimited(target), _unlimited(draft)
        drafts = _by_spelling(draft, draft_size)
        mine = _by_spelling(target, target_size)
        self._shared = {mine[text]: drafts[text] for text in mine if text in drafts}
        if not self._shared:
            raise ValueError(
                "the tokenizers of the draft model and of the target share no token, so nothing "
                "can be drafted; choose a draft model with more of the target's vocabulary"
            )
        ids = torch.tensor([*self._shared], device=device)
        self.vocabulary = DraftVocabulary(target_size, ids)
        self._draft_ids = torch.tensor([*self._shared.values()], device=device)
        self._draft_of = torch.zeros(target_size, dtype=torch.long, device=device)
        self._draft_of[ids] = self._draft_ids

    def drafted(self, tokens: Tensor) -> Tensor:
        """See `TokenMap.drafted`."""
        return self._draft_of[tokens]

    def logits(self, logits: Tensor) -> Tensor:
        """See `TokenMap.logits`."""
        return logits[..., self._draft_ids]

    def encode(self, tokens: Sequence[int], before: Sequence[int]) -> list[int]:
        """See `TokenMap.encode`."""
        if not before:
            return self._first(list(tokens))
        ids: list[int] = []
        for is_shared, group in groupby(tokens, self._shared.__contains__):
            run = list(group)
            if is_shared:
                ids += [self._shared[token] for token in run]
            else:
                # Some tokenizers drop the space before a text's first token.
                start = self._target.decode([before[-1]], skip_special_tokens=False)
                text = self._target.decode([before[-1], *run], skip_special_tokens=False)
                ids += self._split(text[len(start) :])
            before = run
        return ids

    def _first(self, tokens: list[int]) -> list[int]:
        """The ids of a prompt, which begins with what the draft model's tokenizer begins with."""
        mine, others = (one.encode("").ids for one in (self._target, self._draft))
        rest = tokens[len(mine) :] if tokens[: len(mine)] == mine else tokens
        ids = self._split(self._target.decode(rest, skip_special_tokens=False))
        return ids if ids[: len(others)] == others else others + ids

    def _split(self, text: str) -> list[int]:
        """The ids of a text, at least one."""
        ids = self._draft.encode(text, add_special_tokens=False).ids
        return [token if token < self.draft_size else 0 for token in ids] or [0]


@lru_cache(maxsize=8)
def shared_tokens(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int, device: torch.device
) -> SharedTokens:
    """`SharedTokens`, made once: large vocabularies take seconds."""
    return SharedTokens(target, draft, target_size, draft_size, device)


def _unlimited(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that neither truncates nor pads."""
    copied = Tokenizer.from_str(tokenizer.to_str())
    copied.no_truncation()
    copied.no_padding()
    return copied


def _by_spelling(tokenizer: Tokenizer, size: int) -> dict[tuple[bytes, bool], int]:
    """The tokens below `size` by their bytes and by whether they are special; the first id wins."""
    spelled: dict[tuple[bytes, bool], int] = {}
    added: Mapping[int, object] = tokenizer.get_added_tokens_decoder()
    special = {token for token, one in added.items() if getattr(one, "special", False)}
    in_bytes = "ByteLevel" in repr(tokenizer.decoder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for text, token in sorted(vocabulary.items(), key=lambda pair: pair[1]):
        if token < size:
            raw = text.encode() if token in added else _spelling(text, in_bytes)
            spelled.setdefault((raw, token in special), token)
    return spelled


# The letters that byte-level tokenizers (GPT-2) write bytes in: visible ones stand for themselves.
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE}
_BYTE_OF |= {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _spelling(text: str, in_bytes: bool) -> bytes:
    """The bytes that a token's entry in the vocabulary stands for."""
    if in_bytes and all(letter in _BYTE_OF for letter in text):
        return bytes(_BYTE_OF[letter] for letter in text)
    fallback = _FALLBACK.fullmatch(text)
    return bytes.fromhex(fallback[1]) if fallback else text.replace("▁", " ").encode()

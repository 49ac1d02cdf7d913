"""Smaller models that draft for a target: loaded once and checked against it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import nn
from transformers.utils.hub import cached_file

from selfspec.config import DraftConfig
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import find_checkpoint, load_causal_lm
from selfspec.drafters.token_map import TokenMap, shared_tokens
from selfspec.heads.files import read_object

# Tokenizers, and pairs of them, that are kept for the next call. A call may bring new ones.
_TOKENIZERS = 8


class DraftModel(NamedTuple):
    """A model that drafts for a target.

    Attributes:
        decoder: the model.
        tokens: how it reads and writes the target's tokens.
    """

    decoder: Decoder
    tokens: TokenMap


class DraftModels:
    """The draft models of one target.

    Args:
        target: the model that they draft for.
        given: used if a config names none: a model, a folder or an id.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: it cannot be run, or its tokenizer is needed and not found.
    """

    def __init__(self, target: Decoder, given: nn.Module | str | Path | None = None):
        self._target = target
        self._loaded: dict[str, DraftModel] = {}
        self._given: DraftModel | None = None
        if isinstance(given, (str, Path)):
            self._given = self._load(str(given))
        elif given is not None:
            self._given = self._admit(given)

    @property
    def given(self) -> nn.Module | None:
        """The model that is used if a config names none."""
        return None if self._given is None else self._given.decoder.causal_lm

    def beside(self, model: nn.Module, tokenizers: Sequence[object] = (None, None)) -> DraftModels:
        """A copy with another given model.

        Args:
            model: the model.
            tokenizers: of the target and of the model; `None` for those in their folders.

        Raises:
            ValueError: it cannot be run, or its tokenizer is needed and not found.
        """
        other = copy.copy(self)
        other._given = self._admit(model, tokenizers)
        return other

    def chosen(self, config: DraftConfig) -> DraftModel:
        """The model that a config names, else the given one; loaded once, then kept.

        Raises:
            OSError: there is no such checkpoint.
            ValueError: there is none, it cannot be run, or its tokenizer is needed and not found.
        """
        if config.draft_model is not None:
            return self._load(config.draft_model)
        if self._given is None:
            raise ValueError(
                "drafter 'two_model' needs a smaller model, got none; pass assistant_model=... to "
                "generate, draft_model=... to SelfSpecModel, or set draft_model in the draft config"
            )
        return self._given

    def _load(self, path: str) -> DraftModel:
        if path not in self._loaded:
            device, dtype = self._target.device, self._target.dtype
            model: Any = load_causal_lm(find_checkpoint(path), dtype=dtype)
            self._loaded[path] = self._admit(model.to(device))
        return self._loaded[path]

    def _admit(
        self, draft_model: nn.Module, tokenizers: Sequence[object] = (None, None)
    ) -> DraftModel:
        """A checked draft model."""
        try:
            decoder = Decoder(draft_model, self._target.requested_kernels)
        except ValueError as error:
            raise ValueError(f"draft model: {error}") from None
        tokens = token_map(self._target, decoder, tokenizers)
        # A model has one set of gates; as its own draft model it shares the target's.
        itself = decoder.causal_lm is self._target.causal_lm
        return DraftModel(self._target if itself else decoder, tokens)


def token_map(target: Decoder, small: Decoder, tokenizers: Sequence[object]) -> TokenMap:
    """How `small` reads and writes the tokens of `target`.

    Models of one tokenizer may have padded its vocabulary to different sizes. Where the tokenizers
    are not both there to be compared, the sizes are.

    Raises:
        ValueError: the tokenizers are needed and not both there, or share no token.
    """
    models = target, small
    one, other = map(_tokenizer, models, tokenizers)
    if one is None or other is None:
        if small.vocab_size != target.vocab_size:
            names = [d.causal_lm.name_or_path or type(d.causal_lm).__name__ for d in models]
            raise ValueError(
                f"the draft model {names[1]} has a vocabulary of {small.vocab_size} tokens, the "
                f"target {names[0]} one of {target.vocab_size}, and their tokenizers are not both "
                "known; load both from folders with a tokenizer.json, pass tokenizer and "
                "assistant_tokenizer, or choose a draft model with the target's tokenizer"
            )
    elif not _same_words(one, other):
        one, other = map(_loaded, (one, other))
        return shared_tokens(one, other, target.vocab_size, small.vocab_size, small.device)
    return TokenMap(target.vocab_size, small.vocab_size, small.device)


def _tokenizer(decoder: Decoder, given: object) -> Tokenizer | Path | None:
    """The tokenizer that was given for a model, else the file of its own."""
    if given is None:
        return _tokenizer_of(decoder)
    backend = getattr(given, "backend_tokenizer", given)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            "tokenizer and assistant_tokenizer have to be tokenizers of transformers that the "
            f"package `tokenizers` runs, got {type(given).__name__}"
        )
    return backend


@lru_cache(maxsize=_TOKENIZERS)
def _loaded(tokenizer: Tokenizer | Path) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    try:
        return Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{tokenizer} cannot be read: {error}") from None


def _tokenizer_of(decoder: Decoder) -> Path | None:
    """The tokenizer file of a model's folder, or of its hub id if it has been downloaded."""
    name = decoder.causal_lm.name_or_path
    try:
        found = cached_file(name, "tokenizer.json", local_files_only=True) if name else None
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


@lru_cache(maxsize=_TOKENIZERS)
def _same_words(one: Tokenizer | Path, other: Tokenizer | Path) -> bool:
    if isinstance(one, Path) and isinstance(other, Path) and one.read_bytes() == other.read_bytes():
        return True
    return _words(one) == _words(other)


def _words(tokenizer: Tokenizer | Path) -> object:
    """The vocabulary of a tokenizer: ids of words, or words with their scores."""
    if isinstance(tokenizer, Tokenizer):
        return json.loads(tokenizer.to_str())["model"]["vocab"]
    model = read_object(tokenizer).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ValueError(
            f"{tokenizer} has no model.vocab, so it cannot be compared; is it damaged?"
        )
    return model["vocab"]

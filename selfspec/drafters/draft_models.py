"""Smaller models that draft for a target: loaded once and checked against it."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils.hub import cached_file

from selfspec.config import DraftConfig
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import find_checkpoint, load_causal_lm
from selfspec.heads.files import read_object


class DraftModels:
    """The draft models of one target.

    Args:
        target: the model that they draft for.
        given: used if a config names none: a model, a folder or an id.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: it cannot be run, or has another tokenizer.
    """

    def __init__(self, target: Decoder, given: nn.Module | str | Path | None = None):
        self._target = target
        self._loaded: dict[str, Decoder] = {}
        self._given: Decoder | None = None
        if isinstance(given, (str, Path)):
            self._given = self._load(str(given))
        elif given is not None:
            self._given = self._admit(given)

    @property
    def given(self) -> nn.Module | None:
        """The model that is used if a config names none."""
        return None if self._given is None else self._given.causal_lm

    def beside(self, model: nn.Module) -> DraftModels:
        """A copy with another given model.

        Raises:
            ValueError: it cannot be run, or has another tokenizer.
        """
        other = copy.copy(self)
        other._given = self._admit(model)
        return other

    def chosen(self, config: DraftConfig) -> Decoder:
        """The model that a config names, else the given one; loaded once, then kept.

        Raises:
            OSError: there is no such checkpoint.
            ValueError: there is none, it cannot be run, or it has another tokenizer.
        """
        if config.draft_model is not None:
            return self._load(config.draft_model)
        if self._given is None:
            raise ValueError(
                "drafter 'two_model' needs a smaller model, got none; pass assistant_model=... to "
                "generate, draft_model=... to SelfSpecModel, or set draft_model in the draft config"
            )
        return self._given

    def _load(self, path: str) -> Decoder:
        if path not in self._loaded:
            device, dtype = self._target.device, self._target.dtype
            model: Any = load_causal_lm(find_checkpoint(path), dtype=dtype)
            self._loaded[path] = self._admit(model.to(device))
        return self._loaded[path]

    def _admit(self, draft_model: nn.Module) -> Decoder:
        """A checked decoder of a draft model."""
        try:
            decoder = Decoder(draft_model, self._target.requested_kernels)
        except ValueError as error:
            raise ValueError(f"draft model: {error}") from None
        check_vocabulary(self._target, decoder)
        # A model has one set of gates; as its own draft model it shares the target's.
        return self._target if decoder.causal_lm is self._target.causal_lm else decoder


def check_vocabulary(target: Decoder, small: Decoder) -> None:
    """Raise ValueError unless both have one tokenizer.

    Models of one tokenizer may have padded its vocabulary to different sizes. Where the tokenizers
    are not both there to be compared, the sizes are.
    """
    names = [d.causal_lm.name_or_path or type(d.causal_lm).__name__ for d in (target, small)]
    remedy = "choose a draft model with the target's tokenizer"
    one, other = (_tokenizer_of(decoder) for decoder in (target, small))
    if one is None or other is None:
        if small.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model {names[1]} has a vocabulary of {small.vocab_size} tokens, the "
                f"target {names[0]} one of {target.vocab_size}; {remedy}, or, if only the padding "
                "differs, load both from folders with a tokenizer.json"
            )
    elif not _same_words(one, other):
        raise ValueError(
            f"the tokenizers of the draft model {names[1]} and of the target {names[0]} have "
            f"different vocabularies; {remedy}"
        )


def _tokenizer_of(decoder: Decoder) -> Path | None:
    """The tokenizer file of a model's folder, or of its hub id if it has been downloaded."""
    name = decoder.causal_lm.name_or_path
    try:
        found = cached_file(name, "tokenizer.json", local_files_only=True) if name else None
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


@cache
def _same_words(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes() or _words(one) == _words(other)


def _words(path: Path) -> Any:
    """The vocabulary of a tokenizer: ids of words, or words with their scores."""
    model = read_object(path).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ValueError(f"{path} has no model.vocab, so it cannot be compared; is it damaged?")
    return model["vocab"]

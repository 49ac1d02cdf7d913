"""Trains a byte-level BPE tokenizer, and carries weights over from another vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.config import StrictConfig

from ..data import SourceConfig, read_texts
from ..loop.checkpoint import write_folder

END = "<|endoftext|>"


class TokenizerConfig(StrictConfig):
    """A byte-level BPE vocabulary.

    Attributes:
        vocab_size: number of tokens.
        megabytes: text it is trained on, shared out among the sources by weight.
    """

    vocab_size: int = Field(default=6144, ge=300)
    megabytes: float = Field(default=16.0, gt=0)


def train_tokenizer(
    config: TokenizerConfig, sources: Sequence[SourceConfig], folder: Path
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on a sample of the sources and save it to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(sources, config.megabytes * 1e6), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
    )
    write_folder(folder, fast.save_pretrained)
    return fast


def _sample(sources: Sequence[SourceConfig], characters: float) -> Iterator[str]:
    total = sum(source.weight for source in sources)
    for source in sources:
        share = int(characters * source.weight / total)
        texts = [text for text in read_texts(source) if text]
        # Something of every document: one novel is one voice, one module one habit.
        part = max(1000, share // max(1, len(texts)))
        yield from (text[:part] for text in texts)


@torch.no_grad()
def carry_over(
    source: PreTrainedModel,
    old: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    new: PreTrainedTokenizerBase,
) -> None:
    """Copy the weights of `source` into `model`, a model of the same shape but for its vocabulary.

    A token that both vocabularies have keeps its row, and so does the end of a text, whatever it
    is called; any other token starts as the mean of the rows that the old vocabulary would write
    it with.

    Raises:
        ValueError: the models differ in shape beyond the vocabulary.
    """
    weights, places = source.state_dict(), model.state_dict(keep_vars=True)
    rows = _rows(old, new)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    words = {id(parameter) for table in tables if table for parameter in table.parameters()}
    for name in sorted(weights.keys() | places):
        given, place = weights.get(name), places.get(name)
        by_word = id(place) in words
        shapes = [None if t is None else tuple(t.shape)[by_word:] for t in (place, given)]
        if given is None or place is None or shapes[0] != shapes[1]:
            raise ValueError(
                f"init_from does not fit the model: {name} is {shapes[0]} here and {shapes[1]} "
                "there; give both the same shape but for the vocabulary"
            )
        place.copy_(torch.stack([given[row].mean(0) for row in rows]) if by_word else given)


def _rows(old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> list[Tensor]:
    known = old.get_vocab()
    if new.eos_token is not None and old.eos_token is not None:
        known[str(new.eos_token)] = known[str(old.eos_token)]
    tokens = new.convert_ids_to_tokens(list(range(len(new))))
    rows: list[Tensor] = []
    for number, token in enumerate(tokens):
        pieces = [known[token]] if token in known else _pieces(old, str(new.decode([number])))
        rows.append(torch.tensor(pieces))
    return rows


def _pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids or [0]

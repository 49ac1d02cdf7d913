"""Prompts of benchmarks and of `tune`: prompt sets, passages of text, padded batches."""

from __future__ import annotations

import glob
import itertools
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from selfspec import DEMO_MODEL
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.chat_templates import encode_chat
from selfspec.apps.display.demo import load_prompts
from selfspec.config import JsonObject
from selfspec.records import sound_fields

ItemT = TypeVar("ItemT")
_STRAIGHT = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})  # noqa: RUF001


def clean_prose(text: str) -> str:
    """Straight quotes, single spaces, one paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", text.translate(_STRAIGHT))
    return "\n".join(folded for part in paragraphs if (folded := " ".join(part.split())))


# Of conversations only the first turn is used. MBPP's test split has ids 11 to 510.
_TEMPLATES = {
    "gsm8k": "Question: {question}\nAnswer:",
    "humaneval": "{prompt}",
    "mbpp": '"""{text}"""\n',
    "mt_bench": "{turn}",
    "spec_bench": "{turn}",
}
_MBPP_TEST = range(11, 511)


def read_prompts(
    config: PromptSetConfig, tokenizer: PreTrainedTokenizerBase, longest: int | None = None
) -> list[list[int]]:
    """Token ids of a set's prompts; questions longer than `longest` tokens are dropped.

    Raises FileNotFoundError without the file, ValueError for a malformed record or too few prompts.
    """
    if config.reader == "text":
        prompts = _passages(config, tokenizer)
    elif config.reader == "random":
        prompts = _drawn(config, tokenizer)
    else:
        asked = [_asked(config, tokenizer, record) for record in _records(config)]
        low, high = config.lengths or (1, longest or max(map(len, asked), default=1))
        fitting = [prompt for prompt in asked if low <= len(prompt) <= high]
        prompts = evenly(fitting, config.count or len(fitting))
    too_long = max(map(len, prompts), default=0)
    if longest is not None and too_long > longest:
        raise ValueError(
            f"prompt set {config.name!r} has {too_long} tokens in a prompt, the model leaves "
            f"{longest} beside max_new_tokens; lower prompt_tokens or max_new_tokens"
        )
    if not prompts or len(prompts) < config.count:
        raise ValueError(
            f"prompt set {config.name!r} has {len(prompts)} prompts of the wanted length, "
            f"{config.count or 'some'} were asked for; lower count or widen prompt_tokens"
        )
    return prompts


def _drawn(config: PromptSetConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Prompts of random tokens, the same in every run."""
    source = random.Random(0)
    tokens = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    return [source.choices(tokens, k=length) for length in _lengths(config, config.count)]


def _lengths(config: PromptSetConfig, count: int) -> list[int]:
    """Lengths from the shortest to the longest, evenly spaced."""
    assert config.lengths is not None
    low, high = config.lengths
    return [low + (high - low) * number // max(1, count - 1) for number in range(count)]


def _asked(
    config: PromptSetConfig, tokenizer: PreTrainedTokenizerBase, record: JsonObject
) -> list[int]:
    """Token ids of a record's question or chat."""
    if config.reader != "chat":
        question = _question(config, record)
        if config.chat:
            return encode_chat(tokenizer, [{"role": "user", "content": question}])
        return tokenizer(question, verbose=False).input_ids
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"prompt set {config.name!r}: a chat is a record with a list of messages, and one has "
            f"{', '.join(sorted(set(record) - {'turn'})) or 'nothing'}"
        )
    return encode_chat(tokenizer, messages)


# Questions


def _records(config: PromptSetConfig) -> Iterator[JsonObject]:
    path = Path(config.path or DEMO_MODEL.parent / "prompts" / f"{config.reader}.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file at {path}, which {config.name!r} reads")
    for record in sound_fields(path, "records"):
        if config.reader != "mbpp" or record.get("task_id", 11) in _MBPP_TEST:
            yield record | {"turn": (record.get("turns") or [None])[0]}


def evenly(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """At most `count` evenly spaced items."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def _question(config: PromptSetConfig, record: JsonObject) -> str:
    template = config.template or _TEMPLATES[config.reader]
    try:
        text = template.format(**{k: v for k, v in record.items() if v is not None})
    except (KeyError, IndexError, ValueError) as error:
        fields = ", ".join(sorted(set(record) - {"turn"}))
        raise ValueError(
            f"prompt set {config.name!r}: {config.reader} records are read as {template!r}, and "
            f"one has no such field ({error}); it has {fields}"
        ) from None
    return clean_prose(text) if config.clean == "prose" else text


# Plain text


def _passages(config: PromptSetConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Evenly spaced passages, each from the start of a line, cut at a token count."""
    texts = [clean_prose(text) if config.clean == "prose" else text for text in _texts(config)]
    count = config.count or len(texts)
    prompts: list[list[int]] = []
    for number, length in enumerate(_lengths(config, count)):
        text, turn = texts[number % len(texts)], number // len(texts)
        turns = len(range(number % len(texts), count, len(texts)))
        place = len(text) * (2 * turn + 1) // (2 * turns)
        passage = _passage(config, tokenizer, text, place, length)
        if passage is not None:
            prompts.append(passage)
    return prompts


def _passage(
    config: PromptSetConfig, tokenizer: PreTrainedTokenizerBase, text: str, place: int, length: int
) -> list[int] | None:
    """`length` tokens from the line after `place`, or else from the start of the text."""
    for start in (text.find("\n", place) + 1, 0):
        # Far more characters than as many tokens have on average.
        ids = tokenizer(text[start : start + 24 * length], verbose=False).input_ids
        if len(ids) >= length:
            return ids[:length]
    # The passages in the package are short; they may have a few tokens less.
    return ids if config.path is None else None


def _texts(config: PromptSetConfig) -> list[str]:
    if config.path is None:
        return [prompt.text for prompt in load_prompts()]
    pattern = config.path.replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())  # noqa: PTH207
    if not files:
        raise FileNotFoundError(f"no text file at {config.path}, which {config.name!r} reads")
    texts = [fields["text"] for file in files for fields in sound_fields(file, "text")]
    return [text for text in texts if text.strip()]


def cut_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], tokens: int, count: int
) -> list[Tensor]:
    """At most `count` evenly spaced prompts `[length]` of at most `tokens` tokens.

    Long texts are cut into several prompts; a short one gives one shorter prompt. No texts take the
    passages in the package. Raises ValueError if the texts hold no token.
    """
    found: list[Tensor] = []
    for text in texts or [passage.text for passage in load_prompts()]:
        ids = torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.long)
        whole = len(ids) // tokens * tokens or len(ids)
        found += [part for part in ids[:whole].split(tokens) if len(part)]
    if not found:
        raise ValueError(f"the {len(texts)} texts hold no token; tuning needs text to write on")
    return evenly(found, count)


def padded(prompts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as `[rows, width]`, padded with 0 on the left, and their attention mask."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    mask = pad([torch.ones_like(prompt) for prompt in prompts])
    return pad(list(prompts)).to(device), mask.to(device)


class Batch(NamedTuple):
    """Prompts padded on the left: `[rows, width]` token ids, and a mask with 1 for real tokens."""

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, prompt: Tensor) -> Batch:
        """One prompt `[1, width]` alone."""
        return cls(prompt, torch.ones_like(prompt))

    @property
    def rows(self) -> int:
        """Number of prompts."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Tokens of the longest."""
        return self.tokens.shape[1]

    def row(self, index: int) -> Batch:
        """One prompt with its padding, which a repetition penalty sees, too."""
        return Batch(self.tokens[index : index + 1], self.mask[index : index + 1])


def make_batches(prompts: Sequence[Tensor], rows: int, device: torch.device) -> list[Batch]:
    """Batches of exactly `rows` prompts `[width]`; the last is filled up with the first again."""
    endless = itertools.cycle(prompts)
    return [
        Batch(*padded(list(itertools.islice(endless, rows)), device))
        for _ in range(0, len(prompts), rows)
    ]

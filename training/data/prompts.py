"""Prompts from text and chats for `training.regenerate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from selfspec.apps.bench.prompts import evenly
from selfspec.apps.chat_templates import check_template
from selfspec.config import StrictConfig

from . import SourceConfig, read_texts
from .chats import Chat, frame, read_chat
from .sources import is_chat, use_records


class Prompt(NamedTuple):
    """A prompt for the target.

    Attributes:
        tokens: token ids.
        source: name of the source.
        chat: the chat; `None` for plain text.
        opened: what the prompt has opened of the reply, such as `<think>`.
    """

    tokens: list[int]
    source: str
    chat: Chat | None = None
    opened: str = ""


class PromptConfig(StrictConfig):
    """Where prompts are cut.

    Attributes:
        tokens: tokens of a plain-text prompt. A chat is taken up to its last reply.
        every: tokens from one prompt to the next in a plain-text document.
        count: number of prompts, divided by the sources' weights, evenly spaced in each; 0 takes
            all.
    """

    tokens: int = Field(default=32, ge=1)
    every: int = Field(default=256, ge=1)
    count: int = Field(default=0, ge=0)


def read_prompts(
    sources: Sequence[SourceConfig],
    config: PromptConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    longest: int | None = None,
) -> list[Prompt]:
    """The prompts of all sources in random order.

    Args:
        sources: text, or chats; not both.
        config: where prompts are cut.
        tokenizer: the target's.
        seed: decides the order.
        longest: the most tokens that leave room for the output; longer prompts are dropped.

    Raises:
        FileNotFoundError: a source has no files.
        ValueError: sources mix text and chats, a record is malformed, or a source has no prompt.
    """
    if len({is_chat(source) for source in sources}) > 1:
        raise ValueError(
            "data mixes plain text and chats, which no one file can hold; write each in a run of "
            "its own"
        )
    found: list[Prompt] = []
    total = sum(source.weight for source in sources)
    for source in sources:
        prompts = list(_of_source(source, config, tokenizer))
        fitting = [p for p in prompts if longest is None or len(p.tokens) <= longest]
        if not fitting:
            raise ValueError(_nothing(source, config, len(prompts), longest))
        share = round(config.count * source.weight / total) if config.count else len(fitting)
        found += evenly(fitting, share)
    return [found[place] for place in np.random.default_rng(seed).permutation(len(found))]


def _of_source(
    source: SourceConfig, config: PromptConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Prompt]:
    if is_chat(source):
        check_template(tokenizer)
        prompts = partial(_of_chat, source=source, tokenizer=tokenizer)
        yield from use_records(source, prompts, unused="hold nothing but the assistant's turns")
        return
    # The output is later read as a document, so a prompt begins like one.
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for text in read_texts(source):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        for place in range(0, len(ids) - config.tokens + 1, config.every):
            yield Prompt(start + ids[place : place + config.tokens], source.name)


def _of_chat(
    fields: Mapping[str, Any], source: SourceConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The chat without the replies that end it; none if nothing is left."""
    chat = read_chat(fields).asked()
    if not chat.messages:
        return []
    text = chat.render(tokenizer, reply_next=True)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return [Prompt(ids, source.name, chat, frame(chat, tokenizer, text)[0])]


def _nothing(source: SourceConfig, config: PromptConfig, found: int, longest: int | None) -> str:
    if longest is not None and longest < 1:
        return (
            f"new_tokens leaves no room for a prompt: it is {1 - longest} tokens or more too long "
            "for the model's positions; lower it"
        )
    if found:
        return (
            f"all {found} prompts of {source.name} are longer than {longest} tokens, what the "
            "model's positions leave beside new_tokens; lower new_tokens or prompts.tokens"
        )
    return (
        f"{source.name} has no prompt: no document of {config.tokens} tokens, and no chat but such "
        "as hold nothing but the assistant's turns; lower prompts.tokens, or give other text"
    )

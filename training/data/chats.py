"""Chats in the formats that people have, and as documents with their replies marked as trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from selfspec.apps.bench.prompts import render_chat

Message = dict[str, Any]


class BadRecord(ValueError):
    """A record that cannot be used, among others that can."""


class Document(NamedTuple):
    """One text as tokens.

    Attributes:
        tokens: token ids.
        trained: per token, whether it is a training target.
    """

    tokens: list[int]
    trained: list[bool]


class Chat(NamedTuple):
    """A chat.

    Attributes:
        messages: each with `role` and `content`, a string.
        options: what the template gets beside them: `tools`, `documents`, `chat_template_kwargs`.
    """

    messages: list[Message]
    options: dict[str, Any]

    def asked(self) -> Chat:
        """The chat up to the last turn that is not the assistant's; it may be empty."""
        turns = [n for n, m in enumerate(self.messages, 1) if m["role"] != "assistant"]
        return Chat(self.messages[: max(turns, default=0)], self.options)

    def render(self, tokenizer: PreTrainedTokenizerBase, reply_next: bool) -> str:
        """The chat through the template; `reply_next` opens the assistant's turn.

        Raises:
            BadRecord: the template fails.
        """
        try:
            return render_chat(tokenizer, self.messages, reply_next, **self.options)
        except Exception as error:  # a template is a program of its own
            name = type(error).__name__
            raise BadRecord(f"the chat template fails on it ({name}: {error})") from error


# Formats

# Fields that hold the messages, and pairs of fields that hold a question and its answer.
_LISTS = ("messages", "conversations", "conversation")
_PAIRS = {"completion": ("prompt",), "output": ("instruction", "input")}
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_SHAREGPT = {"user", "assistant", "system", "tool", "function_call"}
_OPTIONS: dict[str, type] = {"tools": list, "documents": list, "chat_template_kwargs": dict}


def is_chat_record(fields: Mapping[str, Any]) -> bool:
    """Whether a record's fields are those of a chat, and not those of a text."""
    if any(name in fields for name in _LISTS):
        return True
    return "text" not in fields and _pair(fields) is not None


def read_chat(fields: Mapping[str, Any]) -> Chat:
    """The chat in a record.

    It may be `messages` of OpenAI; `conversations` of ShareGPT, with `from` and `value`, or with
    `role` and `content`; `prompt` and `completion`, strings or messages; or `instruction`, `input`
    and `output` of Alpaca.

    Raises:
        BadRecord: it is none of these, or a message has no text.
    """
    name = next((name for name in _LISTS if fields.get(name) is not None), None)
    pair = _pair(fields)
    if name is not None:
        turns = _from_json(fields[name])
    elif pair is not None:
        *asked, answer = pair
        question = fields[asked[0]]
        if not isinstance(question, list):
            question = "\n\n".join(str(fields[key]) for key in asked if fields.get(key))
        turns = _turns(question, "user") + _turns(fields[answer], "assistant")
    else:
        turns = None
    if not isinstance(turns, list) or not turns:
        raise BadRecord(
            f"a chat record has a list `messages`, got fields {sorted(fields)}; `conversations`, "
            "`prompt` with `completion`, and `instruction` with `output` are read, too"
        )
    messages = [_message(turn) for turn in turns]
    system = fields.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages, _options(fields))


def _pair(fields: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the fields with a question and, last, its answer."""
    for answer, asked in _PAIRS.items():
        if fields.get(answer) is not None and fields.get(asked[0]) is not None:
            return *asked, answer
    return None


def _turns(said: Any, role: str) -> list[Any]:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _from_json(value: Any) -> Any:
    """A value, or the one that a string of JSON holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _options(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _from_json(fields[name]) for name in _OPTIONS if fields.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, _OPTIONS[name]):
            wanted = _OPTIONS[name].__name__
            raise BadRecord(f"`{name}` of a chat is a {wanted} or JSON of one, got {value!r:.60}")
    return {name: value for name, value in found.items() if value}


def _message(turn: Any) -> Message:
    """A message without null fields, its content as a string."""
    if not isinstance(turn, dict):
        raise BadRecord(f"a chat message has a `role` and a `content`, got {turn!r:.60}")
    rest = {name: value for name, value in turn.items() if value is not None}
    if "from" in rest:
        rest = _from_sharegpt(rest)
    role, content = rest.pop("role", None), rest.pop("content", None)
    if not isinstance(role, str):
        raise BadRecord(f"a chat message has a `role` and a `content`, got {turn!r:.60}")
    if content is None and not rest.get("tool_calls"):
        raise BadRecord(f"a chat message of the {role} has no `content`")
    text = "" if content is None else _content(content)  # templates join it to other strings
    return {**rest, "role": _ROLES.get(role, role), "content": text}


def _from_sharegpt(turn: Message) -> Message:
    """A turn with `from` and `value` as a message."""
    speaker, value = str(turn["from"]), turn.get("value")
    rest = {name: turn[name] for name in turn.keys() - {"from", "value"}}
    role = _ROLES.get(speaker, speaker)
    if role not in _SHAREGPT:
        raise BadRecord(f"a turn of a chat is `from` {speaker!r}, no known speaker")
    if role == "function_call":
        return {**rest, "role": "assistant", "tool_calls": [_call(value)]}
    return {**rest, "role": role, "content": value}


def _call(content: Any) -> dict[str, Any]:
    call = _from_json(content)
    if not isinstance(call, dict) or "name" not in call:
        raise BadRecord(f"a `function_call` is JSON with a `name`, got {content!r:.60}")
    return {"type": "function", "function": call}


def _content(content: Any) -> str:
    """The text of a message, whose parts are joined."""
    return "".join(map(_part, content if isinstance(content, list) else [content]))


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRecord(f"a part of a chat message is not text, but {kind!r}")
    return text


# Documents


def chat_documents(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """A chat as documents in which the assistant's replies are trained; none if there is no reply.

    Every reply follows the prompt that the template gives for it. If each prompt and its reply are
    the beginning of the next prompt, that is one document. Else, for a template that rewrites
    earlier turns, that opens a thought in the prompt, or that leaves a thought out, there is one
    document for each reply.

    A reply with `weight` or `train` of 0 is not trained, nor is one that answers nothing.

    Raises:
        BadRecord: the template fails on the chat.
    """
    replies = [_reply(chat, place, tokenizer) for place in _trained_turns(chat.messages)]
    texts = [reply.prompt + reply.text for reply in replies]
    prompts = [reply.prompt for reply in replies[1:]]
    kept = all(prompt.startswith(text) for text, prompt in zip(texts, prompts, strict=False))
    if kept and all(reply.shown for reply in replies):
        spans = [(len(reply.prompt), len(text)) for reply, text in zip(replies, texts, strict=True)]
        return [_document(texts[-1], spans, tokenizer)] if texts else []
    ended = [_up_to_the_end(text, tokenizer) for text in texts]
    return [
        _document(text, [(len(reply.prompt), len(text))], tokenizer)
        for reply, text in zip(replies, ended, strict=True)
    ]


def _up_to_the_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text without white space behind the token that ends the turn: no model writes it."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(tokenizer.all_special_tokens)) else text


def _trained_turns(messages: Sequence[Message]) -> list[int]:
    """The places of the replies to train on."""
    asked = next((n for n, m in enumerate(messages) if m["role"] != "assistant"), len(messages))
    return [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place > asked and _counts(message)
    ]


def _counts(message: Message) -> bool:
    return all(message.get(name, True) not in (0, "0", "false") for name in ("weight", "train"))


class _Reply(NamedTuple):
    """A reply, and what asks for it.

    Attributes:
        prompt: the text that the model sees.
        text: the text that it is to write, up to the turn's end.
        shown: whether the template gives the text like this, whole and behind the prompt.
    """

    prompt: str
    text: str
    shown: bool


def _reply(chat: Chat, place: int, tokenizer: PreTrainedTokenizerBase) -> _Reply:
    message = chat.messages[place]
    before = Chat(chat.messages[:place], chat.options)
    prompt = before.render(tokenizer, reply_next=True)
    whole = Chat(chat.messages[: place + 1], chat.options).render(tokenizer, reply_next=False)
    shown = whole[len(prompt) :]
    if whole.startswith(prompt) and message["content"].strip() in shown:
        return _Reply(prompt, shown, True)
    opened, end = frame(before, tokenizer, prompt, message)
    return _Reply(prompt, _said(message, opened) + end, False)


# A reply by which the template's own text around replies is found.
_MARK = "reply-7c1f0e52"


def frame(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    message: Message | None = None,
) -> tuple[str, str]:
    """What the template puts around a reply.

    Args:
        chat: the chat that is replied to.
        tokenizer: the one with the template.
        prompt: the chat as rendered with the assistant's turn opened.
        message: the reply, of which the content does not matter.

    Returns:
        What the prompt has opened of the reply (as `<think>`, which a finished reply begins with),
        and what ends the turn.

    Raises:
        BadRecord: the template fails, or does not show the content of a reply.
    """
    marked = {**(message or {"role": "assistant"}), "content": _MARK}
    whole = Chat([*chat.messages, marked], chat.options).render(tokenizer, reply_next=False)
    start, found, end = whole.rpartition(_MARK)
    if not found:
        raise BadRecord("the chat template leaves out the text of a reply")
    return prompt[len(start) :] if prompt.startswith(start) else "", end


def _said(message: Message, opened: str) -> str:
    """The text of a reply, with its thought, behind what the prompt has opened of it."""
    content, tag = message["content"], opened.strip()
    thought = message.get("reasoning_content") or message.get("reasoning")
    if tag.startswith("<") and isinstance(thought, str) and thought:
        return f"{thought.strip()}\n</{tag[1:]}\n\n{content}"
    if content.startswith(opened):
        return content[len(opened) :]
    if content.lstrip().startswith(tag):
        return content.lstrip()[len(tag) :].lstrip()
    return content


def _document(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Document:
    """A text as tokens; those that begin in one of the spans are trained."""
    # Replies are found by characters: a token may span the end of a prompt.
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded.offset_mapping]
    trained = [any(first <= start < last for first, last in spans) for start in starts]
    return Document(encoded.input_ids, trained)

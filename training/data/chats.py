"""Chats in the formats that people have, and as documents with their replies marked as trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from selfspec.apps.chat_templates import render_chat

Message = dict[str, Any]


class BadRecord(ValueError):
    """A record that cannot be used, among others that can."""


def is_word(value: Any) -> bool:
    """Whether a field may stand in a text: a string or a number, and not pandas' NaN for null."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value == value


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
            messages = [_arguments_as_json(message) for message in self.messages]
            if messages != self.messages:
                return Chat(messages, self.options).render(tokenizer, reply_next)
            name = type(error).__name__
            raise BadRecord(f"the chat template fails on it ({name}: {error})") from error


# Formats

# Fields that hold the messages; fields that hold an answer, each with those of its question.
_LISTS = ("messages", "conversations", "conversation")
_PAIRS = {
    "completion": ("prompt",),
    "output": ("instruction",),
    "response": ("instruction", "prompt", "query", "question"),
    "answer": ("question",),
}
_BESIDE_THE_QUESTION = ("input", "context")
_BETTER = "chosen"  # the better of two answers, in records of preferences
# What the model would have seen or heard; only the words of a chat are rendered.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_CALL = "function_call"  # the role of a turn, in ShareGPT's format, or a field of a message
# Turns without a role: every field is a message.
_EXCHANGE = {**_ROLES, "input": "user", "output": "assistant"}
_OPTIONS: dict[str, type] = {"tools": list, "documents": list, "chat_template_kwargs": dict}


def is_chat_record(fields: Mapping[str, Any]) -> bool:
    """Whether a record's fields are those of a chat, and not those of a text."""
    fields = _told(fields)
    if any(fields.get(name) is not None for name in _LISTS):
        return True
    if fields.get("text") is not None:
        return False
    return _pair(fields) is not None or any(name in fields for name in (*_LISTS, _BETTER))


def read_chat(fields: Mapping[str, Any]) -> Chat:
    """The chat in a record.

    It may be `messages` of OpenAI; `conversations` of ShareGPT, with `from` and `value`, or with
    `role` and `content`; turns that hold a question and its answer; or a question and its answer in
    fields of the record, as `prompt` and `completion`, strings or messages, or `instruction`,
    `input`, `history` and `output` of Alpaca. A `label` of false says that the last reply is bad
    (TRL's KTO), which is then not trained.

    Raises:
        BadRecord: it is none of these, a message has no text, or images belong to it.
    """
    fields = _told(fields)
    media = next((name for name in _MEDIA if fields.get(name)), None)
    if media is not None:
        raise BadRecord(f"a chat with `{media}` is not read; heads are fitted to text")
    name = next((name for name in _LISTS if fields.get(name) is not None), None)
    pair = _pair(fields)
    if name is not None:
        turns = _rows(_from_json(fields[name]))
    elif pair is not None:
        turns = _asked_and_answered(fields, *pair)
    else:
        turns = None
    if turns is None and fields.get(_BETTER) is not None:
        raise BadRecord(
            "a record of preferences has two answers; to train on `chosen`, name it `messages` if "
            "it is a whole chat, or `completion` if it answers `prompt`"
        )
    if not isinstance(turns, list) or not turns:
        if name is not None:
            what = f"a list `{name}` of at least one message"
            raise BadRecord(f"a chat record has {what}, got {fields[name]!r:.60}")
        raise BadRecord(
            f"a chat record has a list `messages`, got fields {sorted(fields)}; `conversations`, "
            "`prompt` with `completion`, and `instruction` with `output` are read, too"
        )
    messages = [_message(part) for turn in turns for part in _exchange(turn)]
    said = next((name for name in ("system", "system_prompt") if fields.get(name)), None)
    if said is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _word(said, fields[said])})
    if fields.get("label") is False:
        messages[-1] = {**messages[-1], "train": False}
    return Chat(messages, _options(fields))


def _told(fields: Any) -> Any:
    """The fields, and those inside them, without pandas' NaN, which stands for null."""
    if isinstance(fields, Mapping):
        return {name: _told(value) for name, value in fields.items() if value == value}
    return [_told(value) for value in fields] if isinstance(fields, list) else fields


def _pair(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the fields with a question and its answer."""
    pairs = ((question, answer) for answer, asked in _PAIRS.items() for question in asked)
    present = {name for name, value in fields.items() if value is not None}
    return next((pair for pair in pairs if present.issuperset(pair)), None)


def _asked_and_answered(fields: Mapping[str, Any], question: str, answer: str) -> list[Any]:
    asked = fields[question]
    if not isinstance(asked, list):
        named = {name: fields.get(name) for name in (question, *_BESIDE_THE_QUESTION)}
        asked = "\n\n".join(_word(name, part) for name, part in named.items() if part)
    said = fields[answer]
    said = said if isinstance(said, list) else _word(answer, said)
    return _history(fields) + _turns(asked, "user") + _turns(said, "assistant")


def _word(name: str, value: Any) -> str:
    if not is_word(value):
        raise BadRecord(f"`{name}` of a chat is text, got {value!r:.60}")
    return str(value)


def _history(fields: Mapping[str, Any]) -> list[Any]:
    """The turns before the last question, pairs of strings in Alpaca's format."""
    history = _from_json(fields.get("history")) or []
    if not isinstance(history, list) or any(
        not isinstance(pair, list) or len(pair) != 2 for pair in history
    ):
        raise BadRecord(f"`history` is a list of questions with answers, got {history!r:.60}")
    return [turn for q, a in history for turn in _turns(q, "user") + _turns(a, "assistant")]


def _turns(said: Any, role: str) -> list[Any]:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _rows(turns: Any) -> Any:
    """Turns as a list; `datasets` may have a list for each of their fields instead."""
    if isinstance(turns, dict) and turns.keys() & {"role", "from"}:
        columns = list(turns.values())
        if all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
            return [dict(zip(turns, row, strict=True)) for row in zip(*columns, strict=True)]
    return turns


def _exchange(turn: Any) -> list[Any]:
    """The messages of a turn, of which one without a role may hold several."""
    if not isinstance(turn, dict) or turn.keys() & {"role", "from"}:
        return [turn]
    said = {name: text for name, text in turn.items() if text is not None}
    if not said or not said.keys() <= _EXCHANGE.keys():
        return [turn]
    order = list(dict.fromkeys(_EXCHANGE.values()))
    parts = [{"role": _EXCHANGE[name], "content": text} for name, text in said.items()]
    return sorted(parts, key=lambda part: order.index(part["role"]))


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
    older = _from_json(fields.get("functions"))  # OpenAI's field before there were `tools`
    if isinstance(older, list) and "tools" not in found:
        found["tools"] = [{"type": "function", "function": function} for function in older]
    if isinstance(found.get("tools"), list):  # in Arrow, whose lists hold one type
        found["tools"] = [_from_json(tool) for tool in found["tools"]]
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
    said = rest.pop("role", None), rest.pop("from", None)
    role = next((_ROLES.get(str(one).lower(), one) for one in said if one is not None), None)
    content = rest.pop("content", None)
    content = rest.pop("value", None) if content is None else content
    if not isinstance(role, str) or not role:
        raise BadRecord(f"a chat message has a `role` and a `content`, got {turn!r:.60}")
    if role == _CALL:
        role, content, rest = "assistant", "", {**rest, "tool_calls": [_call(content)]}
    older = rest.pop(_CALL, None)  # OpenAI's field before there were `tool_calls`
    if older is not None:
        rest["tool_calls"] = [_call(older)]
    if said[0] is None and role not in _ROLES.values():
        raise BadRecord(f"a turn of a chat is `from` {role!r}, no known speaker")
    calls = _tool_calls(rest.pop("tool_calls", None) or [])
    if content is None and not calls:
        raise BadRecord(f"a chat message of the {role} has no `content`")
    text = "" if content is None else _content(content)  # templates join it to other strings
    called = {"tool_calls": calls} if calls else {}
    return {**rest, "role": role, "content": text, **called}


def _call(content: Any) -> dict[str, Any]:
    call = _from_json(content)
    if not isinstance(call, dict) or "name" not in call:
        raise BadRecord(f"a `function_call` is JSON with a `name`, got {content!r:.60}")
    return {"type": "function", "function": call}


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Calls of tools; OpenAI has their arguments as JSON, most templates take objects."""
    calls = _from_json(value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f"`tool_calls` of a turn is a list of objects, got {value!r:.60}")
    return [_with_arguments(call, as_json=False) for call in calls]


def _with_arguments(call: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """A call with its arguments as an object or as JSON, in its field `function` or in itself."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], as_json)}
    arguments = _from_json(call.get("arguments"))
    if not isinstance(arguments, dict):
        return call
    text = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": text if as_json else arguments}


def _arguments_as_json(message: Message) -> Message:
    """A message for templates that take the arguments of calls as text, as DeepSeek's do."""
    calls = [_with_arguments(call, as_json=True) for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


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

    A reply with `weight` or `train` of 0 is not trained, nor is one that answers nothing, nor calls
    of tools without text that the template does not show.

    Raises:
        BadRecord: the template fails on the chat, or shows nothing of its replies.
    """
    turns = _trained_turns(chat.messages)
    shown = [place for place in turns if _shows(chat, place, tokenizer)]
    if turns and not shown:
        raise BadRecord("the chat template leaves out the `tool_calls` of replies without text")
    replies = [_reply(chat, place, tokenizer) for place in shown]
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


def _shows(chat: Chat, place: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template shows anything of a reply, which may be nothing but calls of tools."""
    *before, reply = chat.messages[: place + 1]
    if reply["content"].strip() or not reply.get("tool_calls"):
        return True
    silent = Chat([*before, {**reply, "tool_calls": []}], chat.options)
    whole = Chat([*before, reply], chat.options).render(tokenizer, reply_next=False)
    return silent.render(tokenizer, reply_next=False) != whole


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
    return all(_is_on(name, message[name]) for name in ("weight", "train") if name in message)


def _is_on(name: str, value: Any) -> bool:
    said = value.lower() if isinstance(value, str) else value
    if said in (0, "0", "false"):
        return False
    if said in (1, "1", "true"):
        return True
    raise BadRecord(f"`{name}` of a turn is 0 or 1, false or true, got {value!r:.60}")


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
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a tokenizer in Python, which does not tell where in a "
            "text its tokens stand; chats need one with a tokenizer.json (PreTrainedTokenizerFast)"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded.offset_mapping]
    trained = [any(first <= start < last for first, last in spans) for start in starts]
    return Document(encoded.input_ids, trained)

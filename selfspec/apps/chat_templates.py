"""Chat templates: what they make of messages, and where they end a turn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.config import Options
from selfspec.model import SelfSpecModel


def one_message(role: str, content: str) -> list[dict[str, str]]:
    """One message, as a list to add to others."""
    return [{"role": role, "content": content}]


def first_turn(prompt: str, system: str | None) -> list[dict[str, str]]:
    """The messages up to the first reply."""
    before = [] if system is None else one_message("system", system)
    return before + one_message("user", prompt)


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]
) -> list[int]:
    """Token ids of messages in the chat template, up to the reply to the last."""
    shown = as_shown(tokenizer, messages)
    ids: Any = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
    return list(ids)


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer has no chat template ({type(tokenizer).__name__}); set "
            "tokenizer.chat_template and save it, or take plain text"
        )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    reply_next: bool = True,
    tools: list[Any] | None = None,
    documents: list[Any] | None = None,
    chat_template_kwargs: Options | None = None,
) -> str:
    """A chat in the tokenizer's template, whose variables are as in `apply_chat_template`.

    It is always the same moment there, so that a text is the same in every run. With `reply_next`,
    the assistant's turn is open. Raises ValueError if there is no template.
    """
    check_template(tokenizer)
    template = _at_noon(tokenizer.get_chat_template(tools=tools))
    text = tokenizer.apply_chat_template(
        as_shown(tokenizer, messages, template),
        tools=tools,
        documents=documents,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=reply_next,
        **(chat_template_kwargs or {}),
    )
    return str(text)


def as_shown(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], template: str | None = None
) -> list[Any]:
    """Messages in the form in which a template shows their content; by default the tokenizer's."""
    takes_parts = _takes_parts(tokenizer, template or tokenizer.get_chat_template())
    return [_in_parts(message) for message in messages] if takes_parts else list(messages)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as a list of parts."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if text else message


_TAKES_PARTS: dict[str, bool] = {}  # by template


def _takes_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template shows contents only as lists of parts, as those of image models do."""
    if template not in _TAKES_PARTS:
        plain = {"role": "user", "content": "selfspec"}
        parts = _in_parts(plain)

        def shows(message: dict[str, Any]) -> bool:
            try:
                told = tokenizer.apply_chat_template(
                    [message], chat_template=template, tokenize=False
                )
            except Exception:  # a template is a program of its own
                return False
            # One that takes text, but not all of it, writes a list as Python does.
            return "selfspec" in str(told).replace(str(parts["content"]), "")

        _TAKES_PARTS[template] = not shows(plain) and shows(parts)
    return _TAKES_PARTS[template]


_MOMENT = datetime(2026, 1, 1, 12)
_DIRECTIVES = [*"aAbBcdfHIjmMpSUwWxXyYzZ", "-d", "-m", "-H", "-I"]


def _at_noon(template: str) -> str:
    """A chat template in which the time stands still."""
    if "strftime_now" not in template:
        return template
    words = {f"%{name}": _MOMENT.strftime(f"%{name}") for name in _DIRECTIVES}
    told = "".join(f" | replace({name!r}, {word!r})" for name, word in words.items())
    macro = "{% macro strftime_now(format) %}{{ format" + told + " }}{% endmacro %}"
    # Behind an expression, unlike behind a block, jinja leaves a line feed as it is.
    return macro + "{{ '' }}" + template


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any]) -> list[int]:
    """Token ids of what `render_chat` gives, up to the assistant's turn; raises as it does."""
    rendered = render_chat(tokenizer, messages)
    return tokenizer(rendered, add_special_tokens=False, verbose=False).input_ids


# Where a turn ends


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token with which the chat template ends a reply; `None` if it has none."""
    said = "word"
    chat = as_shown(tokenizer, one_message("user", said) + one_message("assistant", said))
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # a template is a program of its own, and may want more than this
        return None
    behind = text.rpartition(said)[2].lstrip()
    first = next(iter(tokenizer(behind, add_special_tokens=False).input_ids), None)
    added = tokenizer.added_tokens_decoder
    return first if first in added and added[first].special else None


def turn_stops(spec: SelfSpecModel, tokenizer: PreTrainedTokenizerBase) -> Options:
    """Options of `generate` with which a reply ends where the chat template ends a turn.

    Checkpoints' generation configs do not always name that token.
    """
    stops, end = stop_ids(spec), end_of_turn(tokenizer)
    return {} if end is None or end in stops else {"eos_token_id": [*stops, end]}


def stop_ids(spec: SelfSpecModel) -> list[int]:
    """The stop tokens that the model's generation config names."""
    stops = spec.generation_config.eos_token_id
    return [stops] if isinstance(stops, int) else stops or []

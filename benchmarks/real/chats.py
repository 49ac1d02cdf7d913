"""Chats by category: from Spec-Bench's questions, or from those beside this file.

`questions.jsonl` holds three questions of each category, written for this benchmark and in the
format of Spec-Bench (https://github.com/hemingkx/Spec-Bench). Spec-Bench's own come from many
sources, and are read from a file that the user has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from selfspec.apps.bench.prompts import evenly
from selfspec.heads.files import replace_text
from selfspec.records import sound_fields

QUESTIONS = Path(__file__).with_name("questions.jsonl")
# Names in tables, and Spec-Bench's categories. Those of MT-bench have a second turn; `multi-turn`
# asks both, `coding` the first.
CATEGORIES = {
    "translation": ["translation"],
    "summarization": ["summarization"],
    "QA": ["qa"],
    "maths": ["math_reasoning"],
    "RAG": ["rag"],
    "multi-turn": [
        *("writing", "roleplay", "reasoning", "math", "extraction", "stem", "humanities")
    ],
    "coding": ["coding"],
}
MULTI_TURN = "multi-turn"

Reply = Callable[[Sequence[Any]], str]


def write_chats(questions: Path, folder: Path, count: int, reply: Reply) -> dict[str, Path]:
    """Write each category's chats to a file in `folder`, once.

    Args:
        questions: JSON lines with `category` and `turns`.
        folder: where the files are.
        count: chats of a category.
        reply: answers a chat; called for the first turns of `multi-turn`.

    Returns:
        The file of each category.

    Raises:
        ValueError: the questions have none of a category.
    """
    records = list(sound_fields(questions, "records"))
    files: dict[str, Path] = {}
    for name, parts in CATEGORIES.items():
        asked = [record["turns"] for record in records if record["category"] in parts]
        if not asked:
            raise ValueError(f"{questions} has no questions of the category {' or '.join(parts)}")
        files[name] = folder / f"{name}.jsonl"
        if not files[name].is_file():
            chosen = evenly(asked, count)
            chats = [_chat(turns if name == MULTI_TURN else turns[:1], reply) for turns in chosen]
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(files[name], "".join(json.dumps({"messages": c}) + "\n" for c in chats))
    return files


def _chat(turns: Sequence[str], reply: Reply) -> list[dict[str, str]]:
    """The turns, all but the last answered."""
    chat: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        if number:
            chat.append({"role": "assistant", "content": reply(chat)})
        chat.append({"role": "user", "content": turn})
    return chat

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
MULTI_TURN = "multi-turn"
_MT_BENCH = "writing roleplay reasoning math extraction stem humanities"
# Names in tables, and Spec-Bench's categories. Those of MT-bench have a second turn; `multi-turn`
# asks both, `coding` the first.
CATEGORIES = {
    "translation": ["translation"],
    "summarization": ["summarization"],
    "QA": ["qa"],
    "maths": ["math_reasoning"],
    "RAG": ["rag"],
    MULTI_TURN: _MT_BENCH.split(),
    "coding": ["coding"],
}


def write_chats(
    questions: Path, folder: Path, count: int, reply: Callable[[Sequence[Any]], str]
) -> dict[str, Path]:
    """Write `count` chats of each category to a file in `folder`, once; returns the files.

    `questions` are JSON lines with `category` and `turns`; ValueError if a category has none.
    `reply` answers the first turns of `multi-turn`.
    """
    records = list(sound_fields(questions, "records"))
    files = {name: folder / f"{name}.jsonl" for name in CATEGORIES}
    for name, parts in CATEGORIES.items():
        asked = [record["turns"] for record in records if record["category"] in parts]
        if not asked:
            raise ValueError(f"{questions} has no questions of the category {' or '.join(parts)}")
        if not files[name].is_file():
            chats: list[list[dict[str, str]]] = []
            for first, *further in evenly(asked, count):
                chats.append([{"role": "user", "content": first}])
                for turn in further if name == MULTI_TURN else ():
                    chats[-1].append({"role": "assistant", "content": reply(chats[-1])})
                    chats[-1].append({"role": "user", "content": turn})
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(files[name], "".join(json.dumps({"messages": c}) + "\n" for c in chats))
    return files

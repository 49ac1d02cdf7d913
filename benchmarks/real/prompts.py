"""Writes chat prompts of many kinds, for the text that the head of SmolLM2 is fitted on.

    python -m benchmarks.real.prompts outputs/real/prompts.jsonl --data data --man /usr/share/man

Sources, none of them an evaluation set: GSM8K's training half and MBPP's training split (`data/`),
novels in the public domain (`data/novels/train`), the standard library of the running Python, and
manual pages in English, German, French and Spanish (Debian's `manpages` packages). `prompts.yaml`
has the forms. A source that is not there is left out, and said to be. The order is random, so that
any first part has all kinds.
"""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import console, parser

FORMS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text())
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish"}
_HELD_OUT = {"site-packages", "test", "tests", "json", "email", "http", "asyncio"}
_MARKUP = re.compile(r"\\f[A-Z]|\\f\[[A-Z]*\]|\\\(..|\\[-&~:^|]")


def questions(rng: random.Random) -> Iterator[str]:
    """Questions and instructions about everyday topics."""
    topics = FORMS["topics"].split("; ")
    while True:
        yield rng.choice(FORMS["questions"]).format(t=rng.choice(topics), u=rng.choice(topics))


def records(path: Path, field: str, keep: range | None = None) -> list[str]:
    """A field of the records of a JSON lines file, those with a `task_id` in `keep` only."""
    lines = path.read_text().split("\n") if path.exists() else []
    found = [json.loads(line) for line in lines if line.strip()]
    return [one[field] for one in found if keep is None or one["task_id"] in keep]


def maths(rng: random.Random, data: Path) -> Iterator[str]:
    """Grade-school problems of the training half of GSM8K."""
    problems = records(data / "gsm8k/train.jsonl", "question")
    while problems:
        yield rng.choice(FORMS["maths"]).format(rng.choice(problems))


def functions() -> list[tuple[str, str]]:
    """Source and docstring of short functions of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = "" if _HELD_OUT & set(path.parts) else path.read_text(errors="ignore")
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                source, words = ast.get_source_segment(text, node), ast.get_docstring(node)
                if source and words and 200 < len(source) < 1500 and len(words) > 40:
                    found.append((source, words.split("\n\n")[0].replace("\n", " ")))
    return found


def code(rng: random.Random, data: Path) -> Iterator[str]:
    """Tasks of MBPP's training split, and functions of the standard library."""
    tasks = records(data / "mbpp/mbpp.jsonl", "text", range(601, 975))
    known = functions()
    while known:
        source, words = rng.choice(known)
        if rng.random() < 0.4:
            yield rng.choice(FORMS["explain_code"]).format(source)
        else:
            task = rng.choice(tasks) if tasks and rng.random() < 0.6 else words
            yield rng.choice(FORMS["write_code"]).format(task)


def passages(data: Path) -> list[str]:
    """Paragraphs of novels."""
    texts = [path.read_text(errors="ignore") for path in sorted(data.glob("novels/train/*.txt"))]
    parts = [part for text in texts for part in re.split(r"\n\s*\n", text)]
    return [" ".join(part.split()) for part in parts if 300 < len(part) < 2500]


def manual(folder: Path) -> list[str]:
    """Paragraphs of the manual pages in a folder, without markup."""
    found = []
    for path in sorted(folder.glob("man[1-8]/*.gz")):
        try:
            text = gzip.open(path, "rt", errors="ignore").read()
        except OSError:
            continue
        text = _MARKUP.sub(lambda mark: "-" if mark[0] == r"\-" else "", text)
        for part in re.split(r"^\.(?:[Pp]+|SH.*|TP.*|IP.*|RS.*|RE.*)\n", text, flags=re.M):
            lines = [line for line in part.splitlines() if not line.startswith((".", "'"))]
            words = " ".join(" ".join(lines).split())
            if 150 < len(words) < 1800 and "\\" not in words:
                found.append(words)
    return found


def sentences(parts: list[str]) -> list[str]:
    """Sentences of some length."""
    found = [s for part in parts for s in re.split(r"(?<=[.!?]) (?=[A-ZÄÖÜÉ])", part)]
    return [s for s in found if 40 < len(s) < 260]


def reading(rng: random.Random, texts: list[str]) -> Iterator[str]:
    """Summaries of passages and questions about them."""
    while texts:
        joined = "\n\n".join(rng.sample(texts, rng.choice([1, 1, 1, 2])))
        yield rng.choice(FORMS["reading"]).format(joined[:3500])


def translation(
    rng: random.Random, english: list[str], others: dict[str, list[str]]
) -> Iterator[str]:
    """Sentences to be translated, into English and out of it."""
    known = {code: found for code, found in others.items() if found}
    while english and known:
        chosen = rng.choice(sorted(known))
        if rng.random() < 0.6:
            a, b, s = LANGUAGES[chosen], "English", rng.choice(known[chosen])
        else:
            a, b, s = "English", LANGUAGES[chosen], rng.choice(english)
        yield rng.choice(FORMS["translation"]).format(a=a, b=b, s=s)


def main() -> None:
    """Write the prompts."""
    made = parser(__doc__, target=False)
    made.add_argument("output", type=Path)
    made.add_argument("--data", type=Path, default=Path("data"))
    made.add_argument("--man", type=Path, default=Path("/usr/share/man"))
    made.add_argument("--count", type=int, default=20_000)
    made.add_argument("--seed", type=int, default=0)
    given = made.parse_args()
    rng = random.Random(given.seed)
    novels, english = passages(given.data), manual(given.man)
    others = {code: sentences(manual(given.man / code)) for code in LANGUAGES}
    shares = {"questions": 0.36, "maths": 0.14, "code": 0.16, "reading": 0.2, "translation": 0.14}
    left = {
        "questions": questions(rng),
        "maths": maths(rng, given.data),
        "code": code(rng, given.data),
        "reading": reading(rng, novels[:: max(1, len(novels) // 20_000)] + english),
        "translation": translation(rng, sentences(novels[::50] + english), others),
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w") as file:
        written = 0
        while written < given.count:
            (name,) = rng.choices(list(left), [shares[kind] for kind in left])
            asked = next(left[name], None)
            if asked is None:
                console.print(f"{name}: its source is not there, left out")
                del left[name]
                continue
            record = {"kind": name, "messages": [{"role": "user", "content": asked}]}
            if rng.random() < 0.12:
                record["follow_up"] = rng.choice(FORMS["follow_ups"])
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            written += 1


if __name__ == "__main__":
    main()

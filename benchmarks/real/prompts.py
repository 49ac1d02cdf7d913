"""Writes chat prompts of many kinds, for the text that the head of SmolLM2 is fitted on.

    python benchmarks/real/prompts.py outputs/real/prompts.jsonl --data data --man /usr/share/man

Sources, none of them an evaluation set: GSM8K's training half and MBPP's training split (`data/`),
novels in the public domain (`data/novels/train`), the standard library of the running Python, and
manual pages in English, German, French and Spanish (Debian's `manpages` packages). A source that is
not there is left out, and said to be. The order is random, so that any first part has all kinds.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TOPICS = """
photosynthesis; the water cycle; black holes; plate tectonics; vaccines; inflation in economics;
the French Revolution; the Roman Empire; how bread rises; the stock market; machine learning;
neural networks; blockchain; renewable energy; solar panels; electric cars; how airplanes fly; the
immune system; sleep; meditation; yoga for beginners; healthy eating; vegetarian cooking; coffee;
tea; chess; football; basketball; the Olympic Games; the history of jazz; classical music;
learning the guitar; oil painting; photography; Shakespeare's plays; the Industrial Revolution;
the Cold War; democracy; human rights; the printing press; ancient Egypt; the Silk Road; Vikings;
dinosaurs; whales; honey bees; coral reefs; rain forests; volcanoes; earthquakes; hurricanes;
climate change; recycling; gardening; growing tomatoes; raising a puppy; caring for a cat;
travelling to Japan; visiting Paris; backpacking; packing a suitcase; camping; hiking safely;
saving money; writing a resume; job interviews; time management; public speaking; teamwork;
leadership; starting a small business; marketing on social media; customer service; remote work;
negotiating a salary; buying a house; renting an apartment; insurance; taxes; retirement;
parenting a toddler; bedtime stories; learning a language; memory techniques; critical thinking;
the scientific method; probability; prime numbers; the Pythagorean theorem; calculus; statistics;
Newton's laws; electricity; magnets; atoms; the periodic table; acids and bases; DNA; evolution;
the human heart; the brain; vision; exercise; running a marathon; stretching; first aid; the
internet; how a computer works; databases; operating systems; Python programming; version control
with git; web pages; email etiquette; passwords and security; privacy online; video games; board
games; poetry; writing a novel; science fiction; fairy tales; myths of Greece; philosophy of
Plato; ethics; happiness; friendship; gratitude; stress; anger; habits; procrastination; the Moon;
Mars; the Sun; galaxies; telescopes; rockets; satellites; GPS; trains; bridges; architecture;
cathedrals; fashion; knitting; woodworking; fixing a bicycle; car maintenance; baking a cake;
making pasta; soup; chocolate; cheese; wine; spices; seasons; snow; rivers; oceans; mountains;
deserts; bees and flowers; birds; elephants; penguins; wolves; horses; insects; trees; mushrooms;
maps; calendars; money; language; writing systems
"""

ASKS = [
    "Explain {t} to a ten-year-old.",
    "What are the most important facts about {t}?",
    "Write a short essay about {t}.",
    "Give me five tips about {t}.",
    "Why does {t} matter?",
    "Write a poem about {t}.",
    "What is the history of {t}?",
    "List three advantages and three disadvantages of {t}.",
    "Write a blog post introduction about {t}.",
    "Tell me a short story in which {t} plays a role.",
    "What are common misconceptions about {t}?",
    "Write a dialogue between two friends about {t}.",
    "How would you teach a class about {t}?",
    "Describe {t} in one paragraph.",
    "Write an email to a colleague about {t}.",
    "Create a quiz with four questions on {t}.",
    "What questions should I ask an expert on {t}?",
    "Summarize what a beginner needs to know about {t}.",
    "Compare {t} with {u}.",
    "How are {t} and {u} related?",
    "Write a limerick about {t} and {u}.",
    "Imagine you are a journalist. Write a short news article about {t}.",
    "Give step-by-step advice for someone new to {t}.",
    "What would happen if there were no {t}?",
    "Write a persuasive speech about {t}.",
    "Make a table of key terms about {t}.",
    "Which books or experiences would help me understand {t}?",
    "What is {t}?",
    "Explain {t} using an analogy.",
    "Write a product description related to {t}.",
    "Draft a plan for a weekend project about {t}.",
    "Pretend to be a travel guide and talk about {t}.",
    "Write three tweets about {t}.",
    "Is {t} overrated? Argue both sides.",
]
FOLLOW_UPS = [
    "Can you make that shorter?",
    "Now explain it in simpler words.",
    "Give me an example.",
    "Rewrite your answer as a list.",
    "What did you leave out?",
    "Please translate your answer into Spanish.",
    "Why is that?",
    "Are you sure? Check it again.",
    "Write the same in a more formal style.",
    "How could this be applied in everyday life?",
    "Continue.",
]
_MARKUP = re.compile(r"\\f[A-Z]|\\f\[[A-Z]*\]|\\\(..|\\[-&~:^|]")
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish"}


def questions(rng: random.Random) -> Iterator[str]:
    """Questions and instructions about everyday topics."""
    topics = [topic.strip().replace("\n", " ") for topic in TOPICS.split(";")]
    while True:
        yield rng.choice(ASKS).format(t=rng.choice(topics), u=rng.choice(topics))


def records(path: Path, field: str, keep: range | None = None) -> list[str]:
    """A field of the records of a JSON lines file, those with a `task_id` in `keep` only."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.strip()]
    return [one[field] for one in found if keep is None or one["task_id"] in keep]


def maths(rng: random.Random, data: Path) -> Iterator[str]:
    """Grade-school problems of the training half of GSM8K."""
    problems = records(data / "gsm8k/train.jsonl", "question")
    forms = [
        "{}",
        "{}",
        "{} Think step by step.",
        "Solve this problem: {}",
        "{} Give the answer only.",
    ]
    while problems:
        yield rng.choice(forms).format(rng.choice(problems))


def functions() -> list[tuple[str, str]]:
    """Source and docstring of short functions of the standard library."""
    found = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        held_out = {"site-packages", "test", "tests", "json", "email", "http", "asyncio"}
        if held_out & set(path.parts):
            continue
        text = path.read_text(errors="ignore")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source, words = ast.get_source_segment(text, node), ast.get_docstring(node)
                if source and words and 200 < len(source) < 1500 and len(words) > 40:
                    found.append((source, words.split("\n\n")[0].replace("\n", " ")))
    return found


def code(rng: random.Random, data: Path) -> Iterator[str]:
    """Tasks of MBPP's training split, and functions of the standard library."""
    tasks = records(data / "mbpp/mbpp.jsonl", "text", range(601, 975))
    known = functions()
    explain = [
        "Explain what this Python function does:\n\n```python\n{}\n```",
        "Add comments to this code:\n\n```python\n{}\n```",
        "Rewrite this function so that it is easier to read:\n\n```python\n{}\n```",
        "Write unit tests for this function:\n\n```python\n{}\n```",
    ]
    write = [
        "Write a Python function. {}",
        "In Python: {}",
        "{} Write the code and an example.",
        "{}",
    ]
    while known:
        source, words = rng.choice(known)
        if rng.random() < 0.4:
            yield rng.choice(explain).format(source)
        else:
            task = rng.choice(tasks) if tasks and rng.random() < 0.6 else words
            yield rng.choice(write).format(task)


def passages(data: Path) -> list[str]:
    """Paragraphs of novels."""
    found = []
    for path in sorted((data / "novels/train").glob("*.txt")):
        parts = re.split(r"\n\s*\n", path.read_text(errors="ignore"))
        found += [" ".join(part.split()) for part in parts if 300 < len(part) < 2500]
    return found


def manual(folder: Path) -> list[str]:
    """Paragraphs of the manual pages in a folder, without markup."""
    found = []
    for path in sorted(folder.glob("man[1-8]/*.gz")):
        try:
            text = gzip.open(path, "rt", errors="ignore").read()
        except OSError:
            continue
        text = re.sub(
            r"\\f[A-Z]|\\f\[[A-Z]*\]|\\\(..|\\[-&~:^|]",
            lambda m: "-" if m[0] == r"\-" else "",
            text,
        )
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
    forms = [
        "Summarize: {}",
        "Summarize the following text in two sentences.\n\n{}",
        "{}\n\nWhat is the main idea of this text?",
        "Read this passage and list its key points:\n\n{}",
        "{}\n\nTL;DR",
        "Give this text a title and explain it:\n\n{}",
        "Rewrite the following text in modern, simple English:\n\n{}",
        "Correct the grammar of this text:\n\n{}",
        "Answer using only this text: who or what is it about, and what happens?\n\n{}",
        "Extract all names and places from the text below.\n\n{}",
        "What happens next? Continue the text:\n\n{}",
    ]
    while texts:
        joined = "\n\n".join(rng.sample(texts, rng.choice([1, 1, 1, 2])))
        yield rng.choice(forms).format(joined[:3500])


def translation(
    rng: random.Random, english: list[str], others: dict[str, list[str]]
) -> Iterator[str]:
    """Sentences to be translated, into English and out of it."""
    forms = [
        "Translate {a} to {b}: {s}",
        "Translate this {a} sentence into {b}: {s}",
        "How do you say this in {b}? {s}",
    ]
    known = {code: found for code, found in others.items() if found}
    while english and known:
        chosen = rng.choice(sorted(known))
        if rng.random() < 0.6:
            a, b, s = LANGUAGES[chosen], "English", rng.choice(known[chosen])
        else:
            a, b, s = "English", LANGUAGES[chosen], rng.choice(english)
        yield rng.choice(forms).format(a=a, b=b, s=s)


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--man", type=Path, default=Path("/usr/share/man"))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    novels, english = passages(given.data), manual(given.man)
    others = {code: sentences(manual(given.man / code)) for code in LANGUAGES}
    kinds = {
        "questions": (0.36, questions(rng)),
        "maths": (0.14, maths(rng, given.data)),
        "code": (0.16, code(rng, given.data)),
        "reading": (0.2, reading(rng, novels[:: max(1, len(novels) // 20_000)] + english)),
        "translation": (0.14, translation(rng, sentences(novels[::50] + english), others)),
    }
    left = dict(kinds)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w") as file:
        for _ in range(given.count):
            while True:
                names = list(left)
                name = rng.choices(names, [kinds[one][0] for one in names])[0]
                asked = next(left[name][1], None)
                if asked is not None:
                    break
                print(f"{name}: its source is not there, left out")  # noqa: T201
                del left[name]
            record = {"kind": name, "messages": [{"role": "user", "content": asked}]}
            if rng.random() < 0.12:
                record["follow_up"] = rng.choice(FOLLOW_UPS)
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

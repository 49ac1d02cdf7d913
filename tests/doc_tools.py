"""What README and docs print to be copied: Python blocks, command lines, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc import locate
from typing import Any, Literal

from conftest import ROOT
from typer.main import get_command

from selfspec.apps.cli import commands

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:selfspec|python -m training\.\w+|make) [^`]*)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def name_of(page: Path) -> str:
    """How a test calls a page."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Step:
    """One thing to copy: a Python block, or a command line."""

    kind: Literal["python", "command"]
    text: str

    @property
    def words(self) -> list[str]:
        """The words of a command line, as a shell would split it."""
        return shlex.split(self.text, comments=True)


def steps(page: Path) -> Iterator[Step]:
    """What there is to copy on a page, in order; ValueError for a block in another language."""
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            yield Step("python", text)
        elif language == "bash":
            lines = text.replace("\\\n", " ").splitlines()
            yield from (Step("command", line) for line in lines if shlex.split(line, comments=True))
        else:
            raise ValueError(f"{page}: a block in {language!r}; print python, bash, or no language")


def inline_commands(page: Path) -> list[list[str]]:
    """Commands that the text of a page names."""
    return [shlex.split(text) for text in _INLINE.findall(page.read_text(encoding="utf-8"))]


def links(page: Path) -> list[str]:
    """Files that a page leads to."""
    return _LINK.findall(page.read_text(encoding="utf-8"))


def lost_anchors(page: Path) -> list[str]:
    """Links of a page to headings, or to objects of the reference, that are not there."""
    found = _ANCHOR.findall(page.read_text(encoding="utf-8"))
    return [
        f"{name}#{anchor}"
        for name, anchor in found
        if anchor not in _anchors(page.parent / name if name else page) and not locate(anchor)
    ]


def _anchors(page: Path) -> set[str]:
    """Names that the site gives to the headings of a page."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    bare = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip()) for text in bare}


def parse(words: list[str]) -> None:
    """Have the command line parse its arguments, and do nothing; raises what it would print."""
    root = get_command(commands)
    _mute(root)
    root.main(words[1:], prog_name="selfspec", standalone_mode=False)


def _mute(command: Any) -> None:
    for child in getattr(command, "commands", {}).values():
        child.callback = lambda *args, **options: None
        _mute(child)


def unknown_words(words: list[str]) -> list[str]:
    """Subcommands and options, of a command that is only named, that there are not."""
    command: Any = get_command(commands)
    rest = words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[:1]
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]

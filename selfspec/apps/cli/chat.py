"""`selfspec chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from selfspec.apps.cli.common import Reporter, Source, begin, command, complain, note, summary
from selfspec.apps.cli.options import Drafting, System, Writing

if TYPE_CHECKING:
    from selfspec.apps.cli.conversation import Conversation, Turn

_COMMAND = re.compile(r"/[a-z]+")
_COMMANDS = {"/help": "list the commands", "/reset": "forget every turn", "/quit": "leave"}
_HELP = ", ".join(f"{command}: {does}" for command, does in _COMMANDS.items())


@command
def chat(
    console: Reporter, source: Source, drafting: Drafting, writing: Writing, system: System = None
) -> None:
    """Chat with a model; accepted tokens are coloured, and each turn shows speed and acceptance.

    With a chat template turns are messages, without one they are lines of one text. Off a terminal
    every line of stdin is a turn. /help lists the commands, /reset forgets every turn, /quit or
    Ctrl-D leaves; Ctrl-C stops a reply, or leaves. --json prints one object a turn.
    """
    from selfspec.apps.cli.conversation import Conversation

    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not console.quiet
    target, draft, options = begin(source, drafting, writing)
    conversation = Conversation(target.spec, target.tokenizer, draft, options, writing.seed, system)
    if interactive:
        _greet(console, target.name, conversation)
    for line in _lines(interactive):
        try:
            if not _obey(line, conversation):
                console.answer(_turn(conversation, line, console, interactive).to_dict())
        except ValueError as error:
            if not interactive:
                raise
            complain(str(error))  # the conversation is unchanged


def _lines(interactive: bool) -> Iterator[str]:
    """The user's turns, up to the end of stdin or `/quit`."""
    if interactive:
        with suppress(ImportError):  # not on every system
            import readline  # noqa: F401 - gives input() its keys and its history
    try:
        for line in iter(lambda: input("> "), None) if interactive else sys.stdin:
            said = line.strip()
            if said == "/quit":
                return
            if said:
                yield said
    except EOFError:
        sys.stdout.write("\n")


def _obey(line: str, conversation: Conversation) -> bool:
    """Run a command; returns whether the line is one. ValueError if it is unknown."""
    if not _COMMAND.fullmatch(line):
        return False
    if line not in _COMMANDS:
        from selfspec.config import unknown_name

        raise ValueError(unknown_name("command", line, list(_COMMANDS)))
    if line == "/help":
        typer.echo(_HELP, err=True)
    else:
        conversation.reset()  # /quit ends the lines
    return True


def _greet(console: Console, name: str, conversation: Conversation) -> None:
    from selfspec.apps.display.trace import in_colour, legend

    kind = "messages" if conversation.templated else "lines of one text (no chat template)"
    console.print(f"{name}; turns are {kind}\n{_HELP}", style="dim")
    if in_colour(console):
        console.print(legend(console))


def _turn(conversation: Conversation, line: str, console: Console, interactive: bool) -> Turn:
    """Send a line, and show the reply; on a terminal in colour, and stopped by Ctrl-C."""
    from transformers import TextStreamer

    from selfspec.apps.display.trace import OriginStreamer, in_colour

    tokenizer, streamer = conversation.tokenizer, None
    if interactive and in_colour(console):
        streamer = OriginStreamer(console, tokenizer)
    elif not console.quiet:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore
    with _stoppable() if interactive else nullcontext(lambda: False) as stop:
        turn = conversation.say(line, streamer, stop)
    if not console.quiet:
        cached = f"{turn.cached_tokens} of {turn.prompt_tokens} tokens cached"
        note(f"{summary(turn.stats)}; {cached}{'; stopped' if turn.stopped else ''}")
    return turn


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed; a second press interrupts."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)

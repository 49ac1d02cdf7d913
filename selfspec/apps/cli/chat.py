"""`selfspec chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import (
    Source,
    complain,
    hint_heads,
    is_sampled,
    print_json,
    reporting,
    say_choices,
    summary,
)

if TYPE_CHECKING:
    from selfspec.apps.cli.conversation import Conversation, Turn

_COMMAND = re.compile(r"/[a-z]+")
_COMMANDS = {"/help": "list the commands", "/reset": "forget every turn", "/quit": "leave"}


def chat(
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.Device = None,
    kernels: opt.KernelsOption = "auto",
    config: opt.Config = None,
    draft: opt.Draft = None,
    profile: opt.Profile = None,
    system: opt.System = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.OwnTemperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = 0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object a turn on stdout and nothing else."),
    ] = False,
) -> None:
    """Chat with a model; accepted tokens are coloured, and each turn shows speed and acceptance.

    With a chat template turns are messages, without one they are lines of one text. Off a terminal
    every line of stdin is a turn. /help lists the commands, /reset forgets every turn, /quit or
    Ctrl-D leaves; Ctrl-C stops a reply, or leaves.
    """
    from selfspec.apps.cli.conversation import Conversation

    drafting = opt.draft_config(config, draft)
    options = {"max_new_tokens": max_new_tokens, **opt.sampling(temperature, top_k, top_p)}
    interactive = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    with reporting(as_json) as console:
        target = Source(model, heads, dtype, device, profile, kernels).load()
        drafting = drafting or target.spec.draft_for(sampled=is_sampled(target.spec, options))
        hint_heads(target.spec)
        say_choices(target.spec, options)
        conversation = Conversation(
            target.spec, target.tokenizer, drafting, options, seed=seed, system=system
        )
    show = _json_turn if as_json else _coloured_turn if interactive else _plain_turn
    if interactive:
        _greet(console, target.name, conversation)
    for line in _lines(interactive):
        try:
            if not _obey(line, conversation):
                show(conversation, line, console)
        except ValueError as error:
            if not interactive:
                raise
            complain(str(error))  # the conversation is unchanged


def _lines(interactive: bool) -> Iterator[str]:
    """The user's turns, up to the end of stdin or `/quit`."""
    for line in _typed() if interactive else sys.stdin:
        said = line.strip()
        if said == "/quit":
            return
        if said:
            yield said


def _typed() -> Iterator[str]:
    try:
        import readline  # noqa: F401 - gives input() its keys and its history
    except ImportError:
        pass  # not on every system
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return


def _obey(line: str, conversation: Conversation) -> bool:
    """Run a command; returns whether the line is one.

    Raises:
        ValueError: an unknown command.
    """
    if not _COMMAND.fullmatch(line):
        return False
    if line not in _COMMANDS:
        from selfspec.config import unknown_name

        raise ValueError(unknown_name("command", line, list(_COMMANDS)))
    if line == "/help":
        typer.echo(_commands(), err=True)
    else:
        conversation.reset()  # /quit ends the lines
    return True


def _commands() -> str:
    return ", ".join(f"{command}: {does}" for command, does in _COMMANDS.items())


def _greet(console: Console, name: str, conversation: Conversation) -> None:
    from selfspec.apps.display import in_colour, legend

    kind = "messages" if conversation.templated else "lines of one text (no chat template)"
    console.print(f"{name}; turns are {kind}\n{_commands()}", style="dim")
    if in_colour(console):
        console.print(legend(console))


def _coloured_turn(conversation: Conversation, line: str, console: Console) -> None:
    from selfspec.apps.display import OriginStreamer, in_colour

    streamer: Any = None
    if in_colour(console):
        streamer = OriginStreamer(console, conversation.tokenizer)
    with _stoppable() as stop:
        _streamed_turn(conversation, line, streamer, stop)


def _plain_turn(conversation: Conversation, line: str, console: Console) -> None:
    _streamed_turn(conversation, line)


def _streamed_turn(
    conversation: Conversation,
    line: str,
    streamer: Any = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    from transformers import TextStreamer

    plain = TextStreamer(conversation.tokenizer, skip_prompt=True, skip_special_tokens=True)
    turn = conversation.say(line, streamer or plain, stop)
    Console(stderr=True, highlight=False, soft_wrap=True).print(_figures(turn), style="dim")


def _figures(turn: Turn) -> str:
    ending = "; stopped" if turn.stopped else ""
    return (
        f"{summary(turn.stats)}; {turn.cached_tokens} of {turn.prompt_tokens} tokens cached{ending}"
    )


def _json_turn(conversation: Conversation, line: str, console: Console) -> None:
    with reporting(as_json=True):
        turn = conversation.say(line)
    print_json(turn.to_dict())
    sys.stdout.flush()  # the other process waits for it


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed; a second press interrupts."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)

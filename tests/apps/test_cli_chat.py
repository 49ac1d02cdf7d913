"""`selfspec chat`: turns from a pipe, JSON, and on a terminal."""

import io
import json
import os
import re
import signal
import sys
import time

import pytest
from cli_tools import DRAFT, TOKENS, call, own_text
from conftest import EXIT, tiny_llama
from rich.console import Console

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.cli import chat as module
from selfspec.apps.cli.conversation import Conversation

SAID = "the cat\non the mat\n"


def talk(folder, *args, said=SAID, **kwargs):
    return call("chat", "--model", folder, "-n", TOKENS, *DRAFT, *args, input=said, **kwargs)


def test_every_line_of_stdin_is_a_turn_and_gets_a_plain_reply(folder):
    result = talk(folder)
    first = own_text(folder, "the cat")
    second = own_text(folder, f"the cat{first}\non the mat")
    assert result.stdout == f"{first}\n{second}\n"
    figures = r"\d+ tokens, .* tokens/s, acceptance rate .*; (\d+) of (\d+) tokens cached"
    read = [re.fullmatch(figures, line).groups() for line in result.stderr.splitlines()]
    assert [int(cached) for cached, _ in read] == [0, int(read[0][1]) + TOKENS - 1]


def test_json_is_one_object_a_turn(folder):
    lines = talk(folder, "--json").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [turn["prompt"] for turn in found] == SAID.splitlines()
    assert "".join(turn["text"] + "\n" for turn in found) == talk(folder).stdout
    for turn in found:
        assert turn["stats"]["emitted"] == TOKENS
        assert turn["stopped"] is False
    assert found[1]["cached_tokens"] == found[0]["prompt_tokens"] + TOKENS - 1


def test_reset_forgets_and_quit_leaves(folder):
    first = own_text(folder, "the cat")
    said = "the cat\n/reset\n\n  the cat  \n/quit\nthe cat\n"
    assert talk(folder, said=said).stdout == f"{first}\n{first}\n"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_help_lists_the_commands_and_is_no_turn(folder, options):
    result = talk(folder, *options, said="/help\n")
    assert result.stdout == ""
    assert result.stderr == "/help: list the commands, /reset: forget every turn, /quit: leave\n"


def test_what_only_looks_like_a_command_is_text(folder):
    assert talk(folder, said="on /reset\n/ a\n").stdout.count("\n") == 2


@pytest.mark.parametrize(
    ("said", "options", "says"),
    [
        ("/rest\n", (), "unknown command: '/rest'; did you mean '/reset'?"),
        ("a\n", ("--system", "a man"), "a system message needs a chat template"),
        ("a " * 200, (), "the conversation would have 200 tokens, the model 128 positions"),
    ],
    ids=["command", "system", "long"],
)
def test_a_mistake_off_a_terminal_ends_the_chat(folder, said, options, says):
    result = talk(folder, *options, said=said, code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"selfspec: .*\n", result.stderr)
    assert says in result.stderr


def test_on_a_terminal_accepted_tokens_are_coloured(tokenizer, monkeypatch):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    draft = DraftConfig(exit_layer=EXIT, num_draft_tokens=3)
    conversation = Conversation(
        spec, tokenizer, draft, {"max_new_tokens": TOKENS, "do_sample": False}
    )
    paper = io.StringIO()
    console = Console(file=paper, force_terminal=True, color_system="standard", no_color=False)
    module._turn(conversation, "the cat", console, interactive=True)
    shown = paper.getvalue()
    assert spec.last_stats.accepted > 0
    assert "\x1b[32m" in shown
    written = conversation.tokens[len(tokenizer("the cat").input_ids) :]
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == tokenizer.decode(written) + "\n"


def test_ctrl_c_is_noted_once_and_interrupts_the_second_time():
    before = signal.getsignal(signal.SIGINT)
    with module._stoppable() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Terminal:
    """A process that talks to a terminal."""

    def __init__(self, *command):
        import pty

        child, self.screen = pty.fork()
        if child == 0:
            # Tests that run in a shell's background have this ignored, and pass that on.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            env = {**os.environ, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
            os.execve(command[0], command, {k: v for k, v in env.items() if k != "NO_COLOR"})
        self.child, self.shown = child, ""

    def wait_for(self, pattern):
        """Read until what was shown since the last wait matches; returns the match."""
        while not (match := re.search(pattern, self.shown, re.DOTALL)):
            try:
                new = os.read(self.screen, 4096)
            except OSError:  # the process has gone
                new = b""
            assert new, f"no {pattern!r} in {self.shown!r}"
            self.shown += new.decode(errors="replace")
        self.shown = self.shown[match.end() :]
        return match

    def type(self, text):
        os.write(self.screen, text.encode())

    def interrupt_to_the_end(self):
        """Press Ctrl-C, after ten seconds again, until the process ends; returns its exit code.

        Once is not always enough: a signal that comes after readline has shown the prompt and
        before it waits for keys is noticed at the next key.
        """
        ended, waits = 0, 0
        while not ended:
            if waits % 100 == 0:
                self.type("\x03")
            waits += 1
            time.sleep(0.1)
            ended, status = os.waitpid(self.child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pty")
def test_a_chat_on_a_terminal():
    terminal = Terminal(sys.executable, "-m", "selfspec.cli", "chat", "-n", "900")
    terminal.wait_for("turns are lines of one text.*/reset.*/quit.*accepted.*> ")
    terminal.type("/rest\n")
    terminal.wait_for("selfspec: unknown command: '/rest'.*> ")
    terminal.type("It was a dark and\n")
    terminal.wait_for("\x1b\\[32m")
    terminal.type("\x03")
    count = terminal.wait_for(r"(\d+) tokens, .*0 of \d+ tokens cached; stopped.*> ")[1]
    assert 0 < int(count) < 900
    assert terminal.interrupt_to_the_end() == 130
    assert "Traceback" not in terminal.shown

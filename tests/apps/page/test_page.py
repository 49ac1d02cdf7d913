"""The page of `selfspec app` in Gradio: it builds, streams to a client, and fetches nothing."""

import re
import socket
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from cli_tools import PROMPT, TOKENS, call
from conftest import EXIT, tiny_llama

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.cli import common
from selfspec.apps.display.app import DraftMenu, SideBySide

pytestmark = [
    pytest.mark.app,
    pytest.mark.filterwarnings("default"),  # those of other people's code are no errors here
    pytest.mark.skipif(
        find_spec("gradio") is None, reason="Gradio is not installed; `make test-app` installs it"
    ),
]

CHOSEN = {
    "drafter": "early_exit",
    "exit_layer": EXIT,
    "head": "shared",
    "num_draft_tokens": 3,
    "temperature": 0,
    "max_new_tokens": TOKENS,
    "no_repeat_ngram_size": 0,
    "rejected": False,
}


@pytest.fixture
def page(tokenizer):
    """The page of a tiny target."""
    from selfspec.apps.display.app.page import Page

    spec = SelfSpecModel(tiny_llama("sometimes"))
    made = Page(
        SideBySide(spec, tokenizer, 0.002), DraftMenu(spec, DraftConfig(exit_layer=EXIT)), "tiny"
    )
    yield made
    made.side.close()


def write(page, who="a", **chosen):
    """What the page's button does."""
    return page.write(PROMPT, **{**CHOSEN, **chosen}, request=SimpleNamespace(session_hash=who))


def test_a_client_is_streamed_both_texts_up_to_the_end(page):
    from gradio_client import Client

    with page.served("127.0.0.1", None, open_page=False) as address:
        client = Client(address, verbose=False, analytics_enabled=False)
        job = client.submit(*[PROMPT, *CHOSEN.values()], api_name="/write")
        *_, line, figures, plain, ours = job.result(timeout=60)[:4]
        assert len(job.outputs()) > 2  # streamed
    assert f"both outputs are equal, all {TOKENS} tokens" in line
    assert figures.count("–") == 0
    assert 'title="accepted"' in ours and "title=" not in plain


def test_what_is_served_leads_nowhere_else(page):
    assert page.blocks.analytics_enabled is False
    with page.served("127.0.0.1", None, open_page=False) as address:
        html = urlopen(address).read().decode()
        theme = urlopen(f"{address}theme.css").read().decode()
    fetched = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']([^\"']+)", html)
    assert fetched
    assert [link for link in fetched if "//" in link] == []
    assert "static/fonts" in theme
    assert re.findall(r"url\([\"']?(?:https?:)?//|@import", theme) == []


def test_a_mistake_is_a_line_and_the_page_goes_on(page):
    *_, (line, figures, _, _, start, halt) = write(page, exit_layer=9)
    assert 'wrong">exit_layer must be in [1, 3], got 9' in line
    assert "value" not in figures  # left as it is
    assert (start["interactive"], halt["interactive"]) == (True, False)
    *_, (line, *_) = write(page)
    assert "both outputs are equal" in line


def test_what_nobody_expected_is_a_line_too(page, monkeypatch, caplog):
    def wrong(*args, **kwargs):
        raise RuntimeError("a bug,\nsomewhere")

    monkeypatch.setattr(SelfSpecModel, "generate", wrong)
    *_, (line, *_) = write(page)
    assert 'wrong">RuntimeError: a bug, somewhere<' in line
    assert "Traceback" in caplog.text


def test_a_stop_is_for_whoever_asks(page):
    for asks, ends in (("b", "both outputs are equal"), ("a", "stopped")):
        writing = write(page, "a")
        next(writing)
        next(writing)
        page.stop(SimpleNamespace(session_hash=asks))
        *_, (line, *_) = writing
        assert ends in line


def test_controls_follow_what_was_chosen(page):
    at_exit, head, length = page.choose_drafter("prompt_lookup")
    assert (at_exit["interactive"], head["interactive"], length["value"]) == (False, False, 16)
    assert page.choose_drafter("lookahead")[2]["interactive"] is False
    assert page.choose_exit(1)["choices"] == ["shared"]


def test_a_port_that_is_taken_is_one_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call("app", "--model", folder, "--no-open", "--port", port, code=1)
    said = f"selfspec: cannot listen at 127.0.0.1, port {port}; is it taken? name another (--port)"
    assert result.stderr == f"{said}\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a bug")])
def test_what_ends_other_commands_ends_this_one_before_it_serves(error, monkeypatch):
    def fail(*args):
        raise error

    monkeypatch.setattr(common, "resolve", fail)
    interrupted = error is KeyboardInterrupt
    result = call("app", code=130 if interrupted else 1)
    assert result.stdout == ""
    assert ("RuntimeError: a bug" in result.stderr) is not interrupted

"""`selfspec app`: a web page that generates plainly and self-speculatively, side by side."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from selfspec.apps.cli.common import Reporter, Source, command
from selfspec.apps.cli.options import Drafting

_server = partial(typer.Option, rich_help_panel="Page")


@command
def app(
    console: Reporter,
    source: Source,
    drafting: Drafting,
    host: Annotated[str, _server(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        _server(
            min=1,
            max=65535,
            help="Port to listen at.",
            show_default="the first free one from 7860",
        ),
    ] = None,
    open_page: Annotated[bool, _server("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Open a web page that generates with and without speculation, side by side.

    Exit, draft length and drafter are chosen there; --draft sets their initial values. Ctrl-C ends
    it. Needs Gradio: pip install 'selfspec[app]'.
    """
    draft = drafting.chosen
    from selfspec.apps.display.app import DraftMenu, SideBySide
    from selfspec.apps.display.app.page import Page

    target = source.load()
    ran = target.to_dict()
    offer = DraftMenu(target.spec, draft or target.spec.default_draft)
    about = "{model} · {layers} layers · {dtype} · {device}, threads: {threads}".format(**ran)
    page = Page(SideBySide(target.spec, target.tokenizer), offer, about)
    with page.served(host, port, open_page) as address:
        console.answer({**ran, "address": address})
        console.print(f"{address} shows {target.name}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):  # which is how a server ends
            threading.Event().wait()

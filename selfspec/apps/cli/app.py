"""`selfspec app`: a web page that generates plainly and self-speculatively, side by side."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Annotated

import typer

from selfspec.apps.cli import options as opt
from selfspec.apps.cli.common import Source, print_json, reporting

_SERVER = "Page"


def app(
    model: opt.Model = None,
    heads: opt.Heads = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.Device = None,
    config: opt.Config = None,
    draft: opt.Draft = None,
    profile: opt.Profile = None,
    kernels: opt.KernelsOption = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen at.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port to listen at.",
            show_default="the first free one from 7860",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the browser.", rich_help_panel=_SERVER)
    ] = True,
    as_json: opt.AsJson = False,
) -> None:
    """Open a web page that generates with and without speculation, side by side.

    Exit, draft length and drafter are chosen there; --draft sets their initial values. Ctrl-C ends
    it. Needs Gradio: pip install 'selfspec[app]'.
    """
    drafting = opt.draft_config(config, draft)
    with reporting(as_json) as console:
        from selfspec.apps.display.app import DraftMenu, SideBySide
        from selfspec.apps.display.app.page import Page

        target = Source(model, heads, dtype, device, profile, kernels).load()
        ran = target.to_dict()
        offer = DraftMenu(target.spec, drafting or target.spec.default_draft)
        about = "{model} · {layers} layers · {dtype} · {device}, threads: {threads}".format(**ran)
        page = Page(SideBySide(target.spec, target.tokenizer), offer, about)
    with page.served(host, port, open_page) as address:
        if as_json:
            print_json({**ran, "address": address})
            sys.stdout.flush()  # whoever started us waits for it
        console.print(f"{address} shows {target.name}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):  # which is how a server ends
            threading.Event().wait()

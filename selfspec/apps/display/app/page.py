"""The page of `selfspec app` in Gradio: controls above, both outputs below."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selfspec.apps.display.app import view
from selfspec.apps.display.app.side_by_side import LONGEST_DRAFT, DraftMenu, Frame, SideBySide
from selfspec.apps.display.demo import DemoOptions, load_prompts

try:
    import gradio as gr  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("the page needs Gradio: pip install 'selfspec[app]'") from error

_LOG = logging.getLogger(__name__)
_EXPECTED = (ValueError, OSError)
_NARROW = 120  # pixels, so that two controls stand side by side
# Features of Gradio that are switched off: the page serves one purpose on one machine.
_AT_HOME = {
    "share": False,
    "ssr_mode": False,
    "mcp_server": False,
    "run_history": False,
    "enable_monitoring": False,
    "pwa": False,
    "footer_links": [],
}
_PLAIN = ("plain decoding", "the model's own <code>generate</code>")
_OURS = ("self-speculation", "the same model drafts for itself; hover over a token")


class Page:
    """The page, with a line `about` the model; `blocks` is Gradio's."""

    def __init__(self, side: SideBySide, offer: DraftMenu, about: str):
        self.side, self.offer = side, offer
        self.stops: dict[str, threading.Event] = {}  # by reader
        with gr.Blocks(title="selfspec", analytics_enabled=False, fill_width=True) as self.blocks:
            gr.Markdown(f"## selfspec\n{about}")
            with gr.Row():
                with gr.Column():
                    self.example, self.prompt = self._prompt()
                    with gr.Row():
                        self.start = gr.Button("Write", variant="primary", elem_id="write")
                        self.halt = gr.Button("Stop", elem_id="stop", interactive=False)
                    self.line = gr.HTML(view.message(""), elem_id="line")
                with gr.Column():
                    self.controls = self._controls()
            figures, plain, ours = _panes(Frame("waiting", ""))
            self.figures = gr.HTML(figures, elem_id="figures")
            with gr.Row():
                self.plain = gr.HTML(plain, elem_id="plain")
                self.ours = gr.HTML(ours, elem_id="speculative")
            self._connect()

    def _prompt(self) -> tuple[gr.Dropdown, gr.Textbox]:
        passages = load_prompts()
        choices = [
            (f"{each.domain}: {' '.join(each.text.split())[:45]} …", each.text) for each in passages
        ]
        first = passages[0].text
        example = gr.Dropdown(choices, value=first, label="Example", elem_id="example")
        box = gr.Textbox(first, label="Prompt", lines=8, max_lines=8, elem_id="prompt")
        return example, box

    def _controls(self) -> list[Any]:
        """The controls, in the order of the parameters of `write`."""
        offer, drafter = self.offer, self.offer.base.drafter
        at_exit, heads = offer.at_an_exit(drafter), offer.heads(offer.exit_layer)
        positions = self.side.spec.decoder.max_positions
        most = min(512, positions or 512)
        fitted = sorted({head.exit_layer for head in offer.spec.heads})
        with gr.Row():
            self.drafter = gr.Dropdown(
                offer.drafters, value=drafter, label="Drafter", min_width=_NARROW, elem_id="drafter"
            )
            self.head = gr.Dropdown(
                heads,
                value=heads[0],
                label="Exit head",
                interactive=at_exit,
                min_width=_NARROW,
                elem_id="head",
            )
        with gr.Row():
            self.exit = _slider(
                "Exit after layer",
                (offer.exits[0], offer.exits[-1]),
                offer.exit_layer,
                info=f"heads fitted at {', '.join(map(str, fitted)) or 'none'}",
                interactive=at_exit,
                elem_id="exit",
            )
            self.length = _slider(
                "Draft length",
                (1, LONGEST_DRAFT),
                offer.num_draft_tokens,
                info="at most, in a round",
                interactive=offer.takes_length(drafter),
            )
        with gr.Row():
            heat = _slider("Temperature", (0, 2), 0, step=0.1, info="0 decodes greedily")
            count = _slider(
                "Tokens to write",
                (1, most),
                min(160, most),
                info="for each method",
                elem_id="tokens",
            )
        with gr.Row():
            ngram = _slider("No phrase twice", (0, 8), 0, info="in tokens; 0 allows it")
            rejected = gr.Checkbox(
                False, label="Rejected drafts", info="shown too, struck out", min_width=_NARROW
            )
        return [self.drafter, self.exit, self.head, self.length, heat, count, ngram, rejected]

    def _connect(self) -> None:
        shown = [self.line, self.figures, self.plain, self.ours, self.start, self.halt]
        self.start.click(
            self.write,
            [self.prompt, *self.controls],
            shown,
            api_name="write",
            show_progress="hidden",
            concurrency_limit=16,  # generations that may wait for the model
        )
        self.example.input(None, self.example, self.prompt, js="text => text")
        quick = {"queue": False, "api_visibility": "private", "show_progress": "hidden"}
        self.halt.click(self.stop, None, None, **quick)
        self.blocks.unload(self.stop)
        dependent = [self.exit, self.head, self.length]
        self.drafter.input(self.choose_drafter, [self.drafter], dependent, **quick)
        self.exit.input(
            self.choose_exit, [self.exit], [self.head], trigger_mode="always_last", **quick
        )

    def write(
        self,
        prompt: str,
        drafter: str,
        exit_layer: float,
        head: str,
        num_draft_tokens: float,
        temperature: float,
        max_new_tokens: float,
        no_repeat_ngram_size: float,
        rejected: bool,
        request: gr.Request,
    ) -> Iterator[tuple[object, ...]]:
        """The page's content, frame by frame; an error is shown as a line."""
        stop = self.stops[_reader(request)] = threading.Event()
        try:
            draft = self.offer.draft(drafter, int(exit_layer), head, int(num_draft_tokens))
            options = DemoOptions(
                draft=draft,
                max_new_tokens=int(max_new_tokens),
                temperature=temperature,
                no_repeat_ngram_size=int(no_repeat_ngram_size),
            )
            for frame in self.side.write(prompt, options, stop, rejected):
                writing = frame.state != "done"
                yield (view.line(frame), *_panes(frame), *_buttons(writing))
        except Exception as error:  # the page must survive any error
            line = str(error)
            if not isinstance(error, _EXPECTED):
                line = f"{type(error).__name__}: {line}"
                _LOG.exception("generation failed")
            left = (gr.skip(),) * 3
            yield (view.message(line, "wrong"), *left, *_buttons(writing=False))
        finally:
            self.stops.pop(_reader(request), None)

    def stop(self, request: gr.Request) -> None:
        """Stop the reader's generation."""
        stop = self.stops.get(_reader(request))
        if stop is not None:
            stop.set()

    def choose_drafter(self, drafter: str) -> tuple[object, ...]:
        """Enable the controls that the drafter uses."""
        offer = self.offer
        at_exit = gr.update(interactive=offer.at_an_exit(drafter))
        takes_length, length = offer.takes_length(drafter), offer.length_of(drafter)
        return at_exit, at_exit, gr.update(interactive=takes_length, value=length)

    def choose_exit(self, exit_layer: float) -> object:
        """Show the heads at that exit layer."""
        heads = self.offer.heads(int(exit_layer))
        return gr.update(choices=heads, value=heads[0])

    @contextmanager
    def served(self, host: str, port: int | None, open_page: bool) -> Iterator[str]:
        """Serve the page; yields its address. Without a port it takes the first free from 7860.

        Raises:
            OSError: the port is taken.
        """
        try:
            _, address, _ = self.blocks.launch(
                server_name=host,
                server_port=port,
                inbrowser=open_page,
                prevent_thread_lock=True,
                quiet=True,
                # Gradio's default theme serves its own fonts.
                theme=gr.themes.Default(primary_hue="teal").set(
                    block_info_text_color="*neutral_500"
                ),
                css=view.CSS,
                **_AT_HOME,
            )
        except OSError as error:
            where = f"port {port}" if port is not None else "no port from 7860 on"
            raise OSError(
                f"cannot listen at {host}, {where}; is it taken? name another (--port)"
            ) from error
        try:
            yield address
        finally:
            self.side.close()
            self.blocks.close(verbose=False)


def _slider(
    label: str, ends: tuple[int, int], value: int, step: float = 1, **more: object
) -> gr.Slider:
    return gr.Slider(*ends, value, step=step, label=label, min_width=_NARROW, buttons=[], **more)


def _reader(request: gr.Request) -> str:
    """Identifies the reader: every open page is one."""
    return request.session_hash or ""


def _panes(frame: Frame) -> tuple[str, str, str]:
    """The figures, and both outputs."""
    plain = view.pane(*_PLAIN, frame.prompt, frame.plain)
    return view.figures(frame), plain, view.pane(*_OURS, frame.prompt, frame.speculative)


def _buttons(writing: bool) -> tuple[object, object]:
    return gr.update(interactive=not writing), gr.update(interactive=writing)

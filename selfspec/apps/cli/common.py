"""What commands share: options in groups, text or JSON, loading a target, reading prompts."""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from selfspec import DEMO_MODEL
from selfspec.apps.cli.options import (
    AsJson,
    Device,
    Drafting,
    DtypeOption,
    Heads,
    KernelsOption,
    KVCacheOption,
    Model,
    Profile,
    Writing,
)
from selfspec.apps.smollm2 import HEADS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.config import DraftConfig, JsonObject, Options
    from selfspec.model import SelfSpecModel
    from selfspec.schedule.stats import Stats

_LINE_EVERY = 10.0  # seconds between lines of progress where there is no terminal


class Reporter(Console):
    """A command's console. With `--json` it is quiet, and `answer` prints to stdout."""

    def __init__(self, as_json: bool):
        super().__init__(markup=False, highlight=False, quiet=as_json)
        self._stdout = sys.stdout if as_json else None

    def answer(self, data: JsonObject) -> None:
        """With `--json`, print one JSON object on one line, and flush: another process may wait."""
        if self._stdout is not None:
            self._stdout.write(json.dumps(data, allow_nan=False) + "\n")
            self._stdout.flush()


def command(function: Callable[..., None], source: Sequence[str] = ()) -> Callable[..., None]:
    """Make a command of a function of a `Reporter`, groups of options, and options of its own.

    The fields of a group become options, of a `Source` only those of `source`, if any. `--json` is
    the last; with it, whatever is printed to stdout goes to stderr.
    """
    groups: dict[str, Any] = {}
    options: dict[str, tuple[object, object]] = {}  # default and annotation by name
    for each in list(inspect.signature(function, eval_str=True).parameters.values())[1:]:
        if not is_dataclass(each.annotation):
            options[each.name] = each.default, each.annotation
            continue
        group = groups[each.name] = each.annotation
        hints = get_type_hints(group, include_extras=True)
        taken = source if group is Source and source else hints
        options |= {name: (getattr(group, name), hints[name]) for name in taken}
    options["as_json"] = False, AsJson

    def run(as_json: bool, **given: object) -> None:
        for name, group in groups.items():
            own = [field.name for field in fields(group) if field.name in given]
            given[name] = group(**{field: given.pop(field) for field in own})
        reporter = Reporter(as_json)
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            function(reporter, **given)

    made: Any = run
    by_name = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    made.__signature__ = inspect.Signature(
        [by_name(n, default=default, annotation=kind) for n, (default, kind) in options.items()]
    )
    made.__name__, made.__doc__, made.__annotations__ = function.__name__, function.__doc__, {}
    return made


def make_folder_of(file: Path) -> None:
    """Make the folder of an output file, before any long work; ValueError if a file is there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"cannot write {file}: {file.parent} is not a folder") from None


def progress() -> Console:
    """A console on stderr for progress; quiet off a terminal."""
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal
    return console


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows what is done, how many of it, and of how many.

    On a terminal it is a bar on stderr, elsewhere a line on stderr every `_LINE_EVERY` seconds.
    """
    console = progress()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet)
    last = time.monotonic()

    def show(doing: str, done: int, of: int) -> None:
        nonlocal last
        bar.update(task, completed=done, total=of, description=doing)
        if console.quiet and time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            typer.echo(f"{done}/{of}  {doing}", err=True)

    with bar:
        task = bar.add_task("", total=None)
        yield show


def complain(message: str) -> None:
    """Print an error on stderr, in one line."""
    line = " ".join(message.split())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"selfspec: {line}", markup=False)


def summary(stats: Stats) -> str:
    """The figures of one call in a line."""
    return (
        f"{stats.emitted} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"acceptance rate {stats.acceptance_rate:.3f}, "
        f"mean accepted length {stats.mean_accepted_length:.2f}"
    )


def in_units(count: float, unit: str = "") -> str:
    """A large number with a unit prefix: 12.9 M, 1.5 GB."""
    power = min(4, int(math.log10(max(1, abs(count))) / 3))
    return f"{count / 1000**power:.3g} {['', 'k', 'M', 'G', 'T'][power]}{unit}".rstrip()


@dataclass(frozen=True)
class Loaded:
    """A loaded target."""

    name: str  # as the user gave it
    spec: SelfSpecModel
    tokenizer: PreTrainedTokenizerBase

    def to_dict(self) -> JsonObject:
        """Model, device and settings, for reports."""
        import torch

        decoder = self.spec.decoder
        return {
            "model": self.name,
            "layers": decoder.depth,
            "dtype": str(decoder.dtype).removeprefix("torch."),
            "device": str(decoder.device),
            "kernels": decoder.kernels,
            "kv_cache_dtype": decoder.kv_cache_dtype,
            "threads": torch.get_num_threads(),
        }


# What in a generation config says nothing about how a text is chosen.
_NO_CHOICE = ("max_length", "max_new_tokens", "transformers_version", "use_cache")
# What has no effect on greedy decoding.
_SAMPLING = {
    *("epsilon_cutoff", "eta_cutoff", "min_p", "temperature", "top_h", "top_k", "top_p"),
    "typical_p",
}


def own_choices(spec: SelfSpecModel) -> JsonObject:
    """What the checkpoint's generation config says about how a text is chosen."""
    given = spec.generation_config.to_diff_dict()
    return {
        name: value
        for name, value in given.items()
        if (value or type(value) in (int, float))  # `top_k` 0 says something
        and name not in _NO_CHOICE
        and not name.endswith("_token_id")
        and not name.startswith(("_", "output_", "return_"))
    }


def hint_heads(spec: SelfSpecModel) -> None:
    """Say that the package has an exit head for the checkpoint, if it runs without heads."""
    from selfspec.heads import HEADS_CONFIG
    from selfspec.heads.files import read_object
    from selfspec.heads.store import check_fingerprint

    if spec.heads:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the same weights in another precision
        try:
            check_fingerprint(spec.decoder, read_object(HEADS / HEADS_CONFIG)["target"], str(HEADS))
        except ValueError:
            return
    note(f"the package has an exit head for this checkpoint: --heads {HEADS}")


def begin(
    source: Source, drafting: Drafting, writing: Writing
) -> tuple[Loaded, DraftConfig, Options]:
    """Load a target to write with; returns it, the draft, and options of transformers' `generate`.

    Shows what `show_choices` does.
    """
    chosen, options = drafting.chosen, writing.options
    target = source.load()
    show_choices(target.spec, options)
    sampled = _samples(target.spec, options)
    return target, chosen or target.spec.draft_for(sampled=sampled), options


def _samples(spec: SelfSpecModel, options: Options) -> bool:
    return bool(options.get("do_sample", spec.generation_config.do_sample))


def show_choices(spec: SelfSpecModel, options: Options) -> None:
    """Show on stderr what the checkpoint's generation config decides beside the options.

    Also that the package has a head for the checkpoint, if it runs without heads.
    """
    hint_heads(spec)
    sampled = _samples(spec, options)
    idle = options.keys() if sampled else options.keys() | _SAMPLING
    kept = {name: value for name, value in own_choices(spec).items() if name not in idle}
    if kept:
        told = ", ".join(f"{name}={value}" for name, value in kept.items())
        note(f"of the checkpoint's generation_config: {told}")


def note(message: str) -> None:
    """Print a line on stderr that is not an error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, style="dim", markup=False)


def resolve(model: str | None) -> tuple[str, Path | str]:
    """The target's name, and the folder or id to load it from; FileNotFoundError if it is none."""
    if model is None:
        return DEMO_MODEL.name, DEMO_MODEL
    from selfspec.decoder.checkpoints import find_checkpoint

    return model, find_checkpoint(model)


@dataclass(frozen=True)
class Source:
    """Where a target comes from, and how it runs; the fields are options of commands."""

    model: Model = None
    heads: Heads = None
    dtype: DtypeOption = "auto"
    device: Device = None
    kernels: KernelsOption = "auto"
    kv_cache: KVCacheOption = "auto"
    profile: Profile = None

    def load(self) -> Loaded:
        """Load the target and its tokenizer.

        Raises OSError if there is no such model or it cannot be read, ValueError if it is not
        supported or the heads belong to another one.
        """
        name, _ = resolve(self.model)
        with progress().status(f"loading {name}"):
            return Loaded(name, self.load_spec(), self.tokenizer)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer; raises OSError as `load` does."""
        from selfspec.decoder.checkpoints import load_tokenizer

        return load_tokenizer(resolve(self.model)[1])

    def load_spec(self) -> SelfSpecModel:
        """Load the target without its tokenizer; raises as `load` does."""
        quiet_transformers()
        from selfspec.model import SelfSpecModel

        stored = self.model is None and self.dtype == "auto"
        return SelfSpecModel.from_pretrained(
            resolve(self.model)[1],
            self.heads,
            profile=self.profile,
            kernels=self.kernels,
            kv_cache_dtype=self.kv_cache,
            dtype="float32" if stored else self.dtype,
            **_placed(self.device),
        )


def _placed(device: str | None) -> Options:
    """Options of `from_pretrained` for a device."""
    from selfspec.decoder.devices import usable_device

    if device == "auto":
        return {"device_map": "auto"}
    found = usable_device(device)
    return {} if found.type == "cpu" else {"device_map": str(found)}


def quiet_transformers() -> None:
    """Silence transformers on stderr, except progress bars on a terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts, from the argument, a file or stdin.

    Raises FileNotFoundError without the file, ValueError if there is no text, it is not UTF-8, or a
    line is not a JSON object with a prompt.
    """
    given = prompt if prompt != "-" else None
    source, text = ("the argument", given) if given is not None else _read(file)
    if not _whole(text, source).strip():
        raise ValueError(f"empty prompt from {source}; there must be text to continue")
    if given is not None:
        return [text]
    if elements := _elements(text):
        return [_prompt_of(each, f"{source}, record {n}") for n, each in enumerate(elements, 1)]
    if not text.lstrip().startswith("{"):
        return [text.rstrip("\n")]
    lines = enumerate(text.split("\n"), 1)
    return [_prompt_of(line, f"{source}, line {n}") for n, line in lines if line.strip()]


def _elements(text: str) -> list[str]:
    """The elements of a JSON array that begins with an object; none in any other text."""
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else []
    except json.JSONDecodeError:
        return []
    return [json.dumps(each) for each in found] if isinstance(next(iter(found), 0), dict) else []


def _read(file: Path | None) -> tuple[str, str]:
    """The name of the source and its text; stdin if there is no file."""
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or text on stdin")
    if file is None or str(file) == "-":
        try:
            return "stdin", sys.stdin.read().removeprefix("\ufeff")  # a byte order mark
        except UnicodeDecodeError as error:
            raise ValueError(f"stdin is not UTF-8 text (byte {error.start})") from None
    if not file.is_file():
        raise FileNotFoundError(f"no prompt file at {file}")
    from selfspec.config import read_text

    return str(file), read_text(file)


def _prompt_of(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, TypeError, KeyError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{place} must be a JSON object like {{"prompt": "..."}}, got {line[:80]}')
    return _whole(prompt, place)


def _whole(prompt: str, place: str) -> str:
    """A prompt of whole characters, as tokenizers take them."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} is not Unicode text: character {error.start} is "
            f"{prompt[error.start]!a}, half of a surrogate pair or a byte that is not UTF-8"
        ) from None
    return prompt

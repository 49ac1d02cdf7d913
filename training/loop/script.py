"""What training scripts share: arguments, errors, the saved config, the run's folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.config import ConfigT, StrictConfig, load_config
from selfspec.heads.files import one_run, replace_text

from .checkpoint import Checkpoints, write_folder
from .parallel import processes

CONFIG_NAME = "config.yaml"


def run_script(main: Callable[[ConfigT], object], config: type[ConfigT], usage: str | None) -> None:
    """Run a script on its command line: `--config file.yaml [section.field=value ...]`.

    It prints its complete config first.

    Expected errors are one line on stderr: exit code 2 for wrong arguments, 1 for errors at run
    time (bad text, a loss that is not finite, a full disk). `python -X dev` shows the traceback.

    Args:
        main: the script, a function of its config.
        config: class of the config.
        usage: text of `--help`.
    """
    settings = _read_arguments(config, usage)
    if processes().is_main_process:
        Console(highlight=False).print(as_yaml(settings), markup=False, soft_wrap=True)
    try:
        main(settings)
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if sys.flags.dev_mode:
            raise
        _end(" ".join(str(error).split()), 1)
    processes().destroy_process_group()


def _read_arguments(config: type[ConfigT], usage: str | None) -> ConfigT:
    """The config of the command line; an error ends the program."""
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("overrides", nargs="*", help="section.field=value, values are YAML")
    arguments = parser.parse_intermixed_args()
    try:
        return load_config(config, arguments.config, arguments.overrides)
    except (ValueError, OSError) as error:
        _end(str(error), 2)


def _end(message: str, code: int) -> NoReturn:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error: {message}", style="red", markup=False)
    sys.exit(code)


@contextmanager
def run_folder(
    config: StrictConfig, output: Path, identity: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """The run's folder with the complete config in it, kept from other runs until the block ends.

    Args:
        config: the run's.
        output: its folder.
        identity: facts that must equal those of a run in the folder, if there is one.

    Raises:
        BlockingIOError: another process runs in the folder.
        ValueError: the facts differ; the folder is left as it is.
    """
    main, path, checkpoints = processes().is_main_process, output / CONFIG_NAME, Checkpoints(output)
    with one_run(output) if main else nullcontext():
        checkpoints.check_identity(identity or {})
        steps = checkpoints.steps()
        before = path.read_text(encoding="utf-8") if main and steps and path.exists() else None
        if main:
            replace_text(path, as_yaml(config))
        try:
            yield output
        except ValueError:  # refused later, when the text was read
            if before is not None and checkpoints.steps() == steps:
                replace_text(path, before)
            raise


def as_yaml(config: StrictConfig) -> str:
    """The complete config as text."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def finish_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    facts: Mapping[str, Any],
) -> None:
    """Save a checkpoint, its tokenizer and its figures, atomically."""

    def fill(scratch: Path) -> None:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        text = json.dumps(dict(facts), indent=1) + "\n"
        (scratch / "eval.json").write_text(text, encoding="utf-8")

    write_folder(folder, fill)

"""What the training scripts share: arguments, the echoed config, the folder a run leaves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.config import ConfigT, StrictConfig, load_config
from selfspec.heads.store import replacing
from training.checkpoint import write_folder

CONFIG_NAME = "config.yaml"


def read_arguments(config: type[ConfigT], usage: str | None) -> ConfigT:
    """Read `--config file.yaml [section.field=value ...]`; a mistake ends the program."""
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("overrides", nargs="*", help="section.field=value, values are YAML")
    arguments = parser.parse_args()
    try:
        return load_config(config, arguments.config, arguments.overrides)
    except (ValueError, FileNotFoundError) as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", style="red", markup=False)
        sys.exit(2)


def start_output(config: StrictConfig, output: Path) -> Path:
    """Make the run's folder; say and save the config with every default filled in."""
    output.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    with replacing(output / CONFIG_NAME) as scratch:
        scratch.write_text(text, encoding="utf-8")
    Console(highlight=False).print(text, markup=False)
    return output


def finish_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    facts: Mapping[str, Any],
) -> None:
    """Save a checkpoint, its tokenizer and what was measured of it, whole or not at all."""

    def fill(scratch: Path) -> None:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        text = json.dumps(dict(facts), indent=1) + "\n"
        (scratch / "eval.json").write_text(text, encoding="utf-8")

    write_folder(folder, fill)

"""Generates the target's own continuations of prompts, as training text for heads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.apps.chat_templates import turn_stops
from selfspec.config import StrictConfig
from selfspec.decoder.checkpoints import load_tokenizer
from selfspec.drafters import CheckedDraft
from selfspec.heads.files import check_free, read_lines, refuse_changes

from .data import SourceConfig
from .data.prompts import Prompt, PromptConfig, read_prompts
from .loop.checkpoint import digest, name_of, read_facts, target_facts, write_facts
from .loop.metrics import Display
from .loop.parallel import processes
from .loop.script import run_folder, run_script

TEXTS_NAME = "texts.jsonl"
_FACTS_NAME = "texts.json"


class RegenerateConfig(StrictConfig):
    """A regeneration.

    Attributes:
        output: folder of the run; texts are written to `texts.jsonl` in it.
        target: a checkpoint's folder or model id; `demo` is the one in the package.
        dtype: of the target's weights; `auto` takes the checkpoint's.
        heads: folder of exit heads; `null` takes those beside the checkpoint, if there are any.
        draft: how to draft; `null` takes the first head, or decodes plainly without one.
        data: text or chats, each source with its weight (`prompts.count`).
        prompts: how prompts are cut.
        new_tokens: the most tokens generated after a prompt.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling.
        batch_size: prompts that are continued at a time; the next one starts when one has ended.
        seed: seed of the order of the prompts and of sampling. With `rule: coupled` of `draft`,
            each text depends on its prompt only (up to rounding), also when a run is resumed.
    """

    output: str
    target: str = "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    heads: str | None = None
    draft: CheckedDraft | None = None
    data: list[SourceConfig] = Field(min_length=1)
    prompts: PromptConfig = PromptConfig()
    new_tokens: int = Field(default=224, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    batch_size: int = Field(default=16, ge=1)
    seed: int = Field(default=0, ge=0)

    @property
    def identity(self) -> dict[str, Any]:
        """What must stay as it is when the run is resumed."""
        told = self.model_dump(mode="json", exclude={"output"})
        return {**told, "target": name_of(self.target)}


def regenerate(config: RegenerateConfig) -> Path:
    """Generate all texts, resuming what is in the folder; returns their file.

    Raises:
        FileNotFoundError: a source has no files.
        ValueError: the folder holds other texts, or the data gives no prompts.
        OSError: a text could not be written; earlier ones are kept.
    """
    if processes().num_processes > 1:
        raise ValueError("regenerate runs in one process; give each its share of the data instead")
    output = Path(config.output)
    check_free(output)
    _check(output, config.identity)
    with run_folder(config, output):
        return _regenerate(config, output)


def _regenerate(config: RegenerateConfig, output: Path) -> Path:
    spec, tokenizer = load(config)
    decoder = spec.decoder
    longest = decoder.max_positions and decoder.max_positions - config.new_tokens
    prompts = read_prompts(config.data, config.prompts, tokenizer, config.seed, longest)
    facts = {
        **config.identity,
        "model": target_facts(decoder),
        "text": digest([prompt.tokens for prompt in prompts]),
    }
    _check(output, facts)
    write_facts(output / _FACTS_NAME, facts)
    return write_texts(spec, tokenizer, prompts, config)


def _check(output: Path, facts: dict[str, Any]) -> None:
    saved = read_facts(output / _FACTS_NAME)
    if saved is None and (output / TEXTS_NAME).exists():
        raise ValueError(f"{output} holds texts without their {_FACTS_NAME}; give a new folder")
    # Before the target is loaded, its facts are unknown.
    known = {name: value for name, value in (saved or facts).items() if name in facts}
    remedy = "give a new output folder, or delete that one to start afresh"
    refuse_changes(known, facts, f"{output} holds texts", remedy)


def load(config: RegenerateConfig) -> tuple[SelfSpecModel, PreTrainedTokenizerBase]:
    """The target with its heads, on the accelerator if there is one, and its tokenizer."""
    source = DEMO_MODEL if config.target == "demo" else config.target
    spec = SelfSpecModel.from_pretrained(
        source, config.heads, dtype=config.dtype, device_map=processes().device
    )
    return spec, load_tokenizer(source)


def write_texts(
    spec: SelfSpecModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: RegenerateConfig,
) -> Path:
    """Generate the texts that the file does not hold yet; each is written when it is finished."""
    path = Path(config.output) / TEXTS_NAME
    done = numbers_in(path)
    missing = [number for number in range(len(prompts)) if number not in done]
    display = Display("regenerating", len(prompts), len(done))
    if not missing:
        display.say(f"all {len(prompts)} texts are there: {path}")
        return path
    of_chats = prompts[0].chat is not None  # all of them, or none
    outputs = spec.generate_batch_iter(
        [prompts[number].tokens for number in missing],
        batch_size=config.batch_size,
        draft=config.draft or (DraftConfig() if spec.heads else "none"),
        max_new_tokens=config.new_tokens,
        seed=[seed_of(config.seed, number) for number in missing],
        **_sampling(config),
        **(turn_stops(spec, tokenizer) if of_chats else {}),
    )
    with display, spec.decoder:  # nothing else uses the model between texts
        for count, output in enumerate(outputs, len(done) + 1):
            number = missing[output.number]
            if output.error is not None:
                raise ValueError(f"prompt {number} was not continued: {output.error}")
            line = record(prompts[number], output.generated_tokens, tokenizer, number)
            append(path, json.dumps(line, ensure_ascii=False) + "\n")
            last = count == len(prompts)
            display.step(count, _speed(spec), line=last or count % config.batch_size == 0)
    display.say(f"{len(prompts)} texts: {path}")
    return path


def numbers_in(path: Path) -> set[int]:
    """Numbers of the prompts whose texts are in the file; an unfinished last line is removed."""
    return {record["number"] for record in read_lines(path, "number")}


def seed_of(seed: int, number: int) -> int:
    """The seed of the sampling for a prompt."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def append(path: Path, line: str) -> None:
    """Append a text to the file and flush it to disk.

    Raises:
        OSError: it could not be written.
    """
    try:
        with path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error}); run it again to resume after the last text"
        ) from error


def _sampling(config: RegenerateConfig) -> dict[str, Any]:
    """Sampling options, which override those of the checkpoint."""
    if config.temperature == 0:
        return {"do_sample": False, "repetition_penalty": 1.0}
    return {
        "do_sample": True,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": 0,
        "repetition_penalty": 1.0,
    }


def record(
    prompt: Prompt, new: list[int], tokenizer: PreTrainedTokenizerBase, number: int
) -> dict[str, Any]:
    """The record of a prompt: the whole text, or the chat with the new reply."""
    options: dict[str, Any] = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    if prompt.chat is None:
        said: dict[str, Any] = {"text": tokenizer.decode([*prompt.tokens, *new], **options)}
    else:
        content = prompt.opened + str(tokenizer.decode(new, **options))
        messages = [*prompt.chat.messages, {"role": "assistant", "content": content}]
        said = {"messages": messages, **prompt.chat.options}
    counts = {"prompt_tokens": len(prompt.tokens), "new_tokens": len(new)}
    return {**said, **counts, "source": prompt.source, "number": number}


def _speed(spec: SelfSpecModel) -> dict[str, float]:
    stats = spec.last_stats
    assert stats is not None
    return {
        "tokens_per_second": stats.emitted / stats.seconds["total"],
        "tokens_a_round": stats.mean_accepted_length,
    }


if __name__ == "__main__":
    run_script(regenerate, RegenerateConfig, __doc__)

"""Generates the target's own continuations of prompts, as training text for heads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.bench.prompts import padded
from selfspec.config import StrictConfig
from selfspec.heads.files import refuse_changes

from .data import SourceConfig
from .data.prompts import Prompt, PromptConfig, batches, read_prompts
from .loop.checkpoint import digest, read_facts, target_facts, write_facts
from .loop.metrics import Display
from .loop.parallel import processes
from .loop.script import run_script, start_output

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
        batch_size: prompts that are continued at once.
        seed: seed of the order of the prompts and of sampling.
    """

    output: str
    target: str = "demo"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    heads: str | None = None
    draft: DraftConfig | None = None
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
        return self.model_dump(mode="json", exclude={"output"})


def regenerate(config: RegenerateConfig) -> Path:
    """Generate all texts, resuming what is in the folder; returns their file.

    Raises:
        FileNotFoundError: a source has no files.
        ValueError: the folder holds other texts, or the data gives no prompts.
        OSError: a batch could not be written; earlier ones are kept.
    """
    if processes().num_processes > 1:
        raise ValueError("regenerate runs in one process; give each its share of the data instead")
    output = Path(config.output)
    _check(output, config.identity)
    start_output(config, output)
    spec, tokenizer = load(config)
    decoder = spec.engine.decoder
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
    return spec, AutoTokenizer.from_pretrained(source)


def write_texts(
    spec: SelfSpecModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    config: RegenerateConfig,
) -> Path:
    """Generate the batches that the file does not hold yet."""
    path = Path(config.output) / TEXTS_NAME
    parts = batches(prompts, config.batch_size)
    done = cut_to_batches(path, [len(part) for part in parts])
    display = Display("regenerating", len(parts), done)
    if done == len(parts):
        display.say(f"all {len(prompts)} texts are there: {path}")
        return path
    with display:
        for number in range(done, len(parts)):
            rows = write_on(spec, [prompts[n] for n in parts[number]], config, number)
            lines = [
                json.dumps(record(prompts[n], new, tokenizer, n), ensure_ascii=False) + "\n"
                for n, new in zip(parts[number], rows, strict=True)
            ]
            append(path, "".join(lines))
            display.step(
                number + 1, _speed(spec), line=number % 10 == 0 or number + 1 == len(parts)
            )
    display.say(f"{len(prompts)} texts: {path}")
    return path


def cut_to_batches(path: Path, sizes: Sequence[int]) -> int:
    """Drop an unfinished batch; returns the number of complete ones in the file.

    Args:
        path: the texts; may not exist.
        sizes: lines of each batch.
    """
    if not path.exists():
        return 0
    done = lines = place = end = 0
    with path.open("rb") as file:
        for line in file:
            if done == len(sizes) or not line.endswith(b"\n"):
                break
            lines, place = lines + 1, place + len(line)
            if lines == sizes[done]:
                done, lines, end = done + 1, 0, place
    os.truncate(path, end)
    return done


def append(path: Path, lines: str) -> None:
    """Append a batch to the file and flush it to disk.

    Raises:
        OSError: it could not be written.
    """
    try:
        with path.open("ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error}); run it again to resume after the last "
            "complete batch"
        ) from error


def write_on(
    spec: SelfSpecModel, prompts: Sequence[Prompt], config: RegenerateConfig, number: int
) -> list[list[int]]:
    """The new tokens of each prompt of a batch, stop token included."""
    device = spec.engine.decoder.device
    tokens, mask = padded([torch.tensor(prompt.tokens) for prompt in prompts], device)
    seed = np.random.SeedSequence((config.seed, number)).generate_state(1)
    plain = DraftConfig(drafter="none")
    spec.generate(
        tokens,
        attention_mask=mask,
        draft=config.draft or (DraftConfig() if spec.heads else plain),
        generator=torch.Generator(device).manual_seed(int(seed[0])),
        max_new_tokens=config.new_tokens,
        pad_token_id=0,
        **_sampling(config),
    )
    assert spec.last_trace is not None
    return [spec.last_trace.tokens(row) for row in range(len(prompts))]


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
    if prompt.messages is None:
        said: dict[str, Any] = {"text": tokenizer.decode([*prompt.tokens, *new], **options)}
    else:
        reply = {"role": "assistant", "content": tokenizer.decode(new, **options)}
        said = {"messages": [*prompt.messages, reply]}
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

"""`SelfSpecModel`: a checkpoint that drafts for itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from selfspec.config import DraftConfig
from selfspec.coverage import refuse_other_loops
from selfspec.decoder import Decoder
from selfspec.decoding import Call, SpecOutput, speculate
from selfspec.drafters import make_drafter
from selfspec.engine import Engine
from selfspec.heads import (
    CONFIG_NAME,
    ExitHead,
    find_heads,
    load_heads,
    push_heads,
    save_heads,
)
from selfspec.prompts import check_mask, to_left_padding
from selfspec.stats import Stats, Trace


class SelfSpecModel:
    """A causal language model and its exit heads.

    The wrapped model is not changed: its own `generate` and `forward` stay what they were.

    Args:
        model: a decoder-only causal LM of transformers, PEFT-wrapped or not.
        heads: exit heads, the folder they were saved in, or their id on the hub; `None` for a
            target without.

    Attributes:
        model: the model as it was given.
        last_stats: counters and clocks of the last `generate`.
        last_trace: every round of the last `generate`.

    Raises:
        ValueError: the model cannot draft for itself, or the heads belong to another target.
    """

    def __init__(self, model: nn.Module, heads: Sequence[ExitHead] | str | Path | None = None):
        self.model = model
        decoder = Decoder(model)
        if isinstance(heads, (str, Path)):
            heads = load_heads(decoder, find_heads(heads))
        self.engine = Engine(decoder, heads or ())
        self.last_stats: Stats | None = None
        self.last_trace: Trace | None = None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, heads: Sequence[ExitHead] | str | Path | None = None, **kwargs: Any
    ) -> SelfSpecModel:
        """Load a checkpoint with `AutoModelForCausalLM.from_pretrained` and wrap it.

        Args:
            path: a folder or a model id.
            heads: exit heads, the folder they were saved in, or their id on the hub; `None` takes
                those saved beside the checkpoint, if there are any.
            **kwargs: go to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            OSError: there is no such checkpoint.
            ValueError: the weights are damaged, or the model cannot draft for itself.
        """
        try:
            model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"the weights in {path} cannot be read ({error}); the file may be truncated"
            ) from None
        if heads is None and (Path(path) / CONFIG_NAME).is_file():
            heads = path
        return cls(model.eval(), heads)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Write the model (`PreTrainedModel.save_pretrained`) and its heads to `folder`."""
        self.causal_lm.save_pretrained(folder, **kwargs)
        if self.heads:
            save_heads(self.heads, self.engine.decoder, folder)

    def push_to_hub(
        self, repo_id: str, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the heads, with a model card, to the hub; the target stays where it is.

        Args:
            repo_id: `user/name`; made if it is not there.
            private: whether a new repository is private; `None` takes the account's default.
            token: of the hub; `None` takes the one that is logged in.

        Returns:
            The address of the repository; `heads="user/name"` loads them from there.

        Raises:
            ValueError: there are no heads.
        """
        return push_heads(self.heads, self.engine.decoder, repo_id, private, token)

    @property
    def heads(self) -> list[ExitHead]:
        """The exit heads."""
        return self.engine.heads

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model inside, PEFT wrapping removed."""
        return self.engine.decoder.causal_lm

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        draft: DraftConfig | Mapping[str, Any] | str | None = None,
        generator: torch.Generator | None = None,
        streamer: BaseStreamer | None = None,
        generation_config: GenerationConfig | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **kwargs: Any,
    ) -> Tensor | SpecOutput:
        """Generate as `PreTrainedModel.generate` does, with the same text, sooner.

        Greedy output equals the model's own; sampled output follows its distribution.

        Args:
            inputs: `[batch, width]` prompt token ids, padded left or right (or `input_ids=`).
            draft: how to draft: a `DraftConfig`, a dict, a drafter's name; `"none"` for plain
                decoding.
            generator: source of the draws when sampling; `None` takes torch's global one.
            streamer: gets all tokens of a round as soon as they are settled.
            generation_config: as in transformers.
            stopping_criteria: as in transformers.
            **kwargs: every other option of transformers' `generate`.

        Returns:
            What transformers' `generate` returns; with `return_dict_in_generate=True` a
            `SpecOutput`, which adds `stats` and `trace`.

        Raises:
            ValueError: an option that speculation does not cover, a draft that this model cannot
                make, or a prompt that cannot be decoded; nothing has run then.
        """
        refuse_other_loops(kwargs)
        drafter = make_drafter(self.engine, DraftConfig.of(draft))
        call = Call(
            self.engine,
            drafter,
            cache=kwargs.get("past_key_values"),
            mask=kwargs.get("attention_mask"),
            streamer=streamer,
            generator=generator,
        )
        run: Any = self.causal_lm.generate
        criteria = StoppingCriteriaList(stopping_criteria or [])
        with self._without_stop_strings(generation_config, criteria, kwargs) as config:
            tokens, restore = _left_padded(inputs, kwargs)
            try:
                output = run(
                    tokens,
                    generation_config=config,
                    stopping_criteria=criteria,
                    streamer=streamer,
                    custom_generate=partial(speculate, call=call),
                    **kwargs,
                )
            finally:
                if call.session is not None:
                    self.last_stats, self.last_trace = call.session.stats, call.session.trace
        return restore(output)

    @contextmanager
    def _without_stop_strings(
        self,
        config: GenerationConfig | None,
        criteria: StoppingCriteriaList,
        kwargs: dict[str, Any],
    ) -> Iterator[GenerationConfig | None]:
        """Turn stop strings into a criterion: generate drops the tokenizer for custom loops."""
        own = self.causal_lm.generation_config
        strings = kwargs.pop("stop_strings", None)
        for source in (config, own):
            strings = strings or getattr(source, "stop_strings", None)
        tokenizer = kwargs.pop("tokenizer", None)
        if not strings:
            yield config
            return
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer; pass tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, strings))
        if config is not None:
            config = copy.deepcopy(config)
            config.stop_strings = None
        held, own.stop_strings = own.stop_strings, None
        try:
            yield config
        finally:
            own.stop_strings = held


def _left_padded(inputs: Tensor | None, kwargs: dict[str, Any]) -> tuple[Tensor | None, Any]:
    """Move right padding to the left, and a way to undo that in what comes back."""
    tokens = inputs if inputs is not None else kwargs.pop("input_ids", None)
    if tokens is not None and tokens.numel() == 0:
        raise ValueError(
            f"empty prompt: input_ids has shape {tuple(tokens.shape)}; "
            "every row needs at least one token to continue from"
        )
    if tokens is not None and tokens.ndim != 2:
        raise ValueError(f"input_ids must be [batch, length], got shape {tuple(tokens.shape)}")
    mask = kwargs.get("attention_mask")
    if tokens is not None and mask is not None:
        check_mask(tokens, mask, cached=kwargs.get("past_key_values") is not None)
    if tokens is None or mask is None or mask.shape != tokens.shape or bool(mask[:, -1].all()):
        return tokens, lambda output: output
    aligned, kwargs["attention_mask"] = to_left_padding(tokens, mask)

    def restore(output: Tensor | SpecOutput) -> Tensor | SpecOutput:
        sequences = output if isinstance(output, Tensor) else output.sequences
        copies = sequences.shape[0] // tokens.shape[0]
        sequences[:, : tokens.shape[1]] = tokens.repeat_interleave(copies, dim=0)
        return output

    return aligned, restore

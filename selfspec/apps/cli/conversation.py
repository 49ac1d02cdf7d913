"""A conversation that keeps its KV cache from turn to turn.

With a chat template, turns are messages. Without one, each turn is a new line after the last reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from selfspec.apps.chat_templates import encode_turns, one_message, stop_ids, turn_stops
from selfspec.config import DraftConfig, JsonObject, Options
from selfspec.generation.stopping import StopOnRequest
from selfspec.model import SelfSpecModel
from selfspec.schedule.stats import Stats


@dataclass(frozen=True)
class Turn:
    """One turn."""

    prompt: str  # the user's message
    text: str  # the reply
    stopped: bool  # whether the reply was stopped on request
    prompt_tokens: int  # tokens before the reply
    cached_tokens: int  # how many of them were in the KV cache
    stats: Stats  # counters and clocks of the reply

    def to_dict(self) -> JsonObject:
        """Everything, as plain values."""
        return {**vars(self), "stats": self.stats.to_dict()}


class Conversation:
    """Replies to one turn after another; with a chat template, turns are messages.

    `options` are of transformers' `generate`, with the `max_new_tokens` of a reply. Sampling is
    seeded once. ValueError if there is a `system` message, but no chat template.
    """

    def __init__(
        self,
        spec: SelfSpecModel,
        tokenizer: PreTrainedTokenizerBase,
        draft: DraftConfig,
        options: Options,
        seed: int = 0,
        system: str | None = None,
    ):
        self.spec, self.tokenizer = spec, tokenizer
        self.draft, self.options = draft, options
        if system is not None and not self.templated:
            raise ValueError(
                "a system message needs a chat template, and the tokenizer has none; say it in the "
                "first turn"
            )
        if self.templated:
            self.options = {**turn_stops(spec, tokenizer), **options}
        self.device = spec.decoder.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.system = system
        self.cache = spec.decoder.new_slots(1)
        self.reset()

    @property
    def templated(self) -> bool:
        """Whether turns are messages of a chat template."""
        return bool(self.tokenizer.chat_template)

    def reset(self) -> None:
        """Forget every turn."""
        self.messages = [] if self.system is None else one_message("system", self.system)
        self.tokens: list[int] = []
        self._read: list[int] = []  # tokens in the KV cache, including those of a failed reply
        self.cache.reset()

    def say(
        self,
        prompt: str,
        streamer: BaseStreamer | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Turn:
        """Send a message and return the turn with the reply, which goes to the streamer, too.

        `stop` is called after every token; the reply stops when it returns true. Raises ValueError
        if the message is empty, there is no room for a reply, or the draft is invalid; the
        conversation is then unchanged.
        """
        if not prompt.strip():
            raise ValueError("an empty turn; say something")
        text = self._with(prompt)
        room = self._room(len(text))
        cached, self._read = self._keep_prefix_of(text), text
        stopping = StopOnRequest(stop)
        output: Any = self.spec.generate(
            torch.tensor([text], device=self.device),
            attention_mask=torch.ones(1, len(text), dtype=torch.long, device=self.device),
            draft=self.draft,
            generator=self.generator,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([stopping]),
            past_key_values=self.cache,
            return_dict_in_generate=True,
            **{**self.options, "max_new_tokens": room},
        )
        self.tokens = self._read = output.sequences[0].tolist()
        reply = self.tokenizer.decode(self.tokens[len(text) :], skip_special_tokens=True)
        assert isinstance(reply, str)  # one sequence in, one text out
        self.messages += one_message("user", prompt) + one_message("assistant", reply)
        return Turn(prompt, reply, stopping.said, len(text), cached, output.stats)

    def _with(self, prompt: str) -> list[int]:
        """Token ids up to the reply to `prompt`."""
        if self.templated:
            return encode_turns(self.tokenizer, self.messages + one_message("user", prompt))
        if not self.tokens:
            return self.tokenizer(prompt).input_ids
        written = self.tokenizer.decode(self.tokens)
        ended = self.tokens[-1] in stop_ids(self.spec)
        line = prompt if ended or str(written).endswith("\n") else f"\n{prompt}"
        return self.tokens + self.tokenizer(line, add_special_tokens=False).input_ids

    def _room(self, length: int) -> int:
        """The most tokens of a reply after `length` tokens."""
        wanted = self.options["max_new_tokens"]
        positions = self.spec.decoder.max_positions
        if positions is None or length + wanted <= positions:
            return wanted
        if length >= positions:
            raise ValueError(
                f"the conversation would have {length} tokens, the model {positions} positions; "
                "reset it to begin anew"
            )
        return positions - length

    def _keep_prefix_of(self, text: Sequence[int]) -> int:
        """Keep the KV of the common prefix with `text`; returns its length.

        A template may render a reply differently from what the model generated.
        """
        # The last token always runs: its logits are needed.
        held = min(self.cache.lengths[0], len(self._read), len(text) - 1)
        pairs = enumerate(zip(self._read[:held], text, strict=False))
        kept = next((place for place, (old, new) in pairs if old != new), held)
        if kept < self.cache.lengths[0] and self.cache.recurrent:
            self.cache.reset()  # recurrent layers have no state of an earlier position
            return 0
        self.cache.crop(kept - self.cache.lengths[0])
        return kept

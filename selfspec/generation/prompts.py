"""The prompt of a call: rows, padding, and the caller's KV cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache

from selfspec.config import Options
from selfspec.decoder import CACHE, Decoder
from selfspec.decoder.cache import (
    RowStates,
    SlotCache,
    join_rows,
    load_cache,
    store_cache,
    take_row,
)
from selfspec.drafters.engine import Engine
from selfspec.sampling.context import Context

# Undoes in the output of `generate`, a tensor or a record, what was done to its prompt.
Restore = Callable[[Any], Any]

OutputT = TypeVar("OutputT")

_PER_TOKEN = ("position_ids", "token_type_ids", "mm_token_type_ids")  # inputs of `[…, width]`


class Prompt:
    """The rows of one call, padding removed.

    Args:
        engine: the target.
        tokens: `[batch, width]` token ids, left-padded where rows differ.
        mask: `[batch, >= width]` 1 for real tokens, or `None`; wider than `tokens` when a cache
            holds earlier ones.
        cache: KV of earlier turns, or `None`.
        keep_cache: whether the call returns its KV cache.
        chunk: tokens per pass of the prefill in plain decoding; `None` for all in one.
        positions: `[batch, width]` or `[axes, batch, width]` positions, as the model's own
            `generate` makes them, or `None`.
        media: images, and what describes them, as the model's own `generate` passes them on.

    Raises:
        ValueError: the tokens, the mask, the cache or the chunk are invalid.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        keep_cache: bool,
        chunk: int | None = None,
        positions: Tensor | None = None,
        media: Options | None = None,
    ):
        self.engine, self.tokens = engine, tokens.to(engine.decoder.device, torch.long)
        self.rows, self.width = tokens.shape
        self.cache, self.keep_cache = cache, keep_cache or cache is not None
        self.retired: dict[int, RowStates] = {}
        mask = torch.ones_like(tokens) if mask is None else mask
        self.lengths = _real_lengths(tokens, mask)
        self.padded = bool((mask == 0).any())
        self.known = _known_lengths(cache, self.rows, self.padded)
        _check_layers(cache, engine.decoder)
        _check_chunk(chunk)
        self.given = self.width if mask.shape[1] == self.width else None
        self.positions, self.media = positions, media or {}
        self._check(engine)
        self.chunk, self.padding = chunk, mask.shape[1] - max(self.lengths)
        # As in transformers, whose condition is the width of `input_ids`, padding included.
        decoder, whole = engine.decoder, self.given is not None and not self.padding
        self.prefills_again = decoder.prefills_again and whole
        original = decoder.original_length if self.prefills_again and chunk is None else None
        self.restarts = original is not None and max(self.known) <= original < max(self.lengths)
        if self.restarts:
            self.known = [0] * self.rows

    def _check(self, engine: Engine) -> None:
        if min(self.lengths) < 1:
            raise ValueError("empty prompt: every row needs at least one token to continue from")
        for row, (length, known) in enumerate(zip(self.lengths, self.known, strict=True)):
            if length <= known:
                raise ValueError(
                    f"row {row} has {length} tokens, but the cache already holds {known}; "
                    "pass the whole text so far, which must go beyond the cache"
                )
            if length - known > self.width:
                raise ValueError(
                    f"row {row} has {length} tokens by its attention_mask, but the cache holds "
                    f"{known} and input_ids {self.width}; pass the whole text so far"
                )
        vocab = engine.decoder.vocab_size
        if not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < vocab:
            raise ValueError(f"token ids must be in [0, {vocab - 1}]; was another tokenizer used?")
        positions = engine.decoder.max_positions
        if positions is not None and max(self.lengths) > positions:
            raise ValueError(
                f"the prompt has {max(self.lengths)} tokens, the model {positions} positions; "
                "shorten the prompt"
            )

    def context(self, padding: int = 0) -> Context:
        """The rows' tokens; `padding` will stand behind the end of finished rows."""
        rows = zip(self.tokens.tolist(), self.lengths, strict=True)
        text = [tokens[max(0, self.width - length) :] for tokens, length in rows]
        lengths, every = [self.width] * self.rows, list(range(self.rows))
        return Context(self.tokens.clone(), lengths, every, text, padding)

    def switches(self) -> list[int] | None:
        """Per row, the first position that plain decoding computes beyond the original length.

        There the largest position of a pass is that of the longest row, in the prefill that of the
        pass's last token. `None` if it does not matter (`Decoder.original_length`).
        """
        first, longest = self.engine.decoder.original_length, max(self.lengths)
        if first is None:
            return None
        if longest > first:
            known = max(self.known) - self.padding  # where the prefill begins
            first = known + (first - known) // self.chunk * self.chunk if self.chunk else known
        return [max(0, first - longest + length) for length in self.lengths]

    def slots(self, room: int, switches: list[int] | None) -> SlotCache:
        """The KV cache before prefill.

        Args:
            room: space for so many more tokens.
            switches: where rows switch (`SlotCache.switches`).
        """
        if isinstance(self.cache, SlotCache) and not self.restarts:
            slots, shift = self.cache.fork(shared=not self.prefills_again), self.cache.shift
        else:
            capacity = max(self.lengths) + room
            slots, shift = self.engine.decoder.new_slots(self.rows, capacity), self._shift()
            if isinstance(self.cache, DynamicCache) and self.known[0]:
                load_cache(slots, self.cache)
        slots.begin(switches, shift)
        return slots

    def _shift(self) -> Tensor | None:
        """`SlotCache.shift` after the prompt, whose last column is the last token of each row."""
        if self.positions is None or not self.engine.decoder.is_multimodal:
            return None
        last = self.positions[..., -1].to(self.tokens.device)
        shift = last + 1 - torch.tensor(self.lengths, device=last.device)
        return shift if bool(shift.any()) else None

    def own_inputs(self) -> Options | None:
        """`Decoder.prompt_inputs` for a prompt with images, else `None`."""
        if not self.media:
            return None
        tokens, counts = self.prefill()
        counted = torch.arange(tokens.shape[1], device=tokens.device)
        starts = self.width - torch.tensor(counts, device=tokens.device)
        columns = (counted + starts[:, None]).clamp(max=self.width - 1)

        def aligned(value: Tensor) -> Tensor:
            return value.to(columns.device).gather(-1, columns.expand(*value.shape[:-1], -1))

        given = {**self.media, "position_ids": self.positions}
        given |= {name: aligned(given[name]) for name in _PER_TOKEN if given.get(name) is not None}
        return self.engine.decoder.prompt_inputs(
            tokens, counted < self.width - starts[:, None], given
        )

    def prefill(self) -> tuple[Tensor, list[int]]:
        """Tokens that are not in the cache, `[rows, n]` left-aligned, and their counts."""
        counts = [n - known for n, known in zip(self.lengths, self.known, strict=True)]
        block = self.tokens.new_zeros(self.rows, max(counts))
        for row, count in enumerate(counts):
            block[row, :count] = self.tokens[row, self.width - count :]
        return block, counts

    def restart(self) -> None:
        """Note that the KV in the caller's cache was computed anew."""
        self.restarts, self.known = True, [0] * self.rows

    def retire(self, slots: SlotCache, leaving: Mapping[int, int]) -> None:
        """Keep the KV of rows that leave the batch.

        Args:
            slots: the KV cache.
            leaving: for each row of the call its index in `slots`.
        """
        if self.keep_cache and self.rows > 1:
            self.retired |= {row: take_row(slots, index) for row, index in leaving.items()}

    @property
    def is_inference(self) -> bool:
        """Whether the caller's cache can be written in inference mode only."""
        return isinstance(self.cache, SlotCache) and self.cache.is_inference

    def final_cache(self, slots: SlotCache) -> Cache | None:
        """The cache to return: the one that the caller passed, or a `SlotCache`.

        A `DynamicCache` of the caller is filled if all rows have the same length, without padding.
        """
        if not self.keep_cache:
            self.engine.decoder.give_back(slots)
            return None
        slots.drop_added()
        whole = slots
        if self.rows > 1:
            whole = join_rows([self.retired[row] for row in range(self.rows)], slots)
        # A `DynamicCache` has one length for all rows; else it keeps what it has, which is right.
        even = not self.padded and len(set(whole.lengths)) == 1
        if isinstance(self.cache, DynamicCache) and even:
            if self.restarts:
                self.cache.reset()
            store_cache(whole, self.cache, self.known[0])
            return self.cache
        if isinstance(self.cache, SlotCache):
            self.cache.take(whole)
            return self.cache
        return whole


def _real_lengths(tokens: Tensor, mask: Tensor) -> list[int]:
    """Real tokens of each row, including those in the cache."""
    real = mask != 0
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "attention_mask has zeros after ones in a row; pad each row on one side only (without "
            "a mask, every pad_token_id counts as padding, as in transformers)"
        )
    return real.sum(-1).tolist()


def check_mask(tokens: Tensor, mask: Tensor, cached: bool) -> None:
    """Raise ValueError unless `mask` has the shape of `tokens`; with a cache it may be longer."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    fits = mask.ndim == 2 and mask.shape[0] == tokens.shape[0]
    longer = cached and fits and mask.shape[1] > tokens.shape[1]
    if not fits or (mask.shape[1] != tokens.shape[1] and not longer):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, the tokens {tuple(tokens.shape)}; "
            "it must be [batch, length] like them, or longer when past_key_values holds the rest"
        )


def _known_lengths(cache: Cache | None, rows: int, padded: bool) -> list[int]:
    """Tokens in the caller's cache, per row."""
    if cache is None:
        return [0] * rows
    if isinstance(cache, SlotCache):
        if cache.rows != rows:
            raise ValueError(f"the cache holds {cache.rows} rows, the prompt has {rows}")
        return list(cache.lengths)
    length = cache.get_seq_length() if type(cache) is DynamicCache else None
    if length is None or (length and padded):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} for {rows} rows; selfspec continues from "
            "a SlotCache (out.past_key_values of its own calls) for any batch, or from a "
            "DynamicCache for rows without padding"
        )
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    held = {part.shape[0] for part in keys if part is not None}
    if held - {rows}:
        raise ValueError(f"the cache holds {max(held)} rows, the prompt has {rows} rows")
    return [length] * rows


def _check_layers(cache: Cache | None, decoder: Decoder) -> None:
    """Raise ValueError if the cache belongs to a model with other layers, or in another place."""
    if cache is None:
        return
    depth, recurrent = decoder.depth, decoder.recurrent_layers
    held = cache.depth if isinstance(cache, SlotCache) else len(cache.layers)
    if held not in (0, depth):
        raise ValueError(
            f"the cache holds {held} layers, the model has {depth}; past_key_values must come from "
            "this model"
        )
    if isinstance(cache, SlotCache) and cache.made_for not in (None, decoder.dtype_and_devices):
        raise ValueError(
            "the model was cast or moved after past_key_values were computed; pass the whole text "
            "without them"
        )
    if not recurrent or type(cache) is not DynamicCache:
        return
    if recurrent != [i for i, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")]:
        raise ValueError(
            "past_key_values has no place for the states of the model's recurrent layers; make it "
            "with DynamicCache(config=model.config)"
        )


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and not (isinstance(chunk, Integral) and chunk >= 1):
        raise ValueError(
            f"prefill_chunk_size must be a number of tokens from 1 on, got {chunk!r}; leave it "
            "unset to prefill in one pass"
        )


def with_cache_renamed(kwargs: Options) -> dict[str, Any]:
    """Arguments of `generate` with the cache under the name that transformers has for it."""
    given = [name for name in ("cache", "past_key_values") if kwargs.get(name) is not None]
    if len(given) > 1:
        raise ValueError("cache and past_key_values are two names of one argument; give one")
    others = {k: v for k, v in kwargs.items() if k not in ("cache", "past_key_values")}
    return {**others, CACHE: kwargs[given[0]]} if given else others


def left_padded(
    inputs: Tensor | None,
    kwargs: dict[str, Any],
    infer: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, Restore]:
    """Move right padding to the left; also returns a function that undoes it in the output.

    Args:
        inputs: `[batch, width]` token ids, if they are not in `kwargs`.
        kwargs: the call's options, in which the mask is replaced.
        infer: makes the mask of a call without one.
    """
    tokens = inputs if inputs is not None else kwargs.pop("input_ids", None)
    if tokens is None:
        return None, _unchanged
    tokens = _checked(tokens)
    mask = kwargs.get("attention_mask")
    if mask is not None:
        check_mask(tokens, mask, cached=kwargs.get(CACHE) is not None)
    elif infer is not None:
        mask = infer(tokens)
    if mask is None or mask.shape != tokens.shape or bool(mask[:, -1].all()):
        return tokens, _unchanged
    for name in ("token_type_ids", "mm_token_type_ids"):
        if kwargs.get(name) is not None:
            kwargs[name], _ = to_left_padding(kwargs[name], mask)
    aligned, kwargs["attention_mask"] = to_left_padding(tokens, mask)

    def restore(output: Any) -> Any:
        sequences = output if isinstance(output, Tensor) else output.sequences
        copies = sequences.shape[0] // tokens.shape[0]
        sequences[:, : tokens.shape[1]] = tokens.repeat_interleave(copies, dim=0)
        return output

    return aligned, restore


def _unchanged(output: OutputT) -> OutputT:
    return output


def _checked(tokens: Tensor) -> Tensor:
    """The token ids, as transformers' embeddings take them, in 64 bits."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"input_ids must be a tensor [batch, length], got {type(tokens).__name__}; pass "
            'tokenizer(texts, return_tensors="pt", padding=True) as **inputs, or lists of token '
            "ids to generate_batch"
        )
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, got {tokens.dtype}")
    if tokens.numel() == 0:
        raise ValueError(
            f"empty prompt: input_ids has shape {tuple(tokens.shape)}; "
            "every row needs at least one token to continue from"
        )
    if tokens.ndim != 2:
        raise ValueError(f"input_ids must be [batch, length], got shape {tuple(tokens.shape)}")
    return tokens.long()


def inferred_mask(model: Any, config: GenerationConfig, tokens: Tensor) -> Tensor:
    """The mask that transformers infers: padding is `pad_token_id`, unless it also ends texts.

    Args:
        model: the model whose `generate` is called.
        config: the merged generation config.
        tokens: `[batch, width]` token ids.
    """
    config = copy.copy(config)  # gets the special tokens as tensors
    model._prepare_special_tokens(config, device=tokens.device)
    return model._prepare_attention_mask_for_generation(tokens, config, {})


def healed(
    model: Any, tokens: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, Restore]:
    """The prompt after transformers' token healing, which rewrites its last tokens.

    Returns what `left_padded` returns. As in transformers, the output begins with this prompt.

    Raises:
        ValueError: there is no tokenizer, or a padded prompt has another length afterwards.
    """
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError("token_healing needs the tokenizer; pass tokenizer=...")
    if tokens is None:
        return None, _unchanged
    healed, mask = model.heal_tokens(tokens, tokenizer), kwargs.get("attention_mask")
    if mask is not None and healed.shape != tokens.shape:
        if not bool(mask.all()):
            raise ValueError(
                f"token_healing changed the prompts' length from {tokens.shape[1]} to "
                f"{healed.shape[1]} tokens, so that attention_mask no longer fits; heal prompts "
                "of different lengths one by one"
            )
        kwargs["attention_mask"] = torch.ones_like(healed)
    return healed, _unchanged


def to_left_padding(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, with their padding moved to the left."""
    width = tokens.shape[1]
    shift = (mask != 0).flip(-1).int().argmax(-1)
    columns = (torch.arange(width, device=tokens.device)[None] - shift[:, None]) % width
    return tokens.gather(1, columns), mask.gather(1, columns)

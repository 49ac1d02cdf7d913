"""`SelfSpecModel`: a checkpoint that drafts for itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from peft import PeftModelForCausalLM
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from selfspec.config import DraftConfig, Kernels, KVCacheDtype, Options, unknown_name
from selfspec.decoder import CACHE, Decoder
from selfspec.decoder.checkpoints import find_checkpoint, folder_of, load_causal_lm
from selfspec.decoder.families import refuse_options
from selfspec.decoder.wrapping_check import check_itself, check_passes
from selfspec.drafters import make_drafter
from selfspec.drafters.engine import Engine
from selfspec.drafters.text_store import TextStore, token_ids
from selfspec.generation.adapters import take_adapters
from selfspec.generation.batch import Batch, RequestOutput
from selfspec.generation.loop import Call, Session, SpecOutput, open_session, speculate
from selfspec.generation.option_types import check_each, check_types
from selfspec.generation.prompts import healed, inferred_mask, left_padded, with_cache_renamed
from selfspec.generation.stopping import with_stop_strings, without_tokenizer
from selfspec.generation.unsupported import (
    check_counts,
    merged,
    number_of,
    refuse_in_batches,
    refuse_media,
    refuse_other_loops,
)
from selfspec.heads import (
    HEADS_CONFIG,
    ExitHead,
    find_heads,
    load_heads,
    load_shipped,
    push_heads,
    save_heads,
)
from selfspec.schedule.profile import Profile, find_profile
from selfspec.schedule.stats import Stats, Trace

_TUNE = "run `selfspec tune` for this one"


class SelfSpecModel:
    """A causal language model and its exit heads.

    The wrapped model is not changed: its own `generate` and `forward` work as before.

    Args:
        model: a decoder-only causal LM of transformers, PEFT-wrapped or not.
        heads: exit heads, the folder they were saved in, or their id on the hub; `None` for none.
        draft_model: a smaller model for the drafter `two_model`, or the folder or id to load it
            from. Its tokenizer may be another one; both are then read from the models' folders.
        profile: a profile made by `selfspec tune`, or its file; its draft is the default of
            `generate`. A profile for another device, dtype, target or kernels is ignored with a
            warning.
        kernels: how layers of target, heads and draft models are computed. `"auto"`: `"prepacked"`
            on a CPU in half precision if the memory is there, else `"direct"`. `"eager"`: as in
            transformers. `"direct"`: the same, without decorators, and without checking for
            hooks where there are none; in float32 on a CPU, products of a few tokens are
            computed transposed, which is faster. `"prepacked"`: in half precision on a CPU, linear
            layers have a second copy of their weights in the layout of oneDNN or FBGEMM (where
            both compute, one in each), and norms, MLPs and attention like Llama's take fewer
            operations, which round less often. `"compiled"`: passes over few tokens use
            `torch.compile`; the first ones wait for the compiler. `"graphs"`: on a CUDA device,
            passes over few tokens run consecutive layers as one CUDA graph. Layers that cannot be
            packed, compiled or recorded run eagerly, with a warning.
        kv_cache_dtype: dtype of the KV cache. `"auto"`: the dtype of the layers. `"int8"`: 8 bits
            per number and a scale per token and head, about half the memory of half precision; the
            output equals that of the model with a cache that rounds in the same way.
        store: a store in which lookups find what earlier calls wrote, or the file of a saved one;
            `None` keeps nothing from call to call.

    Attributes:
        model: the model as it was given.
        profile: the profile in use, or `None`.
        last_stats: counters and clocks of the last `generate`.
        last_trace: every round of the last `generate`.

    Raises:
        OSError: there is no checkpoint at `draft_model`, or no file at `profile` or `store`.
        ValueError: the model is not supported, the heads belong to another target, the draft model
            shares no token with the target, or the profile or the store is damaged.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: Sequence[ExitHead] | str | Path | None = None,
        draft_model: nn.Module | str | Path | None = None,
        profile: Profile | str | Path | None = None,
        kernels: Kernels = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        store: TextStore | str | Path | None = None,
    ):
        self._wrap(model, heads, draft_model, kernels, kv_cache_dtype)
        self.store = store
        if isinstance(profile, (str, Path)):
            profile = Profile.load(profile)
        if profile is not None and not isinstance(profile, Profile):
            raise TypeError(
                f"a profile is a Profile or the file of one, got {type(profile).__name__}"
            )
        self.profile = self._valid_or_none(profile)
        self.last_stats: Stats | None = None
        self.last_trace: Trace | None = None

    def _wrap(
        self,
        model: nn.Module,
        heads: Sequence[ExitHead] | str | Path | None,
        draft_model: nn.Module | str | Path | None,
        kernels: Kernels,
        kv_cache_dtype: KVCacheDtype,
    ) -> None:
        self.model = model
        decoder = Decoder(model, kernels, kv_cache_dtype)
        self._checked = check_passes(decoder.causal_lm)
        if isinstance(heads, (str, Path)):
            heads = load_heads(decoder, find_heads(heads))
        is_list = isinstance(heads, Iterable) and not isinstance(heads, ExitHead)
        if heads is not None and not is_list:
            raise TypeError(
                "heads are a list of exit heads, a folder or a hub id, got a "
                f"{type(heads).__name__}"
            )
        self.engine = Engine(decoder, heads or (), draft_model)

    # Copies and pickles hold what the engine is made of; it has locks and is made again.

    def __getstate__(self) -> dict[str, object]:
        """The arguments of `_wrap`, and the other attributes.

        Raises:
            RuntimeError: called while `generate` runs, when the model is changed.
        """
        decoder = self.decoder
        with decoder.gates.lock:  # a call in another thread ends first
            if decoder.gates.entered:
                raise RuntimeError("copy or pickle a SelfSpecModel between calls of `generate`")
        parts = {
            "model": self.model,
            "heads": list(self.heads),
            "draft_model": self.engine.draft_models.given,
            "kernels": decoder.requested_kernels,
            "kv_cache_dtype": decoder.kv_cache_dtype,
        }
        made = ("model", "engine", "_checked")
        others = {name: value for name, value in vars(self).items() if name not in made}
        return {"parts": parts, "others": others, "store": self.store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wrap the model again."""
        self._wrap(**state["parts"])
        self.store = state["store"]
        vars(self).update(state["others"])

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        heads: Sequence[ExitHead] | str | Path | None = None,
        draft_model: nn.Module | str | Path | None = None,
        profile: Profile | str | Path | None = None,
        kernels: Kernels = "auto",
        kv_cache_dtype: KVCacheDtype = "auto",
        store: TextStore | str | Path | None = None,
        **kwargs: object,
    ) -> SelfSpecModel:
        """Load a checkpoint with `AutoModelForCausalLM.from_pretrained` and wrap it.

        Multimodal checkpoints that it does not know are loaded with `AutoModelForImageTextToText`.

        Args:
            path: a folder, a model id, or a `.gguf` file (with the package `gguf`).
            heads: exit heads, the folder they were saved in, or their id on the hub; `None` takes
                those saved beside the checkpoint, else those that it holds: its multi-token
                prediction layer, or a Medusa or EAGLE head. One that cannot be used is left out
                with a warning.
            draft_model: a smaller model, or the folder or id to load it from, with dtype and device
                of the target.
            profile: a profile made by `selfspec tune`, or its file; `None` takes the one beside the
                heads or the checkpoint, or in the user's cache, if there is one.
            kernels: how layers are computed.
            kv_cache_dtype: dtype of the KV cache.
            store: what earlier calls wrote, for lookups.
            **kwargs: go to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            OSError: there is no such checkpoint.
            TypeError: an unknown option.
            ValueError: the weights are damaged, or the model is not supported.
        """
        refuse_options(kernels, kv_cache_dtype)
        path = find_checkpoint(path, kwargs)
        try:
            model = load_causal_lm(path, **kwargs)
        except TypeError as error:
            raise _with_our_options(error, kwargs) from None
        beside = Path(folder_of(path), str(kwargs.get("subfolder") or ""))
        if heads is None and (beside / HEADS_CONFIG).is_file():
            heads = beside
        spec = cls(model, heads, draft_model, profile, kernels, kv_cache_dtype, store)
        if heads is None:
            spec._draft_with_shipped(path, kwargs)
        if profile is None:
            folders = [at for at in (heads, beside) if isinstance(at, (str, Path))]
            spec.profile = spec._load_or_none(find_profile(spec.decoder, folders))
        return spec

    def _draft_with_shipped(self, path: str | Path, options: Options) -> None:
        """Add the head that the checkpoint holds; warn if it cannot be used."""
        try:
            head = load_shipped(self.decoder, path, **options)
            if head is not None:
                self.engine.add(head)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=3)

    def _load_or_none(self, path: Path | None) -> Profile | None:
        """The profile at `path`; one that cannot be read is ignored with a warning.

        So is one made without a head that is here: heads fitted after it would never draft.
        """
        if path is None:
            return None
        try:
            profile = Profile.load(path)
        except ValueError as error:
            warnings.warn(f"profile ignored: {error}", stacklevel=3)
            return None
        if name := profile.untried(self.heads):
            reason = f"{path} was made without the head {name}"
            warnings.warn(f"profile ignored: {reason}; {_TUNE}", stacklevel=3)
            return None
        return self._valid_or_none(profile)

    def _valid_or_none(self, profile: Profile | None) -> Profile | None:
        """The profile, if it is valid here and its draft can be made."""
        if profile is None:
            return None
        reason = profile.mismatch(self.decoder)
        if reason is None:
            try:
                make_drafter(self.engine, profile.draft)
            except (ValueError, OSError) as error:
                reason = f"its draft cannot be made: {error}"
        if reason is None:
            return profile
        warnings.warn(f"profile ignored: {reason}; {_TUNE}", stacklevel=3)
        return None

    @property
    def default_draft(self) -> DraftConfig:
        """The profile's draft, else `Engine.default_draft`; see `draft_for`."""
        return self.engine.default_draft if self.profile is None else self.profile.draft

    def draft_for(self, sampled: bool) -> DraftConfig:
        """The draft of `generate` without `draft=`, for sampling or for greedy decoding.

        It is `default_draft`, unless the profile is of the other one: what is fastest differs.
        """
        if self.profile is not None and (self.profile.temperature > 0) != sampled:
            return self.engine.default_draft
        return self.default_draft

    def save_pretrained(self, folder: str | Path, **kwargs: object) -> None:
        """Write the model and its heads to `folder`.

        For a PEFT model this writes the adapters, as PEFT's own method does.

        Raises:
            NotImplementedError: PEFT cannot save adapters of several kinds together.
        """
        own: Any = self.model
        own.save_pretrained(folder, **kwargs)
        if self.heads:
            save_heads(self.heads, self.decoder, folder)

    def push_to_hub(
        self, repo_id: str, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the heads, with a model card, to the hub; the target stays where it is.

        Args:
            repo_id: `user/name`; created if it does not exist.
            private: whether a new repository is private; `None` takes the account's default.
            token: hub token; `None` takes the one that is logged in.

        Returns:
            The address of the repository; `heads="user/name"` loads them from there.

        Raises:
            ValueError: there are no heads.
        """
        return push_heads(self.heads, self.decoder, repo_id, private, token)

    @property
    def heads(self) -> list[ExitHead]:
        """The exit heads."""
        return self.engine.heads

    @property
    def store(self) -> TextStore | None:
        """What earlier calls wrote, for lookups; may be replaced between calls, also by a file."""
        return self.engine.store

    @store.setter
    def store(self, store: TextStore | str | Path | None) -> None:
        if isinstance(store, (str, Path)):
            store = TextStore.load(store)
        if store is not None and not isinstance(store, TextStore):
            raise TypeError(f"a store is a TextStore or the file of a saved one, got {store!r:.60}")
        self.engine.store = store

    def remember(self, ids: Sequence[int] | Tensor) -> None:
        """Add a text to the store, so that lookups find it.

        Args:
            ids: `[n]` or `[1, n]` token ids.

        Raises:
            TypeError: it is no list of token ids.
            ValueError: there is no store, or an id is outside the model's vocabulary.
        """
        if self.store is None:
            raise ValueError(
                "there is no store to remember texts in; set `spec.store = TextStore()` first"
            )
        text, vocab = token_ids(ids), self.decoder.vocab_size
        if text and not 0 <= min(text) <= max(text) < vocab:
            raise ValueError(
                f"remember takes one text of token ids from 0 to {vocab - 1}, got {ids!r:.60}"
            )
        self.store.add(text)

    @property
    def decoder(self) -> Decoder:
        """The target, of which any span of layers can be run; heads are built for it."""
        return self.engine.decoder

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model inside, PEFT wrapping removed."""
        return self.decoder.causal_lm

    # What pipelines, and those who are given one, ask a model for

    @property
    def name_or_path(self) -> str:
        """Where the model was loaded from; empty if it was not."""
        return self.causal_lm.name_or_path or ""

    @property
    def input_modalities(self) -> str | Sequence[str]:
        """What the model reads."""
        return self.causal_lm.input_modalities

    @property
    def output_modalities(self) -> Sequence[str]:
        """What the model writes."""
        own: Any = self.causal_lm
        return own.output_modalities

    @property
    def config(self) -> PreTrainedConfig:
        """The model's config."""
        return self.causal_lm.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own defaults of `generate`; may be replaced."""
        # A PEFT model may have one of its own, which its `generate` hands to the model inside.
        adopts = isinstance(self.model, PeftModelForCausalLM)
        config: Any = (self.model if adopts else self.causal_lm).generation_config
        assert config is not None  # `Decoder` takes models that generate
        return config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        models: Any = (self.model, self.causal_lm)
        for model in models:
            model.generation_config = config

    @property
    def device(self) -> torch.device:
        """The device of the embeddings, where prompts go."""
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self.causal_lm.dtype

    def can_generate(self) -> bool:
        """Whether there is a `generate`."""
        return True

    # Generation

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        assistant_model: nn.Module | None = None,
        streamer: BaseStreamer | None = None,
        negative_prompt_ids: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        custom_generate: str | Callable[..., Any] | None = None,
        *,
        draft: DraftConfig | Options | str | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Tensor | SpecOutput:
        """Generate as `PreTrainedModel.generate` does, by self-speculation.

        Greedy output equals the model's own; sampled output follows its distribution. Arguments
        without a description here mean what they mean to transformers.

        Args:
            inputs: `[batch, width]` prompt token ids, padded left or right (or `input_ids=`).
            generation_config: options; those of the call come before it, the model's own behind it.
            logits_processor: processors, added to those that options ask for.
            stopping_criteria: criteria, added to those that options ask for.
            prefix_allowed_tokens_fn: gives the tokens that may follow a text.
            synced_gpus: refused if true.
            assistant_model: as in transformers, a smaller model that drafts (drafter `two_model`).
                If it has another tokenizer, and either is not in the folder of its model, pass
                `tokenizer=` and `assistant_tokenizer=`.
            streamer: gets all tokens of a round as soon as they are committed.
            negative_prompt_ids: the negative prompt of classifier-free guidance.
            negative_prompt_attention_mask: its mask.
            custom_generate: refused; it is another decoding method.
            draft: how to draft: a `DraftConfig`, a dict with its keys, or a drafter's name;
                `"none"` is plain decoding, `None` takes `draft_for`.
            generator: source of random numbers; `None` uses torch's global one.
            **kwargs: every other option of transformers' `generate`.

        Returns:
            What transformers' `generate` returns; with `return_dict_in_generate=True` a
            `SpecOutput`, which adds `stats` and `trace`.

        Raises:
            TypeError: the prompt is not a tensor of integers, or an option has another type than
                transformers takes.
            ValueError: an unsupported option, a draft that this model cannot make, or an invalid
                prompt; raised before anything runs.
        """
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generator must be a torch.Generator, got {generator!r:.60}; for a seed pass "
                "torch.Generator(device).manual_seed(seed)"
            )
        kwargs = with_cache_renamed(kwargs)
        arguments = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
        }
        check_types(generation_config, self.generation_config, {**kwargs, **arguments})
        config = self._merged(generation_config, kwargs)
        others = {"synced_gpus": synced_gpus, "custom_generate": custom_generate}
        refuse_other_loops(config, {**kwargs, **others})
        refuse_media(self.causal_lm, config, kwargs)
        engine, drafting = self._drafting(draft, assistant_model, kwargs, bool(config.do_sample))
        drafter, tokenizer = make_drafter(engine, drafting), kwargs.get("tokenizer")
        criteria = with_stop_strings(stopping_criteria, config.stop_strings, tokenizer)
        infer = partial(inferred_mask, self.causal_lm, config)
        tokens, restore = left_padded(inputs, kwargs, infer)
        if config.token_healing:
            tokens, restore = healed(self.causal_lm, tokens, kwargs)
        generation_config = without_tokenizer(generation_config, self.generation_config, kwargs)
        cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
        with self.decoder.lock:  # PEFT checks names by hooks in the model
            adapters = take_adapters(self.model, kwargs)
        given = cache, mask, streamer, generator, adapters
        call = Call(engine, drafter, drafting.rule, *given, opened=self._note)
        output = self._run_loop(
            tokens,
            generation_config,
            logits_processor,
            criteria,
            prefix_allowed_tokens_fn,
            streamer=streamer,
            negative_prompt_ids=negative_prompt_ids,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            custom_generate=partial(speculate, call=call),
            **kwargs,
        )
        return restore(output)

    def _run_loop(self, *args: Any, **options: Any) -> Any:
        """The `generate` of the model's class; on the object it may be this wrapper's."""
        kind: Any = type(self.causal_lm)
        return kind.generate(self.causal_lm, *args, **options)

    def _note(self, session: Session) -> None:
        self.last_stats, self.last_trace = session.stats, session.trace

    def generate_batch(
        self,
        inputs: Iterable[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: object = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **options: Any,
    ) -> dict[str, RequestOutput]:
        """Generate for many prompts with continuous batching, as transformers' `generate_batch`.

        When a row finishes, the next prompt takes its place. In float32 the output of a request
        equals that of a separate call of `generate`, if it is greedy or sampled with the rule
        `"coupled"`.

        Args:
            inputs: token ids of each prompt.
            generation_config: as in transformers.
            continuous_batching_config: refused, it describes a paged cache; see `batch_size`.
            record_timestamps: see `generate_batch_iter`.
            progress_bar: refused if true; count the results of `generate_batch_iter`.
            persistent_manager: refused if true; nothing is kept from call to call.
            warmup: refused if false, for nothing is warmed up.
            **options: see `generate_batch_iter`.

        Returns:
            For each request, `req_0`, `req_1`, … in the order of the prompts, its output. After
            Ctrl-C, those of finished requests, with a warning.

        Raises:
            TypeError: a prompt is not a list of token ids.
            ValueError: an unsupported option, or a draft that this model cannot make; raised before
                anything runs. An error in one request is stored in the `error` of its output.
        """
        options |= {
            "continuous_batching_config": continuous_batching_config,
            "record_timestamps": record_timestamps,
            "progress_bar": progress_bar,
            "persistent_manager": persistent_manager,
            "warmup": warmup,
        }
        batch = self._batch(inputs, generation_config, **options)
        if batch is None:
            return {}
        try:
            batch.run()
        except KeyboardInterrupt:
            warnings.warn(f"interrupted after {len(batch.done)} finished requests", stacklevel=2)
        outputs = sorted(batch.done, key=lambda output: output.number)
        return {output.request_id: output for output in outputs}

    def generate_batch_iter(
        self,
        inputs: Iterable[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        *,
        batch_size: int = 8,
        draft: DraftConfig | Options | str | None = None,
        assistant_model: nn.Module | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        seed: int | Sequence[int] | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        record_timestamps: bool = False,
        **kwargs: Any,
    ) -> Iterator[RequestOutput]:
        """`generate_batch` that yields each output as soon as its request has finished.

        Args:
            inputs: token ids of each prompt; an iterator is consumed as rows become free.
            generation_config: as in transformers.
            batch_size: the most requests that run at a time.
            draft: how to draft, as in `generate`.
            assistant_model: as in `generate`.
            max_new_tokens: as in transformers, or one number per prompt.
            seed: request i is sampled with seed + i, or with the i-th of a list of seeds. With the
                rule `"coupled"`, its output then equals that of `generate` with a generator of that
                seed on the model's device; with other rules requests share random draws. `None`
                uses torch's global generator.
            stopping_criteria: as in transformers; each is called with one request at a time.
            record_timestamps: whether outputs have the time of each token. Those of a round have
                the same.
            **kwargs: every other option of transformers' `generate` that does not describe a batch
                of tensors: processors and options of the generation config.

        Raises:
            TypeError: a prompt is not a list of token ids; with an iterator, when it is read.
            ValueError: an unsupported option, or a draft that this model cannot make.
        """
        given = {
            "batch_size": batch_size,
            "draft": draft,
            "assistant_model": assistant_model,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "stopping_criteria": stopping_criteria,
            "record_timestamps": record_timestamps,
        }
        return iter(self._batch(inputs, generation_config, **given, **kwargs) or ())

    def _batch(
        self,
        inputs: Iterable[Sequence[int]],
        generation_config: GenerationConfig | None,
        *,
        batch_size: int = 8,
        draft: DraftConfig | Options | str | None = None,
        assistant_model: nn.Module | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        seed: int | Sequence[int] | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        record_timestamps: bool = False,
        **kwargs: Any,
    ) -> Batch | None:
        """The requests of `generate_batch_iter`, which has the arguments; `None` without any."""
        max_new_tokens, seed = map(_listed, (max_new_tokens, seed))
        check_each(max_new_tokens=max_new_tokens, seed=seed)
        arguments = {**kwargs, "stopping_criteria": stopping_criteria}
        check_types(generation_config, self.generation_config, arguments)
        config = self._merged(generation_config, kwargs)
        refuse_other_loops(config, kwargs)
        refuse_in_batches(config, kwargs, batch_size)
        kwargs.pop("custom_generate", None)
        engine, drafting = self._drafting(draft, assistant_model, kwargs, bool(config.do_sample))
        tokenizer = kwargs.get("tokenizer")
        criteria = with_stop_strings(stopping_criteria, config.stop_strings, tokenizer)
        generation_config = without_tokenizer(generation_config, self.generation_config, kwargs)
        with self.decoder.lock:  # PEFT checks names by hooks in the model
            adapters = take_adapters(self.model, kwargs)
        drafter = partial(make_drafter, engine, drafting)
        any_drafter = drafter()  # requests are not run by themselves
        if not isinstance(inputs, Iterable):
            raise _no_ids(inputs)
        prompts: Iterable[Sequence[int]] = map(_token_ids, inputs)
        if isinstance(inputs, Sequence):
            check_counts(len(inputs), max_new_tokens=max_new_tokens, seed=seed)
            if adapters is not None:
                adapters.check_rows(len(inputs))
            if not inputs:
                return None
            prompts = [*prompts]  # checked before anything runs
        source = partial(_seeded, seed, engine.decoder.device)

        def open_request(prompt: Sequence[int], number: int) -> Session:
            most = number_of("max_new_tokens", max_new_tokens, number)
            options = dict(kwargs) if most is None else {**kwargs, "max_new_tokens": most}
            options |= {"generation_config": generation_config, "stopping_criteria": criteria}
            call = Call(
                engine,
                any_drafter,
                drafting.rule,
                generator=source(number),
                adapters=adapters,
                row=number,
            )
            return self._open(prompt, call, options)

        batch = Batch(
            open_request, drafter, prompts, batch_size, source(0), bool(record_timestamps)
        )
        self.last_stats, self.last_trace = batch.stats, None
        return batch

    def _open(self, prompt: Sequence[int], call: Call, options: Options) -> Session:
        """The session of one request; transformers prepares it as it prepares `generate`."""
        tokens = torch.tensor([list(prompt)], dtype=torch.long, device=call.engine.decoder.device)
        return self._run_loop(
            left_padded(tokens, {})[0],
            attention_mask=torch.ones_like(tokens),
            custom_generate=partial(open_session, call=call),
            **options,
        )

    def _merged(self, config: GenerationConfig | None, options: Options) -> GenerationConfig:
        """The generation config of a call."""
        self.causal_lm.generation_config = self.generation_config  # as PEFT does
        return merged(self.causal_lm, config, options)

    def _drafting(
        self,
        draft: DraftConfig | Options | str | None,
        assistant: nn.Module | None,
        options: dict[str, Any],
        sampled: bool,
    ) -> tuple[Engine, DraftConfig]:
        """The engine and the draft config of a call, which the model's first call may refuse.

        `assistant_tokenizer` leaves the options.
        """
        if not self._checked:
            self._checked = check_itself(self.causal_lm)
        own = options.pop("assistant_tokenizer", None)
        if assistant is not None:
            # A tokenizer alone is there for other options, and the folders tell the rest.
            tokenizers = (options.get("tokenizer") if own is not None else None), own
            return self.engine.beside(assistant, tokenizers), _assisted(DraftConfig.of(draft))
        return self.engine, self.draft_for(sampled) if draft is None else DraftConfig.of(draft)


_OPTIONS = ("heads", "draft_model", "profile", "kernels", "kv_cache_dtype", "store")


def _with_our_options(error: TypeError, options: Options) -> TypeError:
    """The error of loading, which for an unknown option names the nearest one of ours."""
    unknown = [name for name in options if f"unexpected keyword argument '{name}'" in str(error)]
    if not unknown:
        return error
    known = [*_OPTIONS, "and those of AutoModelForCausalLM.from_pretrained"]
    return TypeError(unknown_name("option of from_pretrained", unknown[0], known))


def _token_ids(prompt: Sequence[int]) -> Sequence[int]:
    """The prompt as integers, unless it is text, a single token, or no token ids."""
    try:
        return list(map(index, prompt))
    except TypeError:
        raise _no_ids(prompt, " in the place of one") from None


def _no_ids(given: object, place: str = "") -> TypeError:
    return TypeError(
        f"generate_batch takes lists of token ids, got {given!r:.60}{place}; "
        'for texts pass tokenizer(prompts)["input_ids"]'
    )


def _listed(values: Any) -> Any:
    """Numbers in an array or a tensor as those of Python; others as they are."""
    return values.tolist() if hasattr(values, "tolist") else values


def _seeded(
    seed: int | Sequence[int] | None, device: torch.device, number: int
) -> torch.Generator | None:
    """The source of random numbers of request `number`; `None` for torch's global one."""
    if seed is None:
        return None
    chosen = seed + number if isinstance(seed, int) else number_of("seed", seed, number)
    return torch.Generator(device).manual_seed(chosen)


def _assisted(draft: DraftConfig) -> DraftConfig:
    """The draft by an assistant model."""
    other = draft.drafter if "drafter" in draft.model_fields_set else "two_model"
    if other != "two_model" or draft.draft_model is not None:
        what = f"drafter={other!r}" if draft.draft_model is None else "draft_model"
        raise ValueError(
            f"assistant_model and {what} exclude each other; give one of them, or "
            "assistant_model with drafter='two_model'"
        )
    return draft.model_copy(update={"drafter": "two_model"})

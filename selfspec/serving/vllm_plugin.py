"""Early exit inside vLLM: the target's first layers draft, on the target's own KV blocks.

With `"model": "selfspec:..."` in the speculative config, the target is its own draft model, the
config stores the requested `Exit`, and the proposer is `EarlyExitProposer`. vLLM's second model
runner has another class (`vllm_runner_v2`).

Drafting writes KV of the shallow layers at positions beyond the verified tokens. Verification runs
all layers over the same positions and writes them again, so rejected drafts leave nothing behind.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.backends import set_model_tag
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from selfspec.decoder import Decoder
from selfspec.heads import ExitHead
from selfspec.serving.exits import Exit, Join, body_of, draft_logits, load_head

# The configuration


def configure_exit(
    config: SpeculativeConfig, configure: Callable[[SpeculativeConfig], None]
) -> None:
    """Let a speculative config have the target's first layers as its draft model.

    `configure` is vLLM's own `__post_init__`. Raises FileNotFoundError if there are no such heads,
    ValueError if they or other settings do not fit.
    """
    assert config.model is not None
    wanted = Exit.parse(config.model)
    if config.method not in (None, "draft_model"):
        raise ValueError(f'"model": "{config.model}" needs "method": "draft_model"')
    if config.target_parallel_config.pipeline_parallel_size > 1:
        raise ValueError("selfspec drafts inside vLLM with pipeline_parallel_size 1 only")
    target = config.target_model_config
    config.method, config.model = "draft_model", target.model
    config.revision, config.quantization = target.revision, target.quantization
    # The second model runner (`vllm_runner_v2`) also works, but has not been run on a GPU.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    configure(config)
    _, head = _load_head(target, wanted)
    # Worker processes find there what is asked for.
    hf_config = copy.copy(config.draft_model_config.hf_config)
    hf_config.selfspec = wanted._asdict()
    if head.layer is not None:
        hf_config.eagle_aux_hidden_state_layer_ids = sorted(set(head.input_layers))
    config.draft_model_config.hf_config = hf_config


def _load_head(
    target: ModelConfig, wanted: Exit, norm: nn.Module | None = None
) -> tuple[Decoder, ExitHead]:
    """`load_head` for vLLM's config of a target."""
    return load_head(
        target.model,
        wanted,
        dtype=target.dtype,
        norm=norm,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )


# The draft model


class EarlyExitModel(nn.Module):
    """The first layers of a target inside vLLM, and a head.

    It owns nothing but the head: everything else is the target's, the same modules. `shallow` is a
    body of the target's class with its first layers, `None` for an exit at the embeddings; `own`
    one with the head's own layer alone.
    """

    def __init__(
        self, target: nn.Module, head: ExitHead, shallow: nn.Module | None, own: nn.Module | None
    ):
        super().__init__()
        self.head, self.shallow, self.own = head, shallow, own
        # In a tuple, so that the target's modules are not counted as parts of the draft model.
        self._target = (target,)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        inputs_embeds: Tensor | None = None,
        hidden_states: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the LM head reads `[tokens, hidden]`; with a layer of its own, its output too.

        `hidden_states` `[tokens, hidden]` are features of the token before each of `input_ids`
        `[tokens]`, for a head that reads features.
        """
        if self.shallow is None:
            hidden = self._target[0].embed_input_ids(input_ids)  # pyright: ignore[reportCallIssue]
        else:
            hidden = self.shallow(input_ids, positions, None, None)
        if self.own is None:
            return self.head(hidden)
        hidden = self.run_own(hidden, positions, hidden_states)
        return self.head(hidden), hidden

    def run_own(self, hidden: Tensor, positions: Tensor, features: Tensor | None) -> Tensor:
        """The output `[tokens, hidden]` of the head's own layer, before the head's norm."""
        assert self.own is not None
        entered = self.head.enter(hidden, features)
        return self.own(None, positions, None, entered.to(hidden.dtype))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Draft logits `[tokens, vocabulary]`; -inf for tokens that the head cannot draft."""
        logits = self._target[0].compute_logits(hidden)  # pyright: ignore[reportCallIssue]
        return draft_logits(self.head, hidden, logits)


def build_model(vllm_config: VllmConfig, target: nn.Module, device: torch.device) -> EarlyExitModel:
    """The draft model of a speculative config, whose draft model is an `Exit`.

    Raises ValueError if the target is built in another way than as a list of layers.
    """
    if hasattr(target, "get_language_model"):
        target = target.get_language_model()  # pyright: ignore[reportCallIssue]
    wanted = Exit(**vllm_config.speculative_config.draft_model_config.hf_config.selfspec)
    body = body_of(target)
    decoder, head = _load_head(vllm_config.model_config, wanted, getattr(body.module, body.norm))
    if head.layer is not None and not supports_eagle3(target):
        raise ValueError(
            f"a {head.kind} head reads hidden states that {type(target).__name__} of vLLM does not "
            "hand out; take a head without a layer of its own (shared, lens, lora)"
        )
    build = _Builder(vllm_config, target, device)
    shallow = build.shallow(head.exit_layer) if head.exit_layer else None
    own = None if head.layer is None else build.own(decoder, head)
    head.layer = None  # its weights are in `own`
    dtype = vllm_config.model_config.dtype
    return EarlyExitModel(target, head.to(device, dtype), shallow, own)


def attention_layers(vllm_config: VllmConfig, model: EarlyExitModel) -> set[str]:
    """Names of the attention layers that a draft model runs."""
    kind: Any = AttentionLayerBase
    layers, used = get_layers_from_vllm_config(vllm_config, kind), set(model.modules())
    return {name for name, part in layers.items() if part in used}


class _Builder:
    """Makes models of the target's class whose parts are the target's own modules."""

    def __init__(self, vllm_config: VllmConfig, target: nn.Module, device: torch.device):
        self.vllm_config, self.target, self.device = vllm_config, target, device
        self.body = body_of(target)

    def shallow(self, exit_layer: int) -> nn.Module:
        """The layers below an exit."""
        compilation = self.vllm_config.compilation_config
        registered, experts = compilation.static_forward_context, compilation.static_all_moe_layers
        before, experts_before = set(registered), len(experts)
        with torch.device("meta"):
            model = self._model(exit_layer, f"selfspec_{exit_layer}")
        for name in registered.keys() - before:  # these layers are replaced immediately
            del registered[name]
        del experts[experts_before:]
        layers = getattr(self.body.module, self.body.layers)
        return self._share(model, list(layers)[:exit_layer])

    def own(self, decoder: Decoder, head: ExitHead) -> nn.Module:
        """The head's own layer."""
        tag = f"selfspec_{head.kind}_{head.exit_layer}"
        with torch.device(self.device):
            model = self._model(1, tag, head.place)
        names = {id(part): name for name, part in decoder.causal_lm.named_modules()}
        root = names[id(decoder.layers)]
        assert head.layer is not None
        weights = ((f"{root}.0.{name}", w) for name, w in head.layer.state_dict().items())
        model.load_weights(weights)  # pyright: ignore[reportCallIssue]
        (layer,) = getattr(body_of(model).module, self.body.layers)
        process_weights_after_loading(layer, self.vllm_config.model_config, self.device)
        return self._share(model, [layer])

    def _model(self, depth: int, tag: str, place: int | None = None) -> nn.Module:
        """A model of the target's class with `depth` layers; with `place`, one like that layer."""
        config = copy.copy(self.vllm_config)
        config.model_config = copy.copy(config.model_config)
        hf_config = copy.deepcopy(config.model_config.hf_config)
        hf_config.num_hidden_layers = depth
        if place is not None:
            hf_config.vocab_size = 64 * config.parallel_config.tensor_parallel_size
            config.quant_config = None
            if getattr(hf_config, "layer_types", None):
                hf_config.layer_types = [hf_config.layer_types[place]]
        config.model_config.hf_config = config.model_config.hf_text_config = hf_config
        with set_default_torch_dtype(config.model_config.dtype), set_model_tag(tag):
            return initialize_model(config, prefix=tag)

    def _share(self, model: nn.Module, layers: list[nn.Module]) -> nn.Module:
        """Give a model the target's own parts around these layers, without a final norm."""
        body = body_of(model).module
        for parts, source in ((model, self.target), (body, self.body.module)):
            for name, part in list(parts.named_children()):
                if part is not body:
                    setattr(parts, name, getattr(source, name))
            for name, buffer in list(source.named_buffers(recurse=False)):
                setattr(parts, name, buffer)
        setattr(body, self.body.layers, nn.ModuleList(layers))
        setattr(body, self.body.norm, Join())
        return model


class Features:
    """Features of verified tokens, for heads that read the features of the previous token."""

    def __init__(self) -> None:
        # `[requests, hidden]` of every request's last verified token, if the head reads features
        self.last: Tensor | None = None
        self._seen: set[str] = set()

    def goes_on(self, requests: Sequence[str]) -> bool:
        """Whether all these requests were in the previous round."""
        return self._seen.issuperset(requests)

    def verified(self, head: ExitHead, streams: Mapping[int, Tensor], last: Tensor) -> Tensor:
        """Features `[tokens, hidden]` of the tokens of the target's pass; see `read`."""
        features = head.fuse_features([streams[layer] for layer in head.feature_layers])
        features = features.to(streams[head.exit_layer].dtype)
        self.last = features[last]
        return features

    def read(
        self,
        head: ExitHead,
        streams: Mapping[int, Tensor],
        starts: Tensor,
        last: Tensor,
        requests: Sequence[str],
        slots: Tensor,
    ) -> Tensor | None:
        """Features `[tokens, hidden]` of the previous token, for each token of the target's pass.

        Args:
            head: the head.
            streams: `[tokens, hidden]` residual streams of the pass, by number of layers below.
            starts: `[requests]` index of every request's first token.
            last: `[requests]` index of its last verified token.
            requests: their ids.
            slots: `[tokens]` of the pass; padding replaces those that must not be overwritten.
        """
        if not head.feature_layers:
            return None
        features = self.verified(head, streams, last)
        # The first token of a request needs the features of a token of the previous pass. In the
        # previous round the first draft has written its KV with them. A new request, or one that
        # was not in that round, has no such features.
        before = torch.cat([torch.zeros_like(features[:1]), features[:-1]])
        before[starts] = 0
        going_on = [request in self._seen for request in requests]
        self._seen = set(requests)
        slots[starts[torch.tensor(going_on, device=starts.device)]] = PADDING_SLOT_ID
        return before


# The proposer of the first model runner


class EarlyExitProposer(DraftModelProposer):
    """Drafts with a target's first layers and a head, on the target's KV blocks.

    The first draft of a round needs one token per request: the pass that verified the others has
    written their shallow KV. A head with a layer of its own first reads the hidden states of the
    verified tokens, which writes that layer's KV. At the embeddings (exit 0) both are one pass, if
    all requests were in the previous round.
    """

    model: EarlyExitModel

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        if device.type == "cpu" and not HAS_TRITON:
            register_kernels({_EXPAND: _expand})
        self.supports_mm_inputs = False
        self._runner = runner
        self._rejected: Tensor | None = None
        self._features = Features()
        self._one_pass = False  # whether one pass reads the verified tokens and drafts
        streams = getattr(self.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", ())
        self._streams: tuple[int, ...] = tuple(streams)
        if streams:
            runner.use_aux_hidden_state_outputs = True

    def load_model(self, target_model: nn.Module) -> None:
        """Make the draft model of the target's own modules."""
        self.model = build_model(self.vllm_config, target_model, self.device)
        self.pass_hidden_states_to_model = bool(self.model.head.feature_layers)
        self._draft_attn_layer_names = attention_layers(self.vllm_config, self.model)

    def model_returns_tuple(self) -> bool:
        """Whether the model also returns what is fed back."""
        return self.model.own is not None

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Raise ValueError unless all layers that draft have KV of one kind."""
        groups = [set(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        if not any(self._draft_attn_layer_names <= group for group in groups):
            raise ValueError(
                "the layers below the exit have KV caches of several kinds (full and sliding "
                "window attention); vLLM drafts with one kind only, choose a lower exit_layer"
            )

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: object,
        sampling_metadata: object,
        mm_embed_inputs: object = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        slot_mappings: object = None,
    ) -> Tensor:
        """Drafts `[requests, num_speculative_tokens]`, as the base class makes them."""
        self._rejected = num_rejected_tokens_gpu
        head, requests = self.model.head, self._runner.input_batch.req_ids
        features = head.feature_layers and not head.exit_layer
        self._one_pass = bool(features) and self._features.goes_on(requests)
        if self.model.own is not None and not self._one_pass:
            self._read_verified(common_attn_metadata, target_positions, target_hidden_states)
        return super().propose(
            num_speculative_tokens,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            None,
            # After the first draft the base class subtracts them from the lengths; in a pass over
            # the newest tokens alone the lengths are without them.
            num_rejected_tokens_gpu if self._one_pass else None,
            slot_mappings,
        )

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: Any,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, Any]:
        """The newest token of every request, after its verified tokens if one pass reads both."""
        length, slots = self._newest(cad)
        if self._one_pass:
            count, (_, last) = cad.num_actual_tokens, self._ends(cad)
            features = self._by_layer(target_hidden_states)
            features = self._features.verified(self.model.head, features, last)
            # Every token of the target's pass is replaced by the next one of its request. The first
            # one has been read in the previous round, as its newest token.
            self.input_ids[: count - 1] = target_token_ids[1:count]
            self.input_ids[last] = next_token_ids.int()
            positions = target_positions[:count] + 1
            self._set_positions(count, positions.clamp(max=self.max_model_len - 1))
            self.hidden_states[:count] = features[:count]
            slot_mapping = self._shifted_slots(cad, last, slots)
            return count, last, self._longer(cad, cad.seq_lens, slot_mapping=slot_mapping)
        requests = cad.batch_size()
        self.input_ids[:requests] = next_token_ids.int()
        self._set_positions(requests, length.clamp(max=self.max_model_len - 1).long())
        if self._features.last is not None:
            self.hidden_states[:requests] = self._features.last
        metadata = self._longer(
            cad,
            length,
            query_start_loc=self.arange[: requests + 1],
            query_start_loc_cpu=torch.arange(requests + 1, dtype=torch.int32),
            num_actual_tokens=requests,
            max_query_len=1,
            slot_mapping=slots,
        )
        return requests, self.arange[:requests], metadata

    def _newest(self, cad: Any) -> tuple[Tensor, Tensor]:
        """Position and slot of the newest token of every request, both `[requests]`."""
        length = cad.seq_lens if self._rejected is None else cad.seq_lens - self._rejected
        table = cad.block_table_tensor
        column = (length // self.block_size).clamp(max=table.shape[1] - 1).long()
        block = table.gather(1, column[:, None])[:, 0].long()
        slots = block * self.block_size + length % self.block_size
        return length, torch.where(length < self.max_model_len, slots, PADDING_SLOT_ID)

    def _shifted_slots(self, cad: Any, last: Tensor, newest: Tensor) -> Tensor:
        """For each token of the target's pass `[tokens]`, the slot of the next one.

        The last verified token of each request is at `last`, its newest token goes to `newest`.
        """
        count = cad.num_actual_tokens
        lengths = cad.query_start_loc[1:] - cad.query_start_loc[:-1]
        is_rejected = self.arange[:count] > last.repeat_interleave(lengths, output_size=count)
        slots = cad.slot_mapping[:count].roll(-1).masked_fill(is_rejected, PADDING_SLOT_ID)
        slots[last] = newest
        return slots

    def _longer(self, cad: Any, lengths: Tensor, **changes: object) -> Any:
        """The metadata with these changes, of sequences one token longer than `lengths`."""
        longest = cad.seq_lens_cpu_upper_bound
        return cad.replace(
            seq_lens=(lengths + 1).to(cad.seq_lens.dtype),
            seq_lens_cpu_upper_bound=None if longest is None else longest + 1,
            max_seq_len=min(cad.max_seq_len + 1, self.max_model_len),
            **changes,
        )

    def _by_layer(self, streams: Tensor) -> dict[int, Tensor]:
        """The residual streams `[tokens, hidden]`, by number of layers below."""
        parts = streams.chunk(len(self._streams), -1)
        return dict(zip(self._streams, parts, strict=True))

    def _ends(self, cad: Any) -> tuple[Tensor, Tensor]:
        """Indices of the requests' first and last verified tokens in the target's pass."""
        starts, ends = cad.query_start_loc[:-1].long(), cad.query_start_loc[1:].long() - 1
        return starts, ends if self._rejected is None else ends - self._rejected.long()

    def _read_verified(self, cad: Any, positions: Tensor, streams: Tensor) -> None:
        """Write the KV of the head's own layer for what the target has just run.

        `positions` `[tokens]` and `streams` `[tokens, streams * hidden]` include rejected drafts.
        """
        head, count = self.model.head, cad.num_actual_tokens
        by_layer, (starts, last) = self._by_layer(streams), self._ends(cad)
        slots = cad.slot_mapping[:count].clone()
        requests = self._runner.input_batch.req_ids
        before = self._features.read(head, by_layer, starts, last, requests, slots)
        _, metadata = self.build_per_group_and_layer_attn_metadata(cad.replace(slot_mapping=slots))
        mode, padded, across = self._determine_batch_execution_and_padding(count)
        self._set_positions(count, positions)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(padded, slots),
        ):
            hidden = by_layer[head.exit_layer]
            self.model.run_own(
                _padded(hidden, padded),
                self._get_positions(padded),
                None if before is None else _padded(before, padded),
            )


# vLLM 0.32 on a CPU expands temperature, top-k and top-p of requests with drafts into a copy, and
# samples with uninitialized memory (docs/upstream/vllm_cpu_expand.patch).
_EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


def _expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write the value of each request `[requests]` for each of its tokens to `output` `[tokens]`.

    `ends` `[requests]` has the index behind the last token of each.
    """
    values = values.masked_fill(values == replace_from, replace_to)
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.repeat_interleave(counts, output_size=len(output)))


def _padded(states: Tensor, count: int) -> Tensor:
    """`states` with zeros behind them, `count` in all."""
    return torch.nn.functional.pad(states, (0, 0, 0, count - len(states)))

"""Early exit in vLLM's second model runner (`VLLM_USE_V2_MODEL_RUNNER=1`)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from selfspec.serving.vllm_plugin import EarlyExitModel, Features, attention_layers, build_model


class EarlyExitSpeculator(StandaloneARSpeculator):
    """Drafts with a target's first layers and a head, on the target's KV blocks.

    As `EarlyExitProposer`: the first draft of a round runs the newest token of each request, and a
    head with a layer of its own first reads the hidden states of the verified tokens.
    """

    num_extra_query_per_req = 0
    model: EarlyExitModel

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        hf_config = self.draft_model_config.hf_config
        streams = getattr(hf_config, "eagle_aux_hidden_state_layer_ids", ())
        self.streams: tuple[int, ...] = tuple(streams)
        self._features = Features()
        shape = (self.max_num_reqs, self.hidden_size)
        self._fed_back = torch.zeros(shape, dtype=self.dtype, device=device)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Make the draft model of the target's own modules."""
        self._draft_vllm_config = self.vllm_config
        return build_model(self.vllm_config, target_model, self.device)

    def set_attn(self, *args: object, **kwargs: object) -> None:
        """Set attention metadata for all layers of the draft model, not only the head's own."""
        own = self.draft_attn_layer_names
        self.draft_attn_layer_names = attention_layers(self.vllm_config, self.model)
        super().set_attn(*args, **kwargs)
        self.draft_attn_layer_names = own

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, object],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Drafts `[requests, drafts]`, as the base class makes them."""
        batch, streams = (input_batch, attn_metadata, slot_mappings), aux_hidden_states
        if self.model.own is not None and streams and not kwargs.get("dummy_run"):
            self._read_verified(*batch, streams, num_rejected)
        sampled = (last_hidden_states, streams, num_sampled, num_rejected)
        return super().propose(*batch, *sampled, *args, **kwargs)

    @torch.inference_mode()
    def _read_verified(
        self,
        batch: InputBatch,
        metadata: dict[str, object],
        mappings: dict[str, Tensor],
        streams: list[Tensor],
        num_rejected: Tensor,
    ) -> None:
        """Write the KV of the head's own layer for what the target has just run."""
        by_layer = {
            layer: states[: batch.num_tokens]
            for layer, states in zip(self.streams, streams, strict=True)
        }
        (name,) = self.draft_attn_layer_names
        slots = mappings[name].clone()
        bounds = batch.query_start_loc[: batch.num_reqs + 1].long()
        last = bounds[1:] - 1 - num_rejected[: batch.num_reqs].long()
        head = self.model.head
        before = self._features.read(head, by_layer, bounds[:-1], last, batch.req_ids, slots)
        if self._features.last is not None:
            self._fed_back[: batch.num_reqs] = self._features.last
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=batch.num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping={**mappings, name: slots},
            batch_descriptor=BatchDescriptor(num_tokens=batch.num_tokens),
        ):
            positions = batch.positions[: batch.num_tokens]
            self.model.run_own(by_layer[head.exit_layer], positions, before)

    def _prefill(
        self,
        input_batch: InputBatch,
        num_rejected: Tensor,
        last_sampled: Tensor,
        num_reqs: int,
        skip_attn: bool,
        num_tokens_across_dp: Tensor | None,
    ) -> None:
        """The first draft: the newest token of every request alone."""
        buffers, step = self.input_buffers, input_batch
        length = step.seq_lens[:num_reqs] - num_rejected[:num_reqs]
        ids = buffers.input_ids[:num_reqs].copy_(last_sampled[step.idx_mapping[:num_reqs], 0])
        positions = buffers.positions[:num_reqs].copy_(length.clamp(max=self.max_model_len - 1))
        buffers.seq_lens[:num_reqs] = (length + 1).clamp(max=self.max_model_len)
        starts = buffers.query_start_loc[: num_reqs + 1].copy_(self.arange_gpu[: num_reqs + 1])
        # The base class continues with the second draft.
        self.expanded_positions[:num_reqs] = positions
        self.last_token_indices[:num_reqs] = self.arange_gpu[:num_reqs]
        metadata = mappings = None
        if not skip_attn:
            slots = self.block_tables.compute_slot_mappings(
                step.idx_mapping, starts, positions, num_reqs
            )
            mappings = build_slot_mappings_by_layer(slots, self.kv_cache_config)
            metadata = self._build_uniform_attn_metadata(
                batch_desc=BatchExecutionDescriptor(
                    cg_mode=CUDAGraphMode.NONE,
                    num_tokens=num_reqs,
                    num_reqs=num_reqs,
                    uniform_token_count=1,
                ),
                num_reqs=num_reqs,
                num_query_per_req=1,
                seq_lens_cpu_upper_bound=step.seq_lens_cpu_upper_bound,
                step=1,
            )
        hidden = self._run_model(ids, positions, metadata, mappings, num_tokens_across_dp)
        self.current_draft_step.fill_(0)
        self.draft_tokens[:num_reqs, 0] = self.sample_draft(
            hidden,
            positions,
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )

    @torch.inference_mode()
    def _run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: dict[str, object] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
    ) -> Tensor:
        """What the LM head reads; the output of the head's own layer is fed back."""
        count = len(input_ids)
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=count,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=count),
        ):
            reads = bool(self.model.head.feature_layers)
            fed_back = self._fed_back[:count] if reads else None
            output = self.model(input_ids, positions, hidden_states=fed_back)
        if isinstance(output, Tensor):
            return output
        self._fed_back[:count] = output[1]
        return output[0]


def hand_out_streams() -> None:
    """Let the runner hand its speculator the hidden states that a head reads, as for EAGLE-3."""
    load = GPUModelRunner.load_model

    def load_model(self: GPUModelRunner, *args: object, **kwargs: object) -> object:
        speculator = self.speculator
        if isinstance(speculator, EarlyExitSpeculator) and speculator.streams:
            self.use_aux_hidden_state_outputs = True
        return load(self, *args, **kwargs)

    GPUModelRunner.load_model = load_model

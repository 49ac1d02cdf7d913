r"""Early exit inside SGLang: the target's first layers draft, on the target's own KV pool.

    SELFSPEC_EXIT=path/to/heads@lens:4 python -m sglang.launch_server --model-path path/to/target \
      --speculative-algorithm SELFSPEC --speculative-num-steps 4

Written for SGLang 0.5.23. Only heads without a layer of their own are supported (`shared`, `lens`,
`lora`), because SGLang's KV pool has only the target's layers.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input, run_eagle_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.srt.speculative.spec_utils import get_plan_stream
from torch import Tensor, nn

from selfspec.serving.exits import Body, Exit, Join, body_of, draft_logits, load_head

VARIABLE = "SELFSPEC_EXIT"
"""The environment variable that names the exit: `[HEADS][@[KIND:]EXIT]`."""


class EarlyExitAlgorithm(CustomSpecAlgo):
    """Tells SGLang the properties of the algorithm, and completes its arguments."""

    create_future_map = SpeculativeAlgorithm.create_future_map

    def is_standalone(self) -> bool:
        """True: as with a separate draft model, the target's hidden states are not kept."""
        return True

    def need_topk(self) -> bool:
        """False: only the newest token is carried from one round to the next."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """False: only the newest token is carried from one round to the next."""
        return False

    def handle_server_args(self, server_args: Any) -> None:
        """Set the arguments of a chain of drafts; ValueError for one that is not supported."""
        steps = server_args.speculative_num_steps
        if not steps:
            raise ValueError("SELFSPEC needs --speculative-num-steps, the number of drafts a round")
        if (server_args.speculative_eagle_topk or 1) != 1:
            raise ValueError("SELFSPEC drafts chains: --speculative-eagle-topk must be 1")
        if server_args.pp_size > 1 or server_args.enable_dp_attention:
            raise ValueError("SELFSPEC does not support pipeline parallelism or DP attention")
        if server_args.speculative_draft_model_path is not None:
            raise ValueError(f"SELFSPEC takes no draft model; {VARIABLE} names the exit")
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = steps + 1


def register() -> None:
    """Register the algorithm SELFSPEC: an entry point of the group `sglang.srt.plugins`."""
    SpeculativeAlgorithm.register("SELFSPEC", supports_overlap=True, spec_class=EarlyExitAlgorithm)(
        lambda server_args: EarlyExitWorker
    )


class EarlyExitWorker(BaseSpecWorker):
    """Drafts with a target's first layers and a head, and verifies as SGLang's EAGLE does.

    Drafts are the head's most likely tokens. Draft passes write KV of the shallow layers into slots
    that verification overwrites.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__()
        self.server_args = server_args
        self._target_worker, self._draft_worker = target_worker, None
        self.runner, self.device = target_worker.model_runner, target_worker.device
        self.speculative_num_steps: int = get_spec().speculative_num_steps
        self.speculative_num_draft_tokens = self.speculative_num_steps + 1
        self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)
        self.target: Any = self.runner.model
        body, config = body_of(self.target), self.runner.model_config
        _, self.head = load_head(
            config.model_path,
            Exit.parse(os.environ.get(VARIABLE, "")),
            dtype=config.dtype,
            norm=getattr(body.module, body.norm),
            revision=config.revision,
            trust_remote_code=server_args.trust_remote_code,
        )
        if self.head.layer is not None:
            raise ValueError(
                f"a {self.head.kind} head has KV of its own, for which SGLang's pool has no layer; "
                "take a shared, lens or lora head"
            )
        self.head.to(self.device, config.dtype)
        self.shallow = _shallow(body, self.head.exit_layer)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[Tensor], object] | None = None,
        grammar_barrier: object = None,
        pp_proxy_tensors: object = None,
    ) -> Any:
        """Run a batch of prompts, or one round of drafts and their verification."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = self.target_worker.forward_batch_generation(batch)
            result.new_seq_lens = batch.seq_lens
            result.next_draft_input = EagleDraftInput(bonus_tokens=result.next_token_ids)
        else:
            batch.spec_info = self._verify_input(batch, self._draft(batch))
            result = run_eagle_verify(
                batch,
                target_worker=self.target_worker,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
                plan_stream=self.plan_stream,
                plan_stream_ctx=self.plan_stream_ctx,
                topk=1,
                num_draft_tokens=self.speculative_num_draft_tokens,
                device=self.device,
                metadata_ready_pre_pad=False,
                finalize_tree_path=True,
                grammar_barrier=grammar_barrier,
            )
        carried = result.next_draft_input
        carried.capture_hidden_mode = CaptureHiddenMode.NULL
        # SGLang needs these tensors to join and filter batches; their values are not read.
        carried.topk_p = torch.ones(len(batch.seq_lens), 1, device=self.device)
        carried.topk_index = torch.zeros_like(carried.topk_p, dtype=torch.long)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def _draft(self, batch: Any) -> Tensor:
        """Drafts `[requests, steps]`; the first pass runs the newest token of each request."""
        rows = self.req_to_token_pool.req_to_token[batch.req_pool_indices.long()]
        tokens, drafts = batch.spec_info.bonus_tokens.long(), []
        for step in range(self.speculative_num_steps):
            positions = batch.seq_lens.long() + step
            lengths = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu + step + 1
            forward = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(tokens),
                input_ids=tokens,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens + step + 1,
                out_cache_loc=rows.gather(1, positions[:, None])[:, 0].long(),
                seq_lens_sum=None if lengths is None else int(lengths.sum()),
                seq_lens_cpu=lengths,
                positions=positions,
                spec_algorithm=batch.spec_algorithm,
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
            self.runner.kv_index_translator.bind_own_plan(forward)
            tokens = self._logits(forward).argmax(-1)
            drafts.append(tokens)
        return torch.stack(drafts, 1)

    @torch.no_grad()
    def _logits(self, forward: ForwardBatch) -> Tensor:
        """Draft logits `[requests, vocabulary]` after one token of each."""
        backend = self.runner.attn_backend
        backend.init_forward_metadata(forward)
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=forward):
            hidden = self.head(self.shallow(forward.input_ids, forward.positions, forward))
            logits = self.target.logits_processor(
                forward.input_ids, hidden, self.target.lm_head, forward
            ).next_token_logits
        return draft_logits(self.head, hidden, logits)

    def _verify_input(self, batch: Any, drafts: Tensor) -> Any:
        """The drafts as a tree with one branch."""
        steps = self.speculative_num_steps
        nodes = torch.arange(steps, device=self.device).expand(len(drafts), -1)
        parents = nodes - 1 if steps > 1 else nodes[:, :0]
        return build_eagle_verify_input(
            batch,
            batch.spec_info,
            parents.contiguous(),
            nodes.contiguous(),
            drafts,
            None,
            target_worker=self.target_worker,
            topk=1,
            num_steps=steps,
            num_draft_tokens=self.speculative_num_draft_tokens,
            tree_mask_mode=default_tree_mask_mode(),
            device=self.device,
        )


def _shallow(body: Body, exit_layer: int) -> nn.Module:
    """A copy of the body that shares its modules and has only its first layers and no norm."""
    shallow = copy.copy(body.module)
    shallow._modules = dict(body.module._modules)
    layers = list(getattr(body.module, body.layers))
    setattr(shallow, body.layers, nn.ModuleList(layers[:exit_layer]))
    setattr(shallow, body.norm, Join())
    shallow.end_layer = exit_layer  # pyright: ignore[reportArgumentType]
    return shallow

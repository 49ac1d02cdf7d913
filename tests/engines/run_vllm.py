"""Run vLLM in this process and print what it wrote as JSON.

    python run_vllm.py FOLDER DRAFT_MODEL NUM_DRAFTS PROMPTS_JSON [SAMPLING_JSON]

`DRAFT_MODEL` "" is the target alone. With VLLM_USE_V2_MODEL_RUNNER=1 the second model runner does
it, whose Triton kernels are interpreted.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the draft model can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def interpret_triton() -> None:
    """Let vLLM find a Triton for the CPU: its interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def main(folder: str, draft_model: str, drafts: str, prompts: str, sampling: str = "{}") -> None:
    """Write tokens, counts, KV blocks and the parameters that the draft model adds."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        interpret_triton()
    from vllm import LLM, SamplingParams

    options = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, "detokenize": False}
    options |= json.loads(sampling)
    speculative = {"method": "draft_model", "model": draft_model}
    speculative |= {"num_speculative_tokens": int(drafts), **options.pop("speculative", {})}
    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=2**26,
        speculative_config=speculative if draft_model else None,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
    )
    asked = SamplingParams(**options)
    given = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    outputs = llm.generate(given, asked, use_tqdm=False)
    counts = {m.name: getattr(m, "value", getattr(m, "values", 0)) for m in llm.get_metrics()}
    engine = llm.llm_engine
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    own = {id(parameter) for parameter in runner.model.parameters()}
    drafter = getattr(runner, "drafter", getattr(runner, "speculator", None))
    drafter = getattr(drafter, "model", None)
    added = [p for p in drafter.parameters() if id(p) not in own] if drafter else []
    shared = {parameter.data_ptr() for parameter in runner.model.parameters()}
    answer = {
        "tokens": [list(choice.token_ids) for output in outputs for choice in output.outputs],
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted_at": counts.get("vllm:spec_decode_num_accepted_tokens_per_pos", []),
        "blocks": engine.vllm_config.cache_config.num_gpu_blocks,
        "added": sum(p.numel() for p in added if p.data_ptr() not in shared),
    }
    print("RESULT", json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])

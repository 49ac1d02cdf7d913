"""The page beside a folded draft: what it is, and the lines that launch it."""

from __future__ import annotations

import json
from re import fullmatch
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.export.draft import Exported

_HUB_ID = r"[\w-][\w.-]*/[\w.-]+"


def draft_guide(exported: Exported, folder: str) -> str:
    """The README of a folded draft, in Markdown, with the front matter that the hub reads.

    Args:
        exported: what was folded.
        folder: where it lies.
    """
    on_hub = fullmatch(_HUB_ID, exported.target) is not None
    front = [f"base_model: {exported.target}"] if on_hub else []
    launches = launch_lines(exported.target, folder, exported.num_draft_tokens)
    blocks = [
        f"## {engine}\n\n```{language}\n{text}\n```\n"
        for engine, (language, text) in launches.items()
    ]
    head = [
        "---",
        "library_name: transformers",
        *front,
        "tags: [speculative-decoding, draft-model, early-exit]",
        "---",
        "",
        f"# Draft model for {exported.target}",
        "",
        _summary(exported),
        "",
        "It is a draft: by itself it writes worse than its target. Beside its target it changes "
        "no output; whoever decodes with both checks every draft with the target.",
        "",
    ]
    return "\n".join([*head, "\n".join(blocks)])


def _summary(exported: Exported) -> str:
    below = f"The first {exported.exit_layer} layers of its target"
    heads = {
        "shared": "the target's own final norm and LM head",
        "lens": "the norm and the corrected LM head that a `lens` head was fitted to have",
        "lora": "the norm and the LM head that a `lora` head was fitted to have",
        "block": "the layer and the norm of a `block` head that was fitted to them",
    }
    text = (
        f"{below}, and {heads[exported.head]}, as a `{exported.architecture}` of "
        f"{exported.layers} layers and {exported.parameters:,} parameters. Made by "
        "`selfspec export hf-draft`; `selfspec_export.json` says of what."
    )
    if exported.drafted is not None:
        text += (
            f" It was fitted to draft {exported.drafted:,} tokens. Any other token has the mean "
            "of their rows in the LM head, so it is never the likeliest."
        )
    return text


def launch_lines(target: str, draft: str, tokens: int) -> dict[str, tuple[str, str]]:
    """Per engine, the language of its lines and the lines that launch a target with a draft.

    Args:
        target: hub id or folder of the target.
        draft: hub id or folder of the folded draft.
        tokens: drafts a round.
    """
    speculative = json.dumps(
        {"method": "draft_model", "model": draft, "num_speculative_tokens": tokens}
    )
    big, small = quote(target), quote(draft)
    return {
        "transformers": ("python", _transformers(target, draft)),
        "vLLM": ("bash", f"vllm serve {big} \\\n  --speculative-config {quote(speculative)}"),
        "SGLang": ("bash", _sglang(big, small, tokens)),
        "TensorRT-LLM": ("bash", _tensorrt(big, draft, tokens)),
        "mlx-lm": (
            "bash",
            f"mlx_lm.generate --model {big} --draft-model {small} --num-draft-tokens {tokens} \\\n"
            '  --prompt "Once upon a time"',
        ),
        "llama.cpp": (
            "bash",
            "# in a checkout of llama.cpp\n"
            f"python convert_hf_to_gguf.py {big} --outfile target.gguf\n"
            f"python convert_hf_to_gguf.py {small} --outfile draft.gguf\n"
            f"llama-server -m target.gguf -md draft.gguf --draft-max {tokens}",
        ),
    }


def _transformers(target: str, draft: str) -> str:
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"target = AutoModelForCausalLM.from_pretrained({target!r})\n"
        f"draft = AutoModelForCausalLM.from_pretrained({draft!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})\n"
        'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
        "written = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)\n"
        "print(tokenizer.decode(written[0]))"
    )


def _sglang(big: str, small: str, tokens: int) -> str:
    # SGLang counts the token that starts a chain among the drafts.
    return (
        f"python -m sglang.launch_server --model-path {big} \\\n"
        f"  --speculative-algorithm STANDALONE --speculative-draft-model-path {small} \\\n"
        f"  --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )


def _tensorrt(big: str, draft: str, tokens: int) -> str:
    return (
        "cat > draft.yaml <<'EOF'\n"
        "disable_overlap_scheduler: true\n"
        "speculative_config:\n"
        "  decoding_type: DraftTarget\n"
        f"  max_draft_len: {tokens}\n"
        f"  speculative_model_dir: {json.dumps(draft)}\n"
        "EOF\n"
        f"trtllm-serve {big} --backend pytorch --extra_llm_api_options draft.yaml"
    )

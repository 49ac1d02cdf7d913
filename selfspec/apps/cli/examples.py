"""Examples at the end of each command's help."""

from __future__ import annotations

EXAMPLES = {
    "app": ("selfspec app", "selfspec app --model path/to/model --port 8000 --no-open"),
    "bench": (
        "selfspec bench max_new_tokens=64 repeats=3",
        "selfspec bench --config configs/bench.yaml --output outputs/bench",
        "selfspec bench --shape Llama-3.2-1B --acceptance 0.6,0.8 batch_sizes='[1, 8]'",
    ),
    "chat": (
        "selfspec chat",
        "selfspec chat --model path/to/model --temperature 0.7 --system 'Be brief.'",
        "printf 'Once upon a time\\nThe end came\\n' | selfspec chat --json",
    ),
    "check": (
        "selfspec check --draft drafter=tree",
        "selfspec check --model path/to/model --file prompts.jsonl --samples 0",
    ),
    "demo": ("selfspec demo --domain code --draft exit_layer=4 --draft num_draft_tokens=3",),
    "fit": (
        "selfspec fit",
        "selfspec fit path/to/model --text 'texts/*.txt' --output outputs/mine",
        "selfspec fit path/to/model --text outputs/written/texts.jsonl loop.steps=2000",
    ),
    "generate": (
        "selfspec generate 'It was a dark and stormy night' --format trace",
        "selfspec generate --file prompts.jsonl --config run.yaml --draft drafter=auto --json",
        "selfspec generate 'Name three rivers.' --model path/to/model --chat --system 'Be brief.'",
        "selfspec generate --prompts prompts.jsonl --output answers.jsonl --processes 2",
    ),
    "info": (
        "selfspec info",
        "selfspec info --model path/to/model --heads path/to/heads --context 4096",
    ),
    "import heads": ("selfspec import heads path/to/medusa path/to/medusa-safetensors",),
    "measure": ("selfspec measure outputs/mine measure.prompts=16",),
    "regenerate": (
        "selfspec regenerate path/to/model --text 'texts/*.txt' --output outputs/written",
    ),
    "tune": ("selfspec tune", "selfspec tune --text mine.txt --set batch=4 --set temperature=1"),
    "export hf-draft": ("selfspec export hf-draft --exit-layer 4 --head block draft",),
    "export eagle3": ("selfspec export eagle3 --heads path/to/heads serve",),
    "export dflash": ("selfspec export dflash --heads path/to/heads serve",),
    "export custom-generate": ("selfspec export custom-generate speculate",),
}


def examples(command: str) -> str:
    """The end of a command's help, in Markdown."""
    return "\n".join(["Examples:\n", "```bash", *EXAMPLES[command], "```"])

"""The model card of heads: target, text, what was measured, how to load them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import fullmatch
from typing import Any

from huggingface_hub import HfApi, snapshot_download

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.store import CONFIG_NAME, WEIGHTS_NAME, save_heads

CARD_NAME = "README.md"
DEMO = "demo"
"""What configs call the target in the package."""


def heads_card(heads: Sequence[ExitHead], target: str, repo_id: str | None = None) -> str:
    """A card in Markdown, with the front matter that the hub reads.

    Args:
        heads: the heads; what was measured of them stands in their `facts`.
        target: the checkpoint they were fitted to: a hub id, a folder, or `demo`.
        repo_id: where they can be loaded from.
    """
    source = repr(repo_id or "path/to/these/heads")
    given = "selfspec.DEMO_MODEL" if target == DEMO else repr(target)
    on_hub = fullmatch(r"[\w.-]+/[\w.-]+", target) is not None and not target.startswith(".")
    lines = [
        "---",
        "library_name: selfspec",
        *([f"base_model: {target}"] if on_hub else []),
        "tags: [speculative-decoding, self-speculation, early-exit]",
        "---",
        "",
        f"# Exit heads for {target}",
        "",
        "With these, the model drafts for itself from its first layers and checks the drafts with "
        "all of them: it writes the same text, sooner.",
        "",
        "```python",
        "import selfspec",
        "",
        f"spec = selfspec.SelfSpecModel.from_pretrained({given}, heads={source})",
        "out = spec.generate(**inputs, max_new_tokens=128)",
        "```",
        "",
        "| head | exit layer | parameters | vocabulary |",
        "|---|---|---|---|",
        *(_shape(head) for head in heads),
        *_text(heads),
        *_figures(heads),
    ]
    return "\n".join(lines) + "\n"


def _shape(head: ExitHead) -> str:
    size = sum(parameter.numel() for parameter in head.parameters())
    drafted = "all" if head.vocab_ids is None else f"{len(head.vocab_ids):,} tokens"
    return f"| `{head.kind}` | {head.exit_layer} | {size:,} | {drafted} |"


def _text(heads: Sequence[ExitHead]) -> Iterator[str]:
    told = [head.facts["data"] for head in heads if "data" in head.facts]
    if told:
        yield from ("", "## Fitted on", "", *(f"- {line}" for line in told[0]))


def _figures(heads: Sequence[ExitHead]) -> Iterator[str]:
    rows = [
        (domain, head, figures)
        for head in heads
        for domain, figures in head.facts.get("held_out", {}).items()
    ]
    if not rows:
        return
    yield from (
        "",
        "## On held-out text",
        "",
        "α is the mean of Σ min(p, q), first → last depth of a draft; tokens a round count the "
        "target's own.",
        "",
        "| text | head | exit | top-1 | α | tokens a round, greedy | at temperature 1 |",
        "|---|---|---|---|---|---|---|",
    )
    for domain, head, figures in rows:
        yield _row(domain, head, figures)


def _row(domain: str, head: ExitHead, figures: dict[str, Any]) -> str:
    lengths = figures.get("accepted_length", {})
    cells = [
        domain,
        f"`{head.kind}`",
        str(head.exit_layer),
        _ends(figures["agreement"]),
        _ends(figures["alpha"]),
        *(f"{lengths[mode]:.2f}" if mode in lengths else "–" for mode in ("greedy", "sampled")),
    ]
    return f"| {' | '.join(cells)} |"


def _ends(values: Sequence[float]) -> str:
    return " → ".join(f"{value:.2f}" for value in [*values[:1], *values[1:][-1:]])


# Heads on the Hugging Face hub.


def find_heads(folder_or_id: str | Path) -> Path:
    """The folder of heads: the one given, or what the hub has under that id.

    Raises:
        FileNotFoundError: there is no such folder, and the name is no hub id.
    """
    folder = Path(folder_or_id).expanduser()
    if folder.is_dir():
        return folder
    name = str(folder_or_id)
    if isinstance(folder_or_id, Path) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"no folder {folder_or_id}; give the folder of {CONFIG_NAME}, or a hub id user/name"
        )
    return Path(snapshot_download(name, allow_patterns=[CONFIG_NAME, WEIGHTS_NAME]))


def push_heads(
    heads: Sequence[ExitHead],
    decoder: Decoder,
    repo_id: str,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload heads and their card; the target itself is not uploaded.

    Returns:
        The address of the repository.

    Raises:
        ValueError: there are no heads.
    """
    if not heads:
        raise ValueError("there are no heads to push; fit some, or load them with heads=...")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_heads(heads, decoder, folder)
        target = decoder.causal_lm.config.name_or_path or type(decoder.causal_lm).__name__
        (folder / CARD_NAME).write_text(heads_card(heads, target, repo_id), encoding="utf-8")
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Exit heads")
    return str(address)

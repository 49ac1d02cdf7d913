"""Exit heads on the Hugging Face hub, with their model card."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import fullmatch

from huggingface_hub import HfApi, snapshot_download

from selfspec.config import JsonObject
from selfspec.decoder import Decoder
from selfspec.decoder.checkpoints import named_in_errors
from selfspec.heads.base import ExitHead
from selfspec.heads.formats.files import PUBLISHED_FILES
from selfspec.heads.store import HEADS_CONFIG, WEIGHTS_NAME, save_heads

CARD_NAME = "README.md"
DEMO = "demo"
"""The name of the demo target in configs."""


def find_heads(folder_or_id: str | Path) -> Path:
    """The folder of heads: the given one, or a download from the hub.

    Raises:
        FileNotFoundError: there is no such folder, and the name is a file, or not a hub id.
        OSError: the hub has nothing of this name, or cannot be reached.
    """
    folder = Path(folder_or_id).expanduser()
    if folder.is_dir():
        return folder
    name = str(folder_or_id)
    if folder.exists():
        raise FileNotFoundError(f"{folder} is a file; give the folder that it is in")
    if isinstance(folder_or_id, Path) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(
            f"no folder {folder_or_id}; give the folder of {HEADS_CONFIG}, or a hub id user/name"
        )
    with named_in_errors(name):
        own = Path(snapshot_download(name, allow_patterns=[HEADS_CONFIG, WEIGHTS_NAME]))
        if (own / HEADS_CONFIG).is_file():  # then the target's weights may lie beside them
            return own
        return Path(snapshot_download(name, allow_patterns=list(PUBLISHED_FILES)))


def push_heads(
    heads: Sequence[ExitHead],
    decoder: Decoder,
    repo_id: str,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload heads and their model card; the target is not uploaded.

    Returns:
        The address of the repository.

    Raises:
        ValueError: there are no heads.
    """
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_heads(heads, decoder, folder)
        target = decoder.causal_lm.config.name_or_path or type(decoder.causal_lm).__name__
        (folder / CARD_NAME).write_text(heads_card(heads, target, repo_id), encoding="utf-8")
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Exit heads")
    return str(address)


# The model card

_CARD = """\
---
library_name: selfspec
{base_model}tags: [speculative-decoding, self-speculation, early-exit]
---

# Exit heads for {target}

With these heads the model drafts tokens from its first layers and verifies them with all layers. \
Its output does not change; it is generated faster.

```python
import selfspec

spec = selfspec.SelfSpecModel.from_pretrained({loaded_from}, heads={heads_from})
out = spec.generate(**inputs, max_new_tokens=128)
```

| head | exit layer | parameters | vocabulary |
|---|---|---|---|
{shapes}
"""
_DATA = "\n## Training data\n\n{lines}\n"
_MEASURED = """
## Measured on held-out text

α is the mean of Σ min(p, q) at the first → last depth of a draft. Tokens a round include the one \
that the target adds.

| text | head | exit | top-1 | α | tokens a round, greedy | at temperature 1 |
|---|---|---|---|---|---|---|
{rows}
"""


def heads_card(heads: Sequence[ExitHead], target: str, repo_id: str | None = None) -> str:
    """A model card in Markdown, with the front matter that the hub reads.

    Args:
        heads: the heads; their training data and measurements are in their `facts`.
        target: the checkpoint they were fitted to: a hub id, a folder, or `demo`.
        repo_id: the repository to load them from.
    """
    on_hub = fullmatch(r"[\w.-]+/[\w.-]+", target) is not None and not target.startswith(".")
    card = _CARD.format(
        base_model=f"base_model: {target}\n" if on_hub else "",
        target=target,
        loaded_from="selfspec.DEMO_MODEL" if target == DEMO else repr(target),
        heads_from=repr(repo_id or "path/to/these/heads"),
        shapes="\n".join(_shape(head) for head in heads),
    )
    data = [head.facts["data"] for head in heads if "data" in head.facts]
    if data:
        card += _DATA.format(lines="\n".join(f"- {line}" for line in data[0]))
    rows = list(_measured(heads))
    return card + _MEASURED.format(rows="\n".join(rows)) if rows else card


def _shape(head: ExitHead) -> str:
    size = sum(parameter.numel() for parameter in head.parameters())
    vocabulary = "all" if head.vocab_ids is None else f"{len(head.vocab_ids):,} tokens"
    return f"| `{head.kind}` | {head.exit_layer} | {size:,} | {vocabulary} |"


def _measured(heads: Sequence[ExitHead]) -> Iterator[str]:
    for head in heads:
        for domain, figures in head.facts.get("held_out", {}).items():
            yield _row(domain, head, figures)


def _row(domain: str, head: ExitHead, figures: JsonObject) -> str:
    lengths = figures.get("accepted_length", {})
    cells = [
        domain,
        f"`{head.kind}`",
        str(head.exit_layer),
        _first_and_last(figures["agreement"]),
        _first_and_last(figures["alpha"]),
        *(f"{lengths[mode]:.2f}" if mode in lengths else "–" for mode in ("greedy", "sampled")),
    ]
    return f"| {' | '.join(cells)} |"


def _first_and_last(values: Sequence[float]) -> str:
    return " → ".join(f"{value:.2f}" for value in [*values[:1], *values[1:][-1:]])

"""A folder in the hub's format with which any transformers script speculates."""

from __future__ import annotations

import re
from pathlib import Path

import selfspec
from selfspec.export import hosted
from selfspec.export.draft_model import check_free, new_folder
from selfspec.heads import CARD_NAME, save_heads
from selfspec.model import SelfSpecModel

_FOLDER = "custom_generate"


def export_custom_generate(
    folder: str | Path,
    *,
    spec: SelfSpecModel | None = None,
    repo_id: str | None = None,
) -> None:
    """Write what `model.generate(custom_generate="...", trust_remote_code=True)` loads.

    Args:
        folder: made whole or not at all.
        spec: a target whose heads are copied beside; `None` copies none.
        repo_id: `user/name` the folder will be uploaded to, where its heads are then found;
            `None` takes them from `folder`.

    Raises:
        FileExistsError: `folder` is there already, with something in it.
    """
    place = None
    with new_folder(folder) as scratch:
        if spec is not None and spec.heads:
            save_heads(spec.heads, spec.engine.decoder, scratch)
            place = repo_id or str(check_free(folder))
        code = scratch / _FOLDER
        code.mkdir()
        (code / "generate.py").write_text(_source(place), encoding="utf-8")
        requirement = f"selfspec>={selfspec.__version__}\n"
        (code / "requirements.txt").write_text(requirement, encoding="utf-8")
        page = _page(repo_id or str(folder), place is not None)
        (scratch / CARD_NAME).write_text(page, encoding="utf-8")


def _source(heads: str | None) -> str:
    """The code of `hosted`, with these heads."""
    source = Path(hosted.__file__).read_text(encoding="utf-8")
    line = f"HEADS: str | None = {heads!r}"
    return re.sub(r"^HEADS: .*$", lambda match: line, source, count=1, flags=re.MULTILINE)


def _page(name: str, has_heads: bool) -> str:
    drafts = (
        "The exit heads in this folder draft; they fit the model that they were fitted to, and no "
        "other."
        if has_heads
        else "The model's own norm and LM head draft from an early layer, which suits checkpoints "
        'that were trained with early exits. Heads fitted to a model: `heads="folder or hub id"`.'
    )
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "tags: [custom_generate, speculative-decoding, early-exit]",
            "---",
            "",
            "# Self-speculative decoding",
            "",
            "The model drafts from its first layers and checks the drafts with all of them. Greedy "
            "text stays what it was, sampled text keeps its distribution. " + drafts,
            "",
            "```bash",
            "pip install selfspec",
            "```",
            "",
            "```python",
            "written = model.generate(",
            f'    **inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=64',
            ")",
            "```",
            "",
            "Options of `generate` keep their meaning. Two come on top: `heads` as above, and "
            '`draft`, a dict such as `{"exit_layer": 4, "num_draft_tokens": 6}`.',
            "",
        ]
    )

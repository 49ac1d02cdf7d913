"""A folder in the hub's format that adds self-speculative decoding to any transformers script."""

from __future__ import annotations

from pathlib import Path

import selfspec
from selfspec.apps.export import generate_template
from selfspec.apps.export.guides import check_free, guide, new_folder
from selfspec.heads import CARD_NAME, save_heads
from selfspec.model import SelfSpecModel

_WITH_HEADS = "This folder has exit heads; they fit only the model that they were trained for."
_WITHOUT_HEADS = (
    "Drafts come from the model's own norm and LM head at an early layer. This suits checkpoints "
    "that were trained with early exits."
)


def export_custom_generate(
    folder: str | Path,
    *,
    spec: SelfSpecModel | None = None,
    repo_id: str | None = None,
) -> None:
    """Write the folder that `model.generate(custom_generate=..., trust_remote_code=True)` loads.

    Args:
        folder: created as a whole, or not at all if there is an error.
        spec: a target whose heads are copied into the folder; `None` copies none.
        repo_id: `user/name` that the folder will be uploaded to; the heads are then loaded from
            there. `None` loads them from `folder`.

    Raises:
        FileExistsError: `folder` exists and is not empty.
    """
    heads = None
    with new_folder(folder) as scratch:
        if spec is not None and spec.heads:
            save_heads(spec.heads, spec.decoder, scratch)
            heads = repo_id or str(check_free(folder))
        code = scratch / "custom_generate"
        code.mkdir()
        source = Path(generate_template.__file__).read_text(encoding="utf-8")
        source = source.replace("HEADS: str | None = None", f"HEADS: str | None = {heads!r}")
        (code / "generate.py").write_text(source, encoding="utf-8")
        (code / "requirements.txt").write_text(f"selfspec>={selfspec.__version__}\n")
        told = _WITHOUT_HEADS if heads is None else _WITH_HEADS
        card = guide("custom_generate", folder=repo_id or str(folder), heads=told)
        (scratch / CARD_NAME).write_text(card, encoding="utf-8")

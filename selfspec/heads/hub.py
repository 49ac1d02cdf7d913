"""Heads on the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.card import CARD_NAME, heads_card
from selfspec.heads.store import CONFIG_NAME, WEIGHTS_NAME, save_heads


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

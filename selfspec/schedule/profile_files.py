"""Where profiles lie: beside a target's heads or weights, or among the user's caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from selfspec.decoder import Decoder
from selfspec.schedule.profile import PROFILE_NAME, Place

_PACKAGE = Path(__file__).parents[1]


def default_path(decoder: Decoder, folder: str | Path | None) -> Path:
    """Where the profile of a target goes: beside its files, or else among the user's caches.

    Args:
        decoder: the target.
        folder: of its heads or its weights, if it has one.
    """
    if folder is not None and Path(folder).is_dir() and _takes_files(Path(folder)):
        return Path(folder) / PROFILE_NAME
    return _cached(decoder)


def find_profile(decoder: Decoder, folders: Sequence[str | Path]) -> Path | None:
    """The profile beside the heads or the weights, or among the user's caches, if there is one."""
    beside = [Path(folder) / PROFILE_NAME for folder in folders]
    found = [path for path in beside if path.is_file()]
    if found or not _cache().is_dir():
        return found[0] if found else None
    path = _cached(decoder)
    return path if path.is_file() else None


def _takes_files(folder: Path) -> bool:
    """Whether files of the user's belong there: the package's own folders are not the user's."""
    return os.access(folder, os.W_OK) and _PACKAGE not in folder.resolve().parents


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "selfspec" / "profiles"


def _cached(decoder: Decoder) -> Path:
    return _cache() / f"{decoder.config.model_type}-{Place.of(decoder).digest}.json"

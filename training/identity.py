"""What a run or a cache on disk was made of, and whether it is what is asked for now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from selfspec.decoder import Decoder
from selfspec.heads.store import fingerprint, replacing


def target_facts(decoder: Decoder) -> dict[str, Any]:
    """The target: its shape, its dtype, and one hash for all samples of its weights."""
    facts = fingerprint(decoder)
    dtype = str(decoder.dtype).removeprefix("torch.")
    return {**facts, "weights": digest(facts["weights"]), "dtype": dtype}


def digest(data: Any) -> str:
    """SHA-256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def changes(saved: Mapping[str, Any], given: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """The facts that differ, by name, with both values where they are short."""
    for key in sorted(saved.keys() | given.keys()):
        before, after = saved.get(key), given.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changes(before, after, f"{within}{key}.")
        elif before != after:
            values = f" ({before!r} there, {after!r} here)"
            yield f"{within}{key}" + values * (len(values) < 80)


def read_facts(path: Path) -> dict[str, Any] | None:
    """A JSON object on disk, or `None` where there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(f"it holds a {type(facts).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON object ({error}); delete {path.parent} to start afresh"
        ) from None
    return facts


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

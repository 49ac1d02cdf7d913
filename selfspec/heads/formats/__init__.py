"""Heads that others have published, in the formats in which they are found.

One module reads one format: it says whether a folder is of that format, and makes heads of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from selfspec.decoder import Decoder
from selfspec.heads.base import ExitHead
from selfspec.heads.formats import eagle, medusa, speculators
from selfspec.heads.formats.files import PublishedHead, read_folder

# Asked in this order.
_READERS: tuple[tuple[Callable[[PublishedHead], bool], Callable[..., ExitHead]], ...] = (
    (speculators.matches, speculators.read),
    (medusa.matches, medusa.read),
    (eagle.matches, eagle.read),
)


def load_published(decoder: Decoder, folder: Path) -> ExitHead:
    """The head in a folder of a format of EAGLE, speculators or Medusa.

    Raises:
        FileNotFoundError: there is no config, or no safetensors file.
        ValueError: the format is unknown, a file is damaged, or the head does not fit the target.
    """
    published = read_folder(folder)
    for matches, read in _READERS:
        if matches(published):
            head = read(decoder, published)
            head.check(decoder)
            return head.eval().requires_grad_(False)
    raise ValueError(
        f"{folder} holds no head of a known format: its config names "
        f"{published.config.get('architectures')}; selfspec reads heads of its own, EAGLE, "
        "EAGLE-3, speculators (eagle3) and Medusa"
    )


__all__ = ["load_published"]

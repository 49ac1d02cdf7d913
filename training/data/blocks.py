"""Documents packed into blocks of equal length, with no leak from one document to the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .chats import Document


@dataclass
class Batch:
    """Packed blocks.

    Attributes:
        tokens: `[rows, block]` token ids.
        documents: `[rows, block]` document number of each token.
        trained: `[rows, block]` whether the token is a training target.
    """

    tokens: Tensor
    documents: Tensor
    trained: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(getattr(self, f.name).to(device) for f in fields(self)))

    @property
    def positions(self) -> Tensor:
        """`[rows, block]` position of each token in its document within the block."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        starts = torch.ones_like(self.documents, dtype=torch.bool)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return places - (places * starts).cummax(-1).values

    @property
    def visible(self) -> Tensor:
        """`[rows, block, block]`: the earlier tokens of the same document, and the token itself."""
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return same.tril()

    @property
    def targets(self) -> Tensor:
        """`[rows, block]` the next token if it is a training target, else -100."""
        following = self.tokens.roll(-1, dims=1)
        known = self.trained.roll(-1, 1) & (self.documents.roll(-1, 1) == self.documents)
        known[:, -1] = False
        return following.masked_fill(~known, -100)


@dataclass
class Blocks:
    """Concatenated documents, cut into blocks.

    Attributes:
        tokens: `[length]` token ids.
        documents: `[length]` document numbers.
        trained: `[length]` whether the token is a training target.
        block_size: tokens per block.
    """

    tokens: Tensor
    documents: Tensor
    trained: Tensor
    block_size: int

    def __len__(self) -> int:
        """Number of whole blocks."""
        return len(self.tokens) // self.block_size

    def __getitem__(self, index: int) -> Batch:
        """A block, as a batch of one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        cut = slice(index * self.block_size, (index + 1) * self.block_size)
        return Batch(
            self.tokens[None, cut].long(), self.documents[None, cut], self.trained[None, cut]
        )

    def split(self, count: int) -> tuple[Blocks, Blocks]:
        """The first blocks and the last `count`."""
        place = (len(self) - count) * self.block_size
        return self._cut(slice(place)), self._cut(slice(place, None))

    def _cut(self, part: slice) -> Blocks:
        return Blocks(self.tokens[part], self.documents[part], self.trained[part], self.block_size)


def pack(documents: Iterable[Document], block_size: int, source: str) -> Blocks:
    """Concatenate documents; a rest shorter than a block is dropped.

    Raises:
        ValueError: there is less than one block, or no training target.
    """
    tokens: list[Tensor] = []
    numbers: list[Tensor] = []
    trained: list[Tensor] = []
    for number, document in enumerate(documents):
        tokens.append(torch.tensor(document.tokens, dtype=torch.int32))
        numbers.append(torch.full((len(document.tokens),), number, dtype=torch.int32))
        trained.append(torch.tensor(document.trained, dtype=torch.bool))
    length = sum(len(part) for part in tokens)
    if length < block_size:
        raise ValueError(
            f"{source} holds {length} tokens in {len(tokens)} documents, less than one block of "
            f"{block_size}; give more text or a smaller block_size"
        )
    learned = torch.cat(trained)
    if not learned.any():
        raise ValueError(f"nothing in {source} is to be learned: it has no assistant's replies")
    return Blocks(torch.cat(tokens), torch.cat(numbers), learned, block_size)


def collate(blocks: Sequence[Batch]) -> Batch:
    """Blocks as one batch."""
    return Batch(
        torch.cat([block.tokens for block in blocks]),
        torch.cat([block.documents for block in blocks]),
        torch.cat([block.trained for block in blocks]),
    )

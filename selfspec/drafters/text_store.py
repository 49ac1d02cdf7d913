"""A store of texts that were written before, in which lookups find what may come next."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import groupby
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from selfspec.heads.files import read_tensors, replacing

MOST = 2**18  # tokens of a store, unless a number is given
SIZES = (2, 4, 8, 16, 32)  # tokens of the matches that can be found
BEGINNING = SIZES[-1]  # tokens of a prompt that are kept, so that its answer's first are found
# A draft ends where the probability of its path falls below it, as in SuffixDecoding (Oliaro et
# al. 2024) and vLLM's `suffix` method.
_LEAST_PROBABILITY = 0.1
_END = -1  # stands behind every text; no match and no draft goes across
_LARGEST = torch.iinfo(torch.int32).max


def token_ids(text: Any) -> list[int]:
    """A text's token ids, `[n]` or `[1, n]`, as integers; TypeError if it is something else."""
    try:
        ids = list(text.tolist() if hasattr(text, "tolist") else text)
        only = ids[0] if len(ids) == 1 and isinstance(ids[0], Sequence) else ids
        return list(map(index, only))
    except TypeError:
        raise TypeError(
            f"a text is one list of token ids, got {text!r:.60}; for a string pass "
            'tokenizer(string)["input_ids"], and several texts one by one'
        ) from None


class Occurrences(NamedTuple):
    """Where the end of a sequence occurs in a store.

    Attributes:
        length: tokens of the match.
        ends: positions after the match, the latest first.
    """

    length: int
    ends: list[int]


class RingBuffer:
    """The latest tokens of a sequence that only grows.

    Args:
        size: the most tokens that are kept.

    Attributes:
        written: tokens ever written; the position of the next one.
    """

    def __init__(self, size: int):
        self.written = 0
        self._size, self._tokens = size, array("i", bytes(4 * size))

    @property
    def start(self) -> int:
        """Position of the oldest token that is kept."""
        return max(0, self.written - self._size)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return len(self._tokens) * self._tokens.itemsize

    def append(self, token: int) -> None:
        """Write a token over the oldest one."""
        self._tokens[self.written % self._size] = token
        self.written += 1

    def slice(self, start: int, stop: int) -> array[int]:
        """The tokens at positions from `start` to `stop` that have not been overwritten."""
        stop = min(stop, self.written)
        start = max(start, self.start)
        if start >= stop:
            return array("i")
        first, last = start % self._size, (stop - 1) % self._size + 1
        if first < last:
            return self._tokens[first:last]
        return self._tokens[first:] + self._tokens[:last]


class TextStore:
    """The latest `max_tokens` tokens of texts, in memory that does not grow.

    A text is a list of token ids. Lookups of every call read the store of their `SelfSpecModel`
    where the call's own sequence has no match as long; each finished row is added. The oldest
    tokens make room for new ones. Drafts never change an output, but they change its time: give
    texts of different users one store only if a user may learn from the time of an answer whether
    another one's text was similar.

    The tokens are in a ring buffer. As in LZ77 compressors, a table gives for each hash of an
    n-gram its latest end, and each end gives the one before it. So adding a token and a lookup
    take a time that does not depend on the number of tokens. One store may be used by several
    models of one tokenizer, and by several threads.

    Args:
        max_tokens: the most tokens that are kept; each takes 84 bytes, reserved from the start.

    Raises:
        TypeError: `max_tokens` is not an integer.
        ValueError: `max_tokens` is not positive.
    """

    def __init__(self, max_tokens: int = MOST):
        if not isinstance(max_tokens, int):
            raise TypeError(f"max_tokens is an integer, such as 100_000, got {max_tokens!r:.60}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.max_tokens = max_tokens
        self._lock = threading.Lock()  # held while tokens are added
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        size = self.max_tokens
        with self._lock:
            self._largest = _END
            self._ring = RingBuffer(size)
            # By size of the n-gram: the latest end of each hash, and the end before each end.
            self._latest = {n: array("q", bytes(8 * size)) for n in SIZES}
            self._before = {n: array("q", bytes(8 * size)) for n in SIZES}

    def __getstate__(self) -> dict[str, object]:
        """A copy of everything but the lock."""
        with self._lock:
            return deepcopy({name: part for name, part in vars(self).items() if name != "_lock"})

    def __setstate__(self, state: dict[str, object]) -> None:
        """Take a copied or unpickled state."""
        vars(self).update(state)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of tokens, with one between two texts."""
        return self._ring.written - self._ring.start

    @property
    def nbytes(self) -> int:
        """Memory in bytes; it is the same from the beginning."""
        tables = [*self._latest.values(), *self._before.values()]
        return self._ring.nbytes + sum(len(table) * table.itemsize for table in tables)

    def add(self, text: Sequence[int]) -> None:
        """Add a text.

        Raises:
            TypeError: it is no list of integers.
            ValueError: a token id is negative or does not fit into 32 bits.
        """
        text = token_ids(text)[-self.max_tokens :]
        if not text:
            return
        if min(text) < 0 or max(text) > _LARGEST:
            wrong = next(token for token in text if not 0 <= token <= _LARGEST)
            raise ValueError(f"a text is a list of token ids, got {wrong}; ids are 0 or more")
        with self._lock:
            self._largest = max(self._largest, *text)
            for count, token in enumerate(text, 1):
                self._ring.append(token)
                self._index(text, count)
            self._ring.append(_END)

    def _index(self, text: list[int], count: int) -> None:
        """Index the n-grams at the end of `text[:count]`, which have just been written."""
        end, size = self._ring.written, self.max_tokens
        for n in SIZES:
            if n > count:
                return
            latest, bucket = self._latest[n], hash(tuple(text[count - n : count])) % size
            self._before[n][end % size] = latest[bucket]
            latest[bucket] = end

    def find(self, sequence: list[int], shortest: int) -> Occurrences | None:
        """The occurrences of the longest end of `sequence` that has at least `shortest` tokens."""
        for n in reversed(SIZES):
            if shortest <= n <= len(sequence):
                ends = self._ends(sequence[-n:])
                if ends:
                    return Occurrences(n, ends)
        return None

    def _ends(self, ngram: list[int]) -> list[int]:
        """The latest 16 ends of an n-gram, the latest first."""
        n, size = len(ngram), self.max_tokens
        wanted, before = array("i", ngram), self._before[n]
        end, ends = self._latest[n][hash(tuple(ngram)) % size], []
        for _ in range(16):
            if not end or end - n < self._ring.start:  # none, or overwritten
                break
            if self._ring.slice(end - n, end) == wanted:
                ends.append(end)
            end = before[end % size]
        return ends

    def continuation(self, found: Occurrences, length: int) -> list[int]:
        """The path that most often followed a match, of at most `length` tokens.

        At each token the occurrences vote, and those that voted otherwise leave; of two equal
        votes the later text's counts. The path is no longer than the match, and it ends where its
        probability, the product of the fractions of votes, becomes small (Oliaro et al. 2024).
        """
        length = min(length, found.length)
        # Equal paths vote as one. Votes are counted in the order of the paths, the latest first.
        paths = Counter(self._followed(end, length) for end in found.ends)
        draft: list[int] = []
        everybody = len(found.ends)
        while len(draft) < length:
            depth = len(draft)
            votes: dict[int, int] = {}
            for path, count in paths.items():
                votes[path[depth]] = votes.get(path[depth], 0) + count
            token = max(votes, key=votes.__getitem__)
            if token == _END or votes[token] < _LEAST_PROBABILITY * everybody:
                break
            draft.append(token)
            paths = {path: n for path, n in paths.items() if path[depth] == token}
        return draft

    def _followed(self, end: int, length: int) -> tuple[int, ...]:
        """`length` tokens from position `end` on; -1 behind the end of the text."""
        if end < self._ring.start:
            return (_END,) * length
        path = self._ring.slice(end, end + length).tolist()
        real = path.index(_END) if _END in path else len(path)
        return (*path[:real], *[_END] * (length - real))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a text has a token that a model of `vocab_size` tokens lacks."""
        if self._largest >= vocab_size:
            with self._lock:  # the text may have been overwritten since
                self._largest = max(self._ring.slice(0, self._ring.written), default=_END)
        if self._largest >= vocab_size:
            raise ValueError(
                f"the store has texts with token id {self._largest}, and the model has "
                f"{vocab_size} tokens; use a store of texts of the model's own tokenizer"
            )

    def save(self, path: str | Path) -> None:
        """Write the texts to a safetensors file, atomically, and make its folder if needed."""
        with self._lock:
            tokens = self._ring.slice(0, self._ring.written).tolist()
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as scratch:
            save_file({"tokens": torch.tensor(tokens, dtype=torch.int32, device="cpu")}, scratch)

    @classmethod
    def load(cls, path: str | Path, max_tokens: int | None = None) -> TextStore:
        """Read a file that `save` wrote.

        Args:
            path: the file.
            max_tokens: the most tokens that are kept; `None` for as many as the file holds, but at
                least as many as a new store.

        Raises:
            OSError: there is no file.
            ValueError: it is damaged, or not of this kind.
        """
        tokens = read_tensors(Path(path).expanduser()).get("tokens")
        if (
            tokens is None
            or (tokens.dtype, tokens.dim()) != (torch.int32, 1)
            or bool((tokens < _END).any())
        ):
            raise ValueError(
                f"{path} is not a saved TextStore; it needs int32 `tokens`, in one row, and -1 "
                "behind each text"
            )
        store = cls(max(MOST, len(tokens)) if max_tokens is None else max_tokens)
        for ended, text in groupby(tokens.tolist(), lambda token: token == _END):
            if not ended:
                store.add([*text])
        return store

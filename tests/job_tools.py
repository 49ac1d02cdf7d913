"""What answers prompts in the processes of a job; imported there, so it imports nothing slow."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shouter:
    """Answers in capitals, notes every answer, and dies once at the prompt `dies_at`."""

    folder: Path
    dies_at: str | None = None
    always: bool = False
    refuses: str | None = None

    def __call__(self, worker: int, workers: int):
        def answers(rows: Mapping[int, str]) -> Iterator[tuple[int, dict]]:
            # In any order: a batch hands out what is finished.
            for row, prompt in sorted(rows.items(), key=lambda item: item[0] // 3 * 6 - item[0]):
                yield row, answer(prompt)

        def answer(prompt: str) -> dict:
            if prompt == self.refuses:
                raise ValueError(f"{prompt} is no prompt")
            flag = self.folder / "died"
            if self.always or (prompt == self.dies_at and not flag.exists()):
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with (self.folder / "asked").open("a") as asked:
                asked.write(f"{prompt}\n")
            return {"prompt": prompt, "text": prompt.upper(), "worker": worker}

        return answers

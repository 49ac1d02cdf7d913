"""What answers prompts in the processes of a job; imported there, so it imports nothing slow."""

from __future__ import annotations

import os
import signal
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

        return answer

"""What processes that share one model write: run by torchrun, and by tests in one process.

torchrun --nproc-per-node 2 tests/rank_tools.py FOLDER
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from selfspec import DEMO_MODEL, SelfSpecModel

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
# What is drafted, and so what is drawn, depends on the clock.
TIMED: dict[str, dict[str, Any]] = {
    "optimal": {"schedule": "optimal"},
    "auto": {"drafter": "auto"},
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2], [31, 41, 59, 26, 53, 58])


def load(folder: str | Path, processes: int) -> SelfSpecModel:
    """A target and its heads, in shards where there are several processes."""
    options: dict[str, Any] = {}
    if processes > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=processes)
    return SelfSpecModel.from_pretrained(folder, dtype=torch.float32, **options)


def write(spec: SelfSpecModel, draft: dict[str, Any], seed: int, **options: Any) -> dict[str, Any]:
    """What a call writes, and how it went."""
    width = max(map(len, PROMPTS))
    rows = [[0] * (width - len(row)) + row for row in PROMPTS]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS]
    torch.manual_seed(seed)
    written = spec.generate(
        torch.tensor(rows), attention_mask=torch.tensor(mask), draft=draft, **options
    )
    stats = spec.last_stats
    assert stats is not None
    return {"tokens": written.tolist(), "rounds": stats.rounds, "drafted": stats.drafted}


def cases(spec: SelfSpecModel) -> dict[str, dict[str, Any]]:
    """Ways to draft that write the same in one process as in two."""
    heads = {head.kind: {"exit_layer": head.exit_layer, "head": head.kind} for head in spec.heads}
    shared = {"exit_layer": spec.decoder.depth // 2, "head": "shared"}
    return {"shared": shared, **heads, "tree": {"drafter": "tree"}}


def write_all(folder: str | Path, rank: int = 0, processes: int = 1) -> dict[str, Any]:
    """What one of the processes writes, by case; each has another seed."""
    spec = load(folder, processes)
    found: dict[str, Any] = {}
    for name, draft in {**cases(spec), **TIMED}.items():
        for way, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
            found[f"{name} {way}"] = write(spec, draft, rank, max_new_tokens=12, **options)
    found["late"] = write(spec, {}, rank, max_new_tokens=100, max_time=0.05, **GREEDY)
    if processes > 1:
        found["other prompts"] = refused(spec, rank)
    return found


def refused(spec: SelfSpecModel, rank: int) -> str:
    """What is said where every process has another prompt."""
    try:
        spec.generate(torch.tensor([[1, 2, 3 + rank]]), max_new_tokens=4)
    except ValueError as error:
        return str(error)
    return ""


def disturb() -> None:
    """Give this process clocks that run wild."""
    for name in ("perf_counter", "time"):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock: clock() + random.uniform(0, 10))


def main() -> None:
    """Write all that the process `RANK` of `WORLD_SIZE` writes, to a file of its own."""
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if rank:
        disturb()
    folder = Path(sys.argv[1])
    found = {
        name: write_all(source, rank, processes)
        for name, source in (("demo", DEMO_MODEL), ("tiny", folder / "tiny"))
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

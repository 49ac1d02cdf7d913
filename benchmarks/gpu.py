"""First measurements on a GPU in one command: `python -m benchmarks.gpu`, or `make gpu`.

The stages: facts about the machine, the tests that need a GPU, exactness of drafters and kernels,
how often a round waits for the device, published sizes beside the compiled `generate`, and a
timeline of one round, which browsers show at ui.perfetto.dev. Each stage writes one file; a run
that was stopped continues with the next stage. With a tiny shape, the same stages run on a CPU.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from benchmarks.common import console, parser
from benchmarks.stages import Found, Stage, run_stages
from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel, __version__
from selfspec.apps.bench.config import BenchConfig
from selfspec.apps.bench.exactness import Sampling, check_exactness
from selfspec.apps.bench.planted import GreedyTexts, generate_planted
from selfspec.apps.bench.prompts import cut_prompts
from selfspec.apps.bench.results import LIMIT, Grid, Report, number, summarise
from selfspec.apps.bench.run import RunFile, reason
from selfspec.apps.bench.shapes import (
    ShapeBench,
    default_methods,
    random_prompts,
    read_bandwidth,
    read_shape,
)
from selfspec.config import Kernels
from selfspec.generation.streaming import RoundStreamer
from selfspec.heads.files import one_run
from selfspec.schedule.profile import device_name
from selfspec.schedule.stats import Round

_TESTS = Path(__file__).parents[1] / "tests"
_TIMES = ("self_cpu_time_total", "self_device_time_total")  # of the profiler, in µs
_PLANTED = 0.7  # acceptance of the shapes' drafts
# Drafters on the demo target, whose heads are in the package.
_DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "fused 0": {"exit_layer": 0, "head": "fused"},
    "block 4": {"exit_layer": 4, "head": "block"},
    "lens 4": {"exit_layer": 4, "head": "lens"},
    "lora 4": {"exit_layer": 4, "head": "lora"},
    "shared 8": {"exit_layer": 8, "head": "shared"},
    "eagle3": {"exit_layer": 0, "head": "eagle3"},
    "optimal": {"exit_layer": 0, "head": "fused", "schedule": "optimal"},
    "tree": {"drafter": "tree", "exit_layer": 0, "head": "fused"},
    "skip_sublayers": {"drafter": "skip_sublayers"},
    "prompt_lookup": {"drafter": "prompt_lookup"},
    "cascade": {"drafter": "cascade"},
    "lookahead": {"drafter": "lookahead"},
    "two_model": {"drafter": "two_model", "draft_model": str(DEMO_MODEL)},  # itself
    "auto": {"drafter": "auto"},
}


@dataclass(frozen=True)
class Setup:
    """The device, the names of the shapes, and the folder of the results."""

    device: torch.device
    shapes: tuple[str, ...]
    output: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU; on a CPU the run only tries the command."""
        return self.device.type == "cuda"

    @property
    def kernels(self) -> tuple[Kernels, ...]:
        """The kernels that run on the device."""
        return ("direct", "compiled", "graphs") if self.on_gpu else ("direct",)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that results depend on; a folder holds results of one such setting."""
        return {
            "device": device_name(self.device),
            "shapes": list(self.shapes),
            "torch": str(torch.__version__),
            "selfspec": __version__,
        }


# The machine


def environment(setup: Setup) -> Found:
    """Versions, the device, and its bandwidth."""
    facts: dict[str, Any] = {
        **setup.identity,
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "bandwidth GB/s": round(read_bandwidth(setup.device) / 1e9, 1),
    }
    if setup.on_gpu:
        device = torch.cuda.get_device_properties(setup.device)
        facts |= {
            "properties": str(device),  # memory, multiprocessors, compute capability
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "TF32 in matrix products": torch.backends.cuda.matmul.allow_tf32,
            "triton": importlib.util.find_spec("triton") is not None,
        }
    return Found(facts)


def device_tests(setup: Setup) -> Found:
    """The tests that need a device; they are skipped on a CPU."""
    if not _TESTS.is_dir() or importlib.util.find_spec("pytest") is None:
        return Found({"left out": "there is no checkout with tests, or no pytest"})
    files = [str(path) for path in _TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
    done = subprocess.run(command, cwd=_TESTS.parent, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    facts: dict[str, Any] = {"result": lines[-1] if lines else done.stderr.strip()[-500:]}
    if done.returncode:
        facts["output"] = done.stdout[-4000:]
    return Found(facts, passed=done.returncode == 0)


# Exactness


def exactness(setup: Setup) -> Found:
    """Greedy outputs of every drafter and kernel against `generate`, and their distribution."""
    columns = ["draft", "kernels", "dtype", "equal", "largest margin", "least p", "fell back"]
    rows, passed, prompts = [], True, _passages(setup)
    for kernels, dtype in product(setup.kernels, ("float32", "bfloat16")):
        spec = _demo(setup, dtype, kernels)
        for name, draft in _DRAFTS.items():
            try:
                cells, good = _exact(setup, spec, DraftConfig.of(draft), prompts)
            except Exception as error:  # the other drafters still run
                cells, good = [f"failed: {reason(error)}", "", "", ""], False
            rows.append([name, kernels, dtype, *cells])
            passed &= good
    return Found(grids=[Grid("exactness", columns, rows)], passed=passed)


def _exact(
    setup: Setup, spec: SelfSpecModel, draft: DraftConfig, prompts: list[Tensor]
) -> tuple[list[str], bool]:
    """The last cells of a row, and whether the check passed."""
    decoder = spec.decoder
    sampled = decoder.kernels == "direct" and decoder.dtype == torch.float32 and setup.on_gpu
    sampling = Sampling(samples=256) if sampled else None
    found = check_exactness(spec, draft, prompts, 48 if setup.on_gpu else 8, sampling)
    margins = [apart.margin for apart in found.divergences.values() if apart.margin is not None]
    cells = [
        f"{found.texts - len(found.divergences)}/{found.texts}",
        number(max(margins, default=None), 3),
        number(min(found.p_values, default=None), 3),
        _fell_back(spec) or "–",
    ]
    return cells, found.passed


def _demo(setup: Setup, dtype: str, kernels: Kernels) -> SelfSpecModel:
    place: Any = {"device_map": str(setup.device)} if setup.on_gpu else {}
    return SelfSpecModel.from_pretrained(DEMO_MODEL, dtype=dtype, kernels=kernels, **place)


def _passages(setup: Setup) -> list[Tensor]:
    """Prompts `[1, width]` from the package."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompts = cut_prompts(tokenizer, (), 48, 2 if setup.on_gpu else 1)
    return [prompt[None].to(setup.device) for prompt in prompts]


def _fell_back(spec: SelfSpecModel) -> str | None:
    """Why layers run eagerly although other kernels were chosen."""
    gates = spec.decoder.gates
    kernels = (gates.graphs, gates.compiled)
    return next((kernel.problem for kernel in kernels if kernel and kernel.problem), None)


# Waits


class _HostReads(TorchDispatchMode):
    """Counts the operations that would wait for a device, on a CPU."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        by_number = func is torch.ops.aten.index.Tensor and not any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if reads and not by_number:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_waits(call: Callable[[], object], device: torch.device) -> Counter[str]:
    """Where a call waits for the device: how often, by line of code (on a CPU, by operation).

    On CUDA, every synchronizing operation is counted; on a CPU only operations that need values on
    the host: `tolist` and copies are not seen.
    """
    if device.type != "cuda":
        with _HostReads() as reads:
            call()
        return reads.counts
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [found for found in seen if "synchronizing CUDA operation" in str(found.message)]
    return Counter(f"{Path(found.filename).name}:{found.lineno}" for found in waits)


def waits(setup: Setup) -> Found:
    """Waits per round: the difference between a long and a short call, over the rounds between."""
    rows, prompt = [], _passages(setup)[0]
    for kernels in setup.kernels:
        spec = _demo(setup, "float32", kernels)
        for (name, draft), mode in product(_DRAFTS.items(), ("greedy", "sampled")):
            try:
                cells = _waits_a_round(spec, prompt, draft, mode == "sampled")
            except Exception as error:  # the other drafters still run
                cells = [f"failed: {reason(error)}", ""]
            rows.append([name, kernels, mode, *cells])
    columns = ["draft", "kernels", "mode", "waits a round", "where"]
    return Found(grids=[Grid("waits for the device", columns, rows)])


def _waits_a_round(
    spec: SelfSpecModel, prompt: Tensor, draft: dict[str, Any], sampled: bool
) -> list[str]:
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "draft": draft}
    options |= {"do_sample": sampled, "pad_token_id": 0}

    def counted(tokens: int) -> tuple[Counter[str], int]:
        run = partial(spec.generate, prompt, max_new_tokens=tokens, **options)
        counts = count_waits(run, prompt.device)
        return counts, spec.last_stats.rounds if spec.last_stats else 0

    counted(8)  # a warm-up
    (few, few_rounds), (more, rounds) = counted(8), counted(40)
    more.subtract(few)
    each = max(1, rounds - few_rounds)
    places = [f"{place} {count / each:.1f}" for place, count in more.most_common(6) if count > 0]
    return [number(max(0, more.total()) / each, 1), ", ".join(places) or "–"]


# Real sizes


def shape_config(setup: Setup, shape: str, kernels: Kernels) -> BenchConfig:
    """The benchmark of one shape with one kind of kernels: few lengths, one acceptance rate."""
    depth = read_shape(shape).get_text_config(decoder=True).num_hidden_layers
    lengths, rows, tokens = ((128, 2048), (1, 8), 64) if setup.on_gpu else ((32,), (1, 2), 12)
    # Methods of transformers do not use selfspec's kernels, so they run once.
    methods = [
        method
        for method in default_methods(depth, (_PLANTED,))
        if method.peer is None or (kernels == "direct" and method.peer == "static_cache")
    ]
    return BenchConfig(
        shape=shape,
        kernels=kernels,
        device=str(setup.device),
        acceptance=(_PLANTED,),
        methods=tuple(methods),
        prompts=random_prompts(lengths),
        batch_sizes=rows,
        max_new_tokens=tokens,
    )


def measure_shape(shape: str, kernels: Kernels, setup: Setup) -> Found:
    """Run the benchmark of a shape; its own folder has every call and all tables."""
    bench = ShapeBench(shape_config(setup, shape, kernels))
    folder = setup.output / f"{shape}_{kernels}"
    file = RunFile(folder, {"config": bench.config.model_dump(mode="json"), **setup.identity})
    bench.run(file)
    report = Report({**bench.facts, **bench.measured}, summarise(bench, file))
    report.write(folder)
    failures = {f"failed {place}": why for place, why in enumerate(report.failures, 1)}
    facts = {**report.head, "fell back": _fell_back(bench.spec) or "no", **failures}
    grids = [grid for grid in report.grids if grid.title.endswith(("speed", LIMIT))]
    return Found(facts, grids, passed=not report.failed and not failures)


# A timeline of one round


class _OneRound(RoundStreamer):
    """Profiles the round after `skip` others, of which the first is the prefill."""

    def __init__(self, device: torch.device, skip: int):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self._device, self._left = device, skip

    def put(self, value: Tensor) -> None: ...

    def put_round(self, steps: Sequence[Round]) -> None:
        self._left -= 1
        if self._left == 0:
            self.profiler.start()
        elif self._left == -1:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.profiler.stop()

    def end(self) -> None: ...


def profile_round(setup: Setup) -> Found:
    """A timeline of one round of early exit with each kind of kernels."""
    shape, facts, rows = setup.shapes[0], {}, []
    for kernels in setup.kernels:
        profiler = _profiled(setup, shape, kernels)
        facts[f"timeline, {kernels}"] = name = f"round_{kernels}.trace.json"
        profiler.export_chrome_trace(str(setup.output / name))
        spans = [event.time_range for event in profiler.events() or [] if event.time_range]
        seconds = max(span.end for span in spans) - min(span.start for span in spans)
        parts = profiler.key_averages()
        times = [seconds, *(sum(getattr(part, name) for part in parts) for name in _TIMES)]
        count = sum(part.count for part in parts)
        rows.append([kernels, *(f"{time / 1000:.2f}" for time in times), str(count)])
    columns = ["kernels", "ms", "on the host", "on the device", "operations"]
    title = f"one round of {shape}, early exit, fused 0"
    return Found(facts, [Grid(title, columns, rows)])


def _profiled(setup: Setup, shape: str, kernels: Kernels) -> torch.profiler.profile:
    config = shape_config(setup, shape, kernels)
    wanted = next(m for m in config.methods if m.draft and m.draft.head == "fused")
    bench = ShapeBench(config.model_copy(update={"methods": (config.methods[0], wanted)}))
    batch = next(iter(bench.batches.values()))[0]
    options = bench.options(bench.config.modes[0])
    text = GreedyTexts(bench.spec, bench.config.max_new_tokens)(batch, options)
    assert wanted.draft is not None
    run = partial(generate_planted, bench.spec, wanted.draft, batch, text, _PLANTED, 0, **options)
    run()  # kernels are compiled and recorded
    streamer = _OneRound(setup.device, skip=3)
    run(streamer=streamer)
    return streamer.profiler


# Stage by stage


def stages_of(setup: Setup) -> dict[str, Stage]:
    """All stages in order, by the names of their files."""
    sizes = {
        f"{shape}_{kernels}": partial(measure_shape, shape, kernels)
        for shape in setup.shapes
        for kernels in setup.kernels
    }
    first = {"environment": environment, "tests": device_tests}
    stages = {**first, "exactness": exactness, "waits": waits, **sizes, "profile": profile_round}
    return {name: partial(stage, setup) for name, stage in stages.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    made = parser(__doc__, target=False)
    made.add_argument("--shape", default="Llama-3.2-1B,Llama-3.1-8B", help="names, with commas")
    made.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu for a trial")
    made.add_argument("--output", type=Path, default=Path("outputs/gpu"))
    made.add_argument("--minutes", type=float, default=25, help="no stage begins later")
    given = made.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        console.print(f"torch {torch.__version__} sees no GPU here; --device cpu --shape tiny runs")
        return 1
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    setup = Setup(device, tuple(given.shape.split(",")), given.output)
    try:
        with one_run(setup.output):
            stages = stages_of(setup)
            passed = run_stages(stages, setup.output, setup.identity, console, given.minutes)
    except (ValueError, BlockingIOError) as error:
        console.print(str(error))
        return 1
    console.print(f"written to {setup.output}: report.md, report.json")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run SGLang on a CPU and print what it wrote as JSON.

    python run_sglang.py FOLDER NUM_DRAFTS PROMPTS_JSON

`NUM_DRAFTS` 0 is the target alone; else SELFSPEC_EXIT names the exit. The SGLang of PyPI is built
for GPUs. Triton's interpreter runs those of its kernels that are written in Triton, and packages
for pictures and sound, whose builds need CUDA, are imitated. All processes of SGLang run this file.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"


class Anything(type):
    """A class with any attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Imitated(ModuleType):
    """A module with any class."""

    __version__ = "1.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Imitations:
    """Finds and loads imitations."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torchaudio", "torchvision"):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Imitated(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Imitations())


def main(folder: str, drafts: str, prompts: str) -> None:
    """Write tokens, drafts and accepted drafts of every prompt."""
    import sglang

    chosen = {"speculative_algorithm": "SELFSPEC", "speculative_num_steps": int(drafts)}
    engine = sglang.Engine(
        model_path=folder,
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        max_running_requests=8,
        max_total_tokens=4096,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        log_level="error",
        **(chosen if int(drafts) else {}),
    )
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    written = engine.generate(input_ids=json.loads(prompts), sampling_params=sampling)
    counted = [answer["meta_info"] for answer in written]
    result = {
        "tokens": [answer["output_ids"] for answer in written],
        "drafted": sum(info.get("spec_num_proposed_drafts", 0) for info in counted),
        "accepted": sum(info.get("spec_num_correct_drafts", 0) for info in counted),
    }
    print("RESULT", json.dumps(result), flush=True)  # noqa: T201
    engine.shutdown()


from sglang.kernels.ops.speculative import cache_locs, spec_tree  # noqa: E402

cache_locs._is_xpu = spec_tree._is_xpu = True  # there the kernels are those written in Triton

if __name__ == "__main__":
    main(*sys.argv[1:])

"""What tests of serving engines share: prompts, servers, and what they wrote and counted."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec import DEMO_MODEL

VLLM = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # those of other people's code are no errors here
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed; `make test-engines` installs it"
    ),
]

DRAFTS, NEW_TOKENS = 4, 64
# What any machine has room for: the model is small, and speed is not what is looked at.
ENGINE = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 2**28}
# Where it binds threads to cores, vLLM asks for a NUMA node for every process.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


class Written(NamedTuple):
    """New tokens of every prompt; drafts, and drafts accepted at each position of a round."""

    tokens: list[list[int]]
    drafted: int
    accepted_at: list[int]

    @property
    def acceptance_rate(self) -> float:
        return sum(self.accepted_at) / self.drafted


def assisted(prompts, folder):
    """New tokens that transformers writes, with the draft in `folder` as assistant or alone."""
    target = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    draft = folder and AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS}
        output = target.generate(ids, do_sample=False, assistant_model=draft, **options)
        texts.append(output[0, len(prompt) :].tolist())
    return texts


def counted_as_vllm_does(spec, prompts, new_tokens, drafts, **draft):
    """Tokens, drafts, and drafts accepted at each position, in rounds of the full number.

    An engine drafts and counts the full number even where fewer tokens are left to write, and where
    a text ends before its last draft.
    """
    texts, drafted, accepted = [], 0, [0] * drafts
    end = spec.model.generation_config.eos_token_id
    for prompt in prompts:
        output = spec.generate(
            torch.tensor([prompt]),
            max_new_tokens=new_tokens + drafts + 1,
            draft={"num_draft_tokens": drafts, **draft},
            do_sample=False,
            eos_token_id=None,
        )
        text = output[0, len(prompt) :][:new_tokens].tolist()
        texts.append(text[: text.index(end) + 1] if end in text else text)
        written = 0
        for round_ in spec.last_trace.rows[0]:
            if written >= len(texts[-1]):
                break
            drafted += len(round_.drafted)
            accepted = [n + (at < round_.accepted) for at, n in enumerate(accepted)]
            written += len(round_.tokens)
    return Written(texts, drafted, accepted)


def asked(address, prompts):
    """What a server writes for all prompts at once, and what it counted."""
    options = {"max_tokens": NEW_TOKENS, "temperature": 0, "return_token_ids": True}
    body = json.dumps({"prompt": prompts, **options}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{address}/v1/completions", body, headers)) as answer:
        choices = json.load(answer)["choices"]
    with urlopen(f"{address}/metrics") as answer:
        counters = answer.read().decode()

    def counted(name):
        line = rf"^vllm:spec_decode_num_{name}_total\S* (\S+)$"
        return [int(float(value)) for value in re.findall(line, counters, re.MULTILINE)]

    (drafted,) = counted("draft_tokens")
    choices.sort(key=lambda choice: choice["index"])
    tokens = [choice["token_ids"] for choice in choices]
    return Written(tokens, drafted, counted("accepted_tokens_per_pos"))


@contextmanager
def serving(line) -> Iterator[str]:
    """A server that the shell starts with `line`, on a free port and with room for few tokens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {**ENGINE, "port": port, "host": "127.0.0.1"}
    named = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    options = " ".join(f"{name} {value}" for name, value in named.items() if name not in line)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-c", f"exec {line} {options} --enforce-eager"]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(command, env={**os.environ, **UNBOUND, "PATH": path})
    try:
        while not healthy(address):
            assert server.poll() is None, f"vllm serve ended with exit code {server.returncode}"
            time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait()


def healthy(address) -> bool:
    try:
        with urlopen(f"{address}/health"):
            return True
    except URLError:
        return False

"""Fixtures of the tests of serving engines: prompts, and what the target writes for them."""

import pytest
from engine_tools import ENGINE, NEW_TOKENS, assisted
from transformers import AutoTokenizer

from selfspec import DEMO_MODEL
from selfspec.apps.bench.config import PromptSetConfig
from selfspec.apps.bench.prompts import read_prompts

COUNTS = {"text": 5, "gsm8k": 5, "humaneval": 5, "mbpp": 5}


@pytest.fixture(scope="session")
def prompts():
    """Passages and questions that neither the target nor its heads were trained on."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    sets = [PromptSetConfig(name=name, reader=name, count=n) for name, n in COUNTS.items()]
    read = [read_prompts(each, tokenizer, ENGINE["max_model_len"] - NEW_TOKENS) for each in sets]
    return [prompt for prompts in read for prompt in prompts]


@pytest.fixture(scope="session")
def plain(prompts):
    """What the target's own `generate` writes."""
    return assisted(prompts, None)

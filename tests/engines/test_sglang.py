"""The first layers of a target draft inside SGLang, on its own KV pool."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_in_place import PROMPTS, with_head

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),  # those of other people's code are no errors here
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        find_spec("sglang") is None,
        reason="SGLang is not installed; `make test-engines` installs it",
    ),
]
SCRIPT = Path(__file__).with_name("run_sglang.py")


def run(folder, drafts, exit_):
    """What `run_sglang.py` prints."""
    command = [sys.executable, str(SCRIPT), str(folder), str(drafts), json.dumps(PROMPTS)]
    chosen = {**os.environ, "SELFSPEC_EXIT": exit_}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=chosen)
    results = re.findall(r"^RESULT (.*)$", ended.stdout, re.MULTILINE)
    assert results, ended.stderr[-3000:]
    return json.loads(results[0])


@pytest.mark.parametrize(("kind", "trimmed"), [("shared", False), ("lora", True)])
def test_the_first_layers_draft(kind, trimmed, tmp_path):
    folder, _, draft_model, own = with_head(kind, 2, tmp_path, trimmed, name="llama")
    drafted = run(folder, 3, draft_model.removeprefix("selfspec:"))
    assert drafted["tokens"] == own.tokens
    assert drafted["drafted"] == own.drafted
    assert drafted["accepted"] == sum(own.accepted_at)

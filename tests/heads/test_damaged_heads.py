"""Damaged copies of published heads: each loads and drafts exactly, or is refused in one line.

`make test` damages a few copies of each format, `pytest -m slow tests/heads/test_damaged_heads.py`
500.
"""

import json
import random
import shutil
import warnings

import pytest
import torch
from conftest import VOCAB, greedy, prompt, tiny_llama
from dflash_tools import (
    Published,
    dflash2_tensors,
    dflash_tensors,
    markov_tensors,
    write_deepspec,
    write_z_lab,
)
from dflash_tools import write_speculators as write_dflash
from mtp_tools import GLM, checkpoint, split
from published import (
    EPS,
    eagle3_tensors,
    peagle_tensors,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_speculators,
)
from safetensors.torch import load_file, save_file

from selfspec import SelfSpecModel

IDS, MASK = prompt(4, 9)
FEW, MANY = 12, 500
FLAGS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
TWO = {"eagle_aux_hidden_state_layer_ids": [2, 4]}
FORMATS = {
    "eagle": write_eagle,
    "eagle3": lambda folder: write_eagle3(folder, eagle3_tensors(), **FLAGS),
    "speculators": lambda folder: write_speculators(folder, eagle3_tensors(), **FLAGS),
    "medusa": lambda folder: write_medusa(folder, heads=2, layers=1),
    "P-EAGLE": lambda folder: write_eagle3(
        folder, peagle_tensors(), ptd_token_id=7, num_hidden_layers=2, **TWO
    ),
    "DFlash": lambda folder: write_dflash(folder, Published(dflash_tensors(trimmed=True))),
    "DFlash of z-lab": lambda folder: write_z_lab(folder, Published(dflash_tensors(), window=3)),
    "DSpark": lambda folder: write_deepspec(
        folder, Published({**dflash_tensors(), **markov_tensors("rnn", VOCAB)})
    ),
    "DFlash2": lambda folder: write_dflash(
        folder, Published({**dflash_tensors(), **dflash2_tensors()}), "dflash2"
    ),
}
JUNK = [None, 0, -1, 1, 2, 7, 10**9, 0.5, "", "x", "mtp", [], [1], {}, {"a": 1}, True]


def flipped_bits(path, source):
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    for _ in range(source.randint(1, 4)):
        data[source.randrange(source.choice([8 + header, len(data)]))] ^= 1 << source.randrange(8)
    path.write_bytes(data)


def cut_off(path, source):
    path.write_bytes(path.read_bytes()[: source.randrange(path.stat().st_size)])


def other_tensors(path, source):
    """A tensor is lost, renamed, cut, of another type or added."""
    tensors = load_file(path)
    name = source.choice(sorted(tensors))
    tensor = tensors.pop(name)
    at = source.randrange(len(name))
    changes = [
        {},
        {name[:at] + source.choice("0129._wx") + name[at + 1 :]: tensor},
        {name: tensor[: len(tensor) // 2].contiguous()},
        {name: tensor[:0]},
        {name: tensor.flatten()[0]},
        {name: tensor.t().contiguous() if tensor.ndim == 2 else tensor[None]},
        {name: tensor.to(source.choice([torch.uint8, torch.float8_e4m3fn, torch.bool]))},
        {name: tensor, f"{name}_scale": torch.ones(1)},
    ]
    save_file(tensors | source.choice(changes), path)


def other_config(path, source):
    """A value is lost or another, at any depth."""
    config = json.loads(path.read_text())
    part = config
    while True:
        key = source.choice(sorted(part))
        if not isinstance(part[key], dict) or not part[key] or source.random() < 0.3:
            break
        part = part[key]
    del part[key]
    if source.random() < 0.7:
        part[key] = source.choice(JUNK)
    path.write_text(json.dumps(config))


def damage(folder, source, weights="model.safetensors"):
    """Damage the folder in one way."""
    change = source.choice([flipped_bits, cut_off, other_tensors, other_tensors, other_config])
    cuts_config = change is cut_off and source.random() < 0.3 and weights == "model.safetensors"
    if change is other_config and weights != "model.safetensors":
        change = other_tensors  # the config is the target's
    change(folder / ("config.json" if change is other_config or cuts_config else weights), source)
    return change.__name__


def check_exact(spec, own):
    text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=own.shape[1] - IDS.shape[1])
    assert torch.equal(text, own)


def copies(whole, tmp_path, count, weights="model.safetensors"):
    """Damaged copies, one after the other in the same place, with what was done to them."""
    for seed in range(count):
        folder = shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True)
        yield folder, f"{damage(folder, random.Random(seed), weights)}, seed {seed}"


@pytest.mark.matrix
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", FORMATS)
def test_a_damaged_head_drafts_exactly_or_is_refused(tmp_path, layout, count):
    target = tiny_llama("sometimes", rms_norm_eps=EPS)
    own = greedy(target, IDS, MASK, max_new_tokens=6)
    FORMATS[layout](tmp_path / "whole")
    loaded = 0
    for folder, what in copies(tmp_path / "whole", tmp_path, count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                spec = SelfSpecModel(target, heads=folder)
            except (ValueError, FileNotFoundError) as error:
                assert str(folder) in str(error) and "\n" not in str(error), what
                continue
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            loaded += 1
            check_exact(spec, own)
    assert 0 < loaded < count


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_damaged_layer_never_stops_its_target(tmp_path, count):
    whole = checkpoint(tmp_path / "whole", "glm4_moe")
    split(whole, GLM, "mtp.safetensors")
    own = greedy(SelfSpecModel.from_pretrained(whole).model, IDS, MASK, max_new_tokens=6)
    used = 0
    for folder, what in copies(whole, tmp_path, count, "mtp.safetensors"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                spec = SelfSpecModel.from_pretrained(folder)
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
        told = [str(warning.message) for warning in caught]
        assert bool(spec.heads) != bool(told) and len(told) < 2, (what, told)
        assert not told or ("plain drafts" in told[0] and "\n" not in told[0]), what
        used += bool(spec.heads)
        check_exact(spec, own)
    assert 0 < used < count

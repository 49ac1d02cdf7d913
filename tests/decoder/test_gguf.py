"""A GGUF file is a checkpoint like others, wherever a model is named (decoder/checkpoints.py)."""

import pytest
import torch
from cli_tools import call, one_object
from conftest import equal_to_generate
from transformers import AutoTokenizer

from benchmarks.real.gguf_file import write_gguf
from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.decoder.checkpoints import (
    find_checkpoint,
    load_causal_lm,
    load_config,
    load_tokenizer,
)
from selfspec.heads import save_heads


@pytest.fixture(
    scope="module", params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def stored(request, tmp_path_factory):
    """The demo model and a GGUF file of it."""
    model = load_causal_lm(DEMO_MODEL, dtype=request.param)
    folder = tmp_path_factory.mktemp("gguf")
    return model, write_gguf(model, load_tokenizer(DEMO_MODEL), folder / "demo.gguf")


def test_weights_and_tokens_are_those_of_the_checkpoint(stored):
    model, file = stored
    again = load_causal_lm(file, dtype=model.dtype)
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys() and again.dtype == model.dtype
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    # A file names how text is split before BPE, and no name stands for how the demo splits digits.
    said = "It was a dark and stormy night; the rain fell in torrents."
    whole = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert load_tokenizer(file)(said).input_ids == whole(said).input_ids
    config = load_config(file)
    assert config.num_hidden_layers == model.config.num_hidden_layers
    config.num_hidden_layers = 1  # the config of a file is kept, for reading it takes long
    assert load_config(file).num_hidden_layers == model.config.num_hidden_layers


@pytest.mark.slow
def test_the_file_and_its_folder_are_wrapped_with_the_heads_beside_them(stored):
    model, file = stored
    heads = SelfSpecModel.from_pretrained(DEMO_MODEL, dtype=model.dtype)
    save_heads(heads.heads, heads.decoder, file.parent)
    ids = load_tokenizer(DEMO_MODEL)("It was a dark", return_tensors="pt").input_ids
    for name in (str(file), file.parent):
        spec = SelfSpecModel.from_pretrained(name, dtype=model.dtype)
        assert [head.kind for head in spec.heads] == [head.kind for head in heads.heads]
        if model.dtype == torch.float32:
            equal_to_generate(spec, ids, max_new_tokens=12)


@pytest.mark.slow
def test_the_command_line_takes_a_file(stored):
    _, file = stored
    assert one_object(call("info", "--model", str(file), "--json"))["layers"] == 16


def test_a_folder_has_to_hold_one_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no GGUF file at .*none\.gguf"):
        find_checkpoint(tmp_path / "none.gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match="2 GGUF files, of which one has to be named"):
        find_checkpoint(tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.decoder.checkpoints.is_gguf_available", lambda: False)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ImportError, match=r"pip install 'selfspec\[gguf\]'"):
        load_tokenizer(find_checkpoint(tmp_path))

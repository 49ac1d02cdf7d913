"""Pretraining from a config: a model that loads elsewhere, killed or not; mistakes in one line."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from training_tools import (
    assert_same,
    command,
    metrics,
    pretrain_config,
    saved,
    start,
    write_text,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from selfspec import SelfSpecModel
from selfspec.config import parse
from training.language.vocabulary import TokenizerConfig, carry_over, train_tokenizer
from training.loop import script
from training.loop.checkpoint import Checkpoints
from training.pretrain import PretrainConfig, make_model, pretrain


def settings(folder, **changes):
    return parse(PretrainConfig, pretrain_config(folder, **changes), "test")


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


# From text to a model


def test_a_run_leaves_a_model_that_loads_elsewhere(folder):
    figures = pretrain(settings(folder, optimizer={"name": "muon"}))
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
    assert model.dtype == torch.bfloat16 and len(tokenizer) == model.config.vocab_size
    assert tokenizer.decode(tokenizer("the sea.").input_ids) == "the sea."
    trained = saved(folder / "run", 4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[f"model.model.{name}"].bfloat16())
    spec = SelfSpecModel.from_pretrained(folder / "run" / "model")
    assert spec.generate(**tokenizer("the sea", return_tensors="pt"), max_new_tokens=3).shape
    facts = json.loads((folder / "run" / "model" / "eval.json").read_text())
    assert facts["held_out"] == figures and figures["bpb_words"] > 0
    assert facts["tokens_seen"] == 4 * 4 * 32
    assert facts["tokens_of_text"] > 1000
    assert "vocab_size: 320" in (folder / "run" / "config.yaml").read_text()


def test_a_run_learns(folder):
    pretrain(settings(folder, loop={"steps": 30}, optimizer={"lr": 1e-2}))
    entries = metrics(folder / "run")
    assert entries[-1]["loss"] < entries[0]["loss"] - 1


def test_a_finished_run_called_again_changes_nothing(folder):
    config = settings(folder)
    first = pretrain(config)
    before = {p: p.read_bytes() for p in (folder / "run").rglob("*") if p.is_file()}
    assert pretrain(config) == first
    assert {p: p.read_bytes() for p in (folder / "run").rglob("*") if p.is_file()} == before


def test_another_config_in_the_folder_is_refused_and_the_run_stays(folder):
    pretrain(settings(folder))
    echoed = (folder / "run" / "config.yaml").read_text()
    changes = {"model": {"num_hidden_layers": 3}, "tokenizer": {"vocab_size": 330}}
    with pytest.raises(
        ValueError, match=r"num_hidden_layers \(2 there, 3 here\), tokenizer\.vocab"
    ):
        pretrain(settings(folder, **changes))
    with pytest.raises(ValueError, match=r"loop\.seed"):
        pretrain(settings(folder, loop={"seed": 4}))
    assert (folder / "run" / "config.yaml").read_text() == echoed


def test_a_run_that_never_saved_begins_with_its_own_tokenizer(folder):
    train_tokenizer(
        TokenizerConfig(vocab_size=300), settings(folder).data, folder / "run/tokenizer"
    )
    pretrain(settings(folder))
    assert len(AutoTokenizer.from_pretrained(folder / "run" / "model")) == 320


@pytest.mark.slow
@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_a_killed_run_goes_on_as_if_it_had_not_been(folder, after):
    """`kill -9` once `after` steps are written, wherever the process then is."""
    changes = {"loop": {"steps": 60, "save_every": 4, "eval_every": 10}}
    dropout = {"model": {"attention_dropout": 0.1}}
    config = pretrain_config(folder, **changes, **dropout)
    run = folder / "run"
    process = start(command(config, folder))
    while process.poll() is None and lines(run) < after:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
    done, kept = lines(run), max(Checkpoints(run).steps(), default=0)
    assert done - 4 <= kept <= done
    whole = pretrain(settings(folder, output=str(folder / "whole"), **changes, **dropout))
    assert pretrain(settings(folder, **changes, **dropout)) == whole
    assert_same(saved(run, 60), saved(folder / "whole", 60))
    assert metrics(run) == metrics(folder / "whole")
    assert not list(run.rglob("*.tmp"))


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


# Weights carried over


@pytest.fixture
def vocabularies(folder):
    """Two vocabularies that share some tokens; the ends of texts have different names."""
    sources = settings(folder).data
    old = train_tokenizer(TokenizerConfig(vocab_size=300), sources, folder / "old")
    new = train_tokenizer(TokenizerConfig(vocab_size=330), sources, folder / "new")
    return old, new


def llama(words, **shape):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, **(sizes | heads | shape)))


@pytest.mark.parametrize("tied", [True, False])
def test_words_that_both_know_keep_their_rows_and_others_start_as_their_pieces(vocabularies, tied):
    old, new = vocabularies
    source, model = (llama(len(t), tie_word_embeddings=tied) for t in (old, new))
    carry_over(source, old, model, new)
    known, shared = old.get_vocab(), 0
    for table in ("get_input_embeddings", "get_output_embeddings"):
        rows, given = (getattr(m, table)().weight for m in (model, source))
        for token, number in new.get_vocab().items():
            if token in known:
                shared += 1
                assert torch.equal(rows[number], given[known[token]])
            else:
                pieces = old(new.decode([number])).input_ids
                assert len(pieces) > 1 and torch.equal(rows[number], given[pieces].mean(0))
    assert 2 * 256 < shared < 2 * len(new)
    for name, tensor in model.model.layers.state_dict().items():
        assert torch.equal(tensor, source.model.layers.state_dict()[name])


def test_the_end_of_a_text_keeps_its_row_whatever_it_is_called(vocabularies):
    old, new = vocabularies
    old.add_special_tokens({"eos_token": "</s>"})
    source, model = llama(len(old)), llama(len(new))
    carry_over(source, old, model, new)
    rows, given = (m.get_input_embeddings().weight for m in (model, source))
    assert torch.equal(rows[new.eos_token_id], given[old.eos_token_id])


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"intermediate_size": 40}])
@pytest.mark.parametrize("changed", ["source", "model"])
def test_weights_of_another_shape_are_refused(vocabularies, change, changed):
    old, new = vocabularies
    source = llama(len(old), **(change if changed == "source" else {}))
    model = llama(len(new), **(change if changed == "model" else {}))
    with pytest.raises(ValueError, match=r"init_from does not fit the model: model\.layers\."):
        carry_over(source, old, model, new)


def test_a_run_starts_from_another_checkpoint(folder):
    pretrain(settings(folder))
    changes = {"output": str(folder / "second"), "init_from": str(folder / "run" / "model")}
    config = settings(folder, **changes)
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
    first = AutoModelForCausalLM.from_pretrained(folder / "run" / "model", dtype=torch.float32)
    assert torch.equal(logits(make_model(config, tokenizer)), logits(first))
    pretrain(config)
    began, ended = metrics(folder / "second")[0], metrics(folder / "run")[0]
    assert began["loss"] < ended["loss"]


# Mistakes


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"model": {"hidden_sise": 8}},
            "field of a llama configuration: 'hidden_sise'; did you mean",
        ),
        ({"model": {"model_type": "lama"}}, "unknown model_type: 'lama'; did you mean 'llama'"),
        ({"loop": {"step": 8}}, "loop: unknown key of LoopConfig: 'step'; did you mean 'steps'"),
        ({"data": []}, "data: .*at least 1 item"),
    ],
)
def test_a_mistake_in_the_config_is_named(folder, changes, refusal):
    with pytest.raises(ValueError, match=refusal):
        settings(folder, **changes)


def test_fields_that_configurations_take_by_another_name_are_known(folder):
    settings(folder, model={"rope_theta": 5000.0, "head_dim": 8})
    gpt2 = {"model_type": "gpt2", "hidden_size": 32, "n_layer": 2, "num_attention_heads": 4}
    shape = {"output": "x", "data": [{"files": ["a"]}], "held_out": {}}
    assert parse(PretrainConfig, {**shape, "model": gpt2}, "test").model == gpt2


@pytest.fixture
def call(monkeypatch, capsys, folder):
    """`call(config, main)`: the exit code and the standard error of a script."""

    def run(config, main=lambda config: None, *overrides):
        arguments = [*command(config, folder)[3:], *overrides]
        monkeypatch.setattr("sys.argv", ["pretrain", *arguments])
        code = 0
        try:
            script.run_script(main, PretrainConfig, "usage")
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    return run


def test_a_script_that_ends_well_says_nothing(call, folder):
    seen = []
    assert call(pretrain_config(folder), seen.append, "loop.steps=7") == (0, "")
    assert seen[0].loop.steps == 7


def test_a_typo_in_a_file_names_the_nearest_key_and_ends_with_2(call, folder):
    config = pretrain_config(folder) | {"blok_size": 3}
    code, error = call(config)
    assert code == 2 and "'blok_size'; did you mean 'block_size'" in error
    code, error = call(pretrain_config(folder), lambda config: None, "loop.stepps=3")
    assert code == 2 and "did you mean 'steps'" in error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a text\nof two lines"),
        FileNotFoundError("no file matches x"),
        FloatingPointError("loss of step 3 is nan"),
        OSError(28, "No space left on device"),
        ImportError("needs datasets"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_ends_with_1(call, folder, error):
    def fail(config):
        raise error

    code, said = call(pretrain_config(folder), fail)
    assert code == 1 and said == "error: " + " ".join(str(error).split()) + "\n"


def test_a_mistake_of_ours_keeps_its_traceback(call, folder):
    def fail(config):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        call(pretrain_config(folder), fail)


def test_text_too_short_is_one_line(call, folder):
    (folder / "text.txt").write_text("the sea " * 5)
    code, said = call(pretrain_config(folder, held_out={"window": 2}), pretrain)
    assert code == 1 and said.startswith("error: ") and said.count("\n") == 1
    assert "less than one block of 32" in said

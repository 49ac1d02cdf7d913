"""Exports: a folded checkpoint says what the exit says, and no text changes."""

import json
import os
import re
import shlex

import pytest
import torch
import transformers
from conftest import EXIT, greedy, prompt, tiny_llama
from families import FAMILIES, LAYERS, build
from head_tools import own_head
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from selfspec import DEMO_MODEL, SelfSpecModel
from selfspec.apps.cli import commands
from selfspec.apps.display.demo import load_prompts
from selfspec.apps.export import export_custom_generate, export_draft, fold
from selfspec.apps.export.draft_model import FOLDABLE, SIDE_CAR, check_foldable
from selfspec.decoder import Decoder
from selfspec.heads import draft_states, save_heads, target_states

TEXT = prompt(20, seed=3, vocab=60)[0]


@pytest.fixture(autouse=True)
def _quiet():
    """Bars of transformers are not worth watching here."""
    transformers.utils.logging.disable_progress_bar()


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


@torch.no_grad()
def exit_logits(decoder, head):
    """What an exit says behind every token of a text."""
    reading = target_states(decoder, TEXT, None, head.input_layers)
    (states,) = draft_states(decoder, head, reading, 1)
    return head.logits(decoder, states)


@torch.no_grad()
def folded_logits(decoder, head, folder, **options):
    """The same from the checkpoint on disk."""
    export_draft(decoder, head, folder, target="target")
    return load(folder, **options)(TEXT).logits


# Folding


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_checkpoint_says_what_the_exit_says(family, tmp_path):
    decoder = Decoder(build(family, "eager"))
    for kind in ("shared", "lens", "block"):
        head = own_head(decoder, kind, LAYERS // 2)
        folded = folded_logits(decoder, head, tmp_path / kind, attn_implementation="eager")
        torch.testing.assert_close(folded, exit_logits(decoder, head), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FOLDABLE)
@pytest.mark.parametrize("tied", [False, True])
def test_in_double_they_are_one(kind, tied, tmp_path):
    decoder = Decoder(tiny_llama("sometimes", tie_word_embeddings=tied))
    head = own_head(decoder, kind, EXIT, noise=0.2)
    folded = folded_logits(decoder, head, tmp_path / "draft")
    torch.testing.assert_close(folded, exit_logits(decoder, head), rtol=1e-11, atol=1e-11)
    stays_tied = tied and kind in ("shared", "block")
    config = json.loads((tmp_path / "draft/config.json").read_text())
    assert config["tie_word_embeddings"] is stays_tied
    assert config["num_hidden_layers"] == EXIT + (kind == "block")


@pytest.mark.parametrize("kind", FOLDABLE)
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_a_trimmed_vocabulary_is_expanded_and_drafts_the_same(family, kind, tmp_path):
    decoder = Decoder(build(family, "eager"))
    head = own_head(decoder, kind, LAYERS // 2, trimmed=True)
    folded = folded_logits(decoder, head, tmp_path / "draft")
    said = exit_logits(decoder, head)
    torch.testing.assert_close(folded[..., head.vocab_ids], said, rtol=1e-4, atol=1e-4)
    assert torch.equal(folded.argmax(-1), head.vocab_ids[said.argmax(-1)])
    side_car = json.loads((tmp_path / "draft" / SIDE_CAR).read_text())
    assert side_car["drafted"] == len(head.vocab_ids)


@pytest.mark.parametrize(("exit_layer", "place"), [(2, 3), (3, 1)])
def test_the_layer_of_a_block_keeps_its_kind_of_attention(exit_layer, place, tmp_path):
    decoder = Decoder(build("gemma3_text", "eager"))
    head = own_head(decoder, "block", exit_layer, place=place)
    folded = folded_logits(decoder, head, tmp_path / "draft", attn_implementation="eager")
    torch.testing.assert_close(folded, exit_logits(decoder, head), rtol=1e-4, atol=1e-4)
    own = decoder.config.layer_types
    types = json.loads((tmp_path / "draft/config.json").read_text())["layer_types"]
    assert types == [*own[:exit_layer], own[place]]


def test_a_layer_that_a_stock_model_has_no_place_for_is_named():
    decoder = Decoder(build("qwen3_moe", "eager"))  # every second layer has experts
    head = own_head(decoder, "block", 2, place=3)
    with pytest.raises(ValueError, match=r"layer 2 of a Qwen3Moe.* unlike layer 3.*place=2"):
        fold(decoder, head)


def test_folding_leaves_the_target_as_it_was():
    model = tiny_llama("sometimes", tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = Decoder(model)
    for kind in FOLDABLE:
        fold(decoder, own_head(decoder, kind, EXIT, trimmed=True))
    assert model.config.num_hidden_layers == 4
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_head_that_cannot_be_folded_names_the_nearest_that_can():
    decoder = Decoder(tiny_llama())
    fused = own_head(decoder, "fused", 2)
    with pytest.raises(ValueError, match=r"fused head does not fold.*--head shared --exit-layer 2"):
        check_foldable(fused)
    others = [fused, *(own_head(decoder, *other) for other in (("lens", 3), ("block", 1)))]
    with pytest.raises(ValueError, match="--head block --exit-layer 1"):
        check_foldable(fused, others)
    others.append(own_head(decoder, "lens", 2))
    with pytest.raises(ValueError, match="--head lens --exit-layer 2"):
        check_foldable(fused, others)


def test_adapters_are_merged_first():
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    decoder = Decoder(model)
    with pytest.raises(ValueError, match="merge_and_unload"):
        fold(decoder, own_head(decoder, "shared", EXIT))


def test_weights_keep_the_dtypes_that_the_targets_have(tmp_path):
    decoder = Decoder(tiny_llama(dtype=torch.bfloat16))
    head = own_head(decoder, "block", EXIT).float()  # heads are often fitted in float32
    export_draft(decoder, head, tmp_path / "draft", target="target")
    draft = load(tmp_path / "draft")
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}


# As an assistant


def test_the_target_s_sampling_is_not_the_draft_s(tmp_path):
    model = tiny_llama("sometimes")
    ends = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    # transformers loads such a file, and refuses to save it once a value was added.
    model.generation_config = GenerationConfig(temperature=0.6, pad_token_id=-1, **ends)
    decoder = Decoder(model)
    export_draft(decoder, own_head(decoder, "shared", EXIT), tmp_path / "draft", target="target")
    said = json.loads((tmp_path / "draft/generation_config.json").read_text())
    assert "temperature" not in said
    assert {**said, **ends, "num_assistant_tokens": 4} == said


@pytest.mark.parametrize("kind", FOLDABLE)
def test_an_assistant_changes_no_text(kind, tmp_path):
    model = tiny_llama("sometimes")
    decoder = Decoder(model)
    export_draft(decoder, own_head(decoder, kind, EXIT), tmp_path / "draft", target="target")
    draft, ids = load(tmp_path / "draft"), prompt(7)[0]
    assert draft.generation_config.num_assistant_tokens == 4
    plain = greedy(model, ids, max_new_tokens=24)
    assert torch.equal(greedy(model, ids, max_new_tokens=24, assistant_model=draft), plain)


def test_the_demo_drafts_for_itself_in_transformers(tmp_path):
    out = tmp_path / "draft"
    options = ["--head", "block", "--exit-layer", "4", "-k", "3", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(commands, ["export", "hf-draft", str(out), *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["layers"], told["head"], told["target"]) == (5, "block", str(DEMO_MODEL))
    side_car = json.loads((out / SIDE_CAR).read_text())
    assert {key: side_car[key] for key in told if key != "folder"} == {
        key: value for key, value in told.items() if key != "folder"
    }
    target = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    draft, tokenizer = load(out), AutoTokenizer.from_pretrained(out)
    ids = tokenizer(load_prompts()[0].text, return_tensors="pt").input_ids[:, -24:]
    plain = greedy(target, ids, max_new_tokens=16)
    assert torch.equal(greedy(target, ids, max_new_tokens=16, assistant_model=draft), plain)


# What is written


def test_the_page_launches_what_was_asked_for(tmp_path):
    decoder = Decoder(tiny_llama())
    out = tmp_path / "a draft's"
    export_draft(
        decoder, own_head(decoder, "lens", EXIT), out, target="user/big", num_draft_tokens=6
    )
    page = (out / "README.md").read_text()
    assert "base_model: user/big" in page
    for engine in ("transformers", "vLLM", "SGLang", "TensorRT-LLM", "mlx-lm", "llama.cpp"):
        assert f"## {engine}\n" in page
    for tokens in ("--speculative-num-steps 6", "--speculative-num-draft-tokens 7"):
        assert tokens in page
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    compile(code, "page", "exec")
    assert shell_words(page, "vllm serve")[-1] == json.dumps(
        {"method": "draft_model", "model": str(out), "num_speculative_tokens": 6}
    )


def shell_words(page, start):
    (block,) = [b for b in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if start in b]
    return shlex.split(block)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    decoder = Decoder(tiny_llama())
    head, out = own_head(decoder, "shared", EXIT), tmp_path / "draft"

    def failing(*args, **kwargs):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("selfspec.apps.export.draft_model.draft_guide", failing)
        with pytest.raises(OSError, match="the disk is full"):
            export_draft(decoder, head, out, target="target")
    assert list(tmp_path.iterdir()) == []
    killed, running = (tmp_path / f".draft.{process}.tmp" for process in (2**30, os.getppid()))
    for scratch in (killed, running):
        (scratch / "half").mkdir(parents=True)
    export_draft(decoder, head, out, target="target")
    assert sorted(tmp_path.iterdir()) == [running, out]
    with pytest.raises(FileExistsError, match=r"is there already; delete it"):
        export_draft(decoder, head, out, target="target")


# Custom generate


@pytest.fixture
def fitted(tmp_path):
    """A target, and the folder of a head that was fitted to it."""
    model = tiny_llama("sometimes")
    decoder = Decoder(model)
    save_heads([own_head(decoder, "fused", EXIT)], decoder, tmp_path / "heads")
    return SelfSpecModel(model, heads=tmp_path / "heads"), tmp_path / "heads"


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory, monkeypatch):
    """transformers copies code that it loads; not into the user's cache."""
    cache = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)


def speculated(model, folder, ids, mask, **options):
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        custom_generate=str(folder),
        trust_remote_code=True,
        **options,
    )


def rounds(monkeypatch):
    """The draft and heads of every call from now on."""
    seen, own = [], SelfSpecModel.generate

    def noting(self, *args, **kwargs):
        output = own(self, *args, **kwargs)
        seen.append((self.heads, kwargs["draft"], self.last_stats))
        return output

    monkeypatch.setattr(SelfSpecModel, "generate", noting)
    return seen


def test_custom_generate_writes_the_same_text_without_an_import(fitted, tmp_path, monkeypatch):
    spec, _ = fitted
    model, out = spec.model, tmp_path / "speculate"
    export_custom_generate(out, spec=spec)
    ids, mask = prompt(7, 4)
    seen = rounds(monkeypatch)
    plain = greedy(model, ids, mask, max_new_tokens=16)
    assert torch.equal(speculated(model, out, ids, mask, max_new_tokens=16), plain)
    draft = {"num_draft_tokens": 2}
    assert torch.equal(speculated(model, out, ids, mask, max_new_tokens=16, draft=draft), plain)
    (first, _, stats), (second, given, _) = seen
    assert stats.drafted > 0
    assert given == draft
    assert [(head.kind, head.exit_layer) for head in first] == [("fused", EXIT)]
    assert first[0] is second[0]  # read once


def test_custom_generate_without_heads_takes_them_as_an_argument(fitted, tmp_path, monkeypatch):
    spec, heads = fitted
    model, out = spec.model, tmp_path / "speculate"
    export_custom_generate(out)
    ids, mask = prompt(5)
    seen = rounds(monkeypatch)
    plain = greedy(model, ids, mask, max_new_tokens=8)
    assert torch.equal(speculated(model, out, ids, mask, max_new_tokens=8), plain)
    found = speculated(model, out, ids, mask, max_new_tokens=8, heads=str(heads))
    assert torch.equal(found, plain)
    assert [[head.kind for head in used] for used, *_ in seen] == [[], ["fused"]]


def test_a_repository_is_named_where_the_folder_will_lie_in_one(fitted, tmp_path):
    export_custom_generate(tmp_path / "out", spec=fitted[0], repo_id="user/name")
    code = (tmp_path / "out/custom_generate/generate.py").read_text()
    assert "HEADS: str | None = 'user/name'\n" in code
    assert 'custom_generate="user/name"' in (tmp_path / "out/README.md").read_text()


# Commands


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["hf-draft", "{out}"], "--head block --exit-layer 4"),
        (["hf-draft", "{out}", "--head", "lense"], "did you mean 'lens'?"),
        (["hf-draft", "{out}", "-e", "16"], "exit_layer must be in [1, 15], got 16"),
        (["hf-draft", "{full}"], "is there already"),
        (["custom-generate", "{full}"], "is there already"),
        (["custom-generate", "{full}/file/out"], "{full}/file is not a folder"),
        (["hf-draft", "{full}/file/out"], "{full}/file is not a folder"),
        (["custom-generate", "{out}", "--heads", "/no/heads"], "no folder /no/heads"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_leaves_nothing(args, says, tmp_path):
    full, out = tmp_path / "full", tmp_path / "out"
    full.mkdir()
    (full / "file").touch()
    args = [arg.format(out=out, full=full) for arg in args]
    result = CliRunner().invoke(commands, ["export", *args])
    assert result.exit_code == 1
    assert re.fullmatch(r"selfspec: .*\n", result.stderr)
    assert says.format(full=full) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_command_makes_a_folder_for_custom_generate(tmp_path):
    out = tmp_path / "speculate"
    command = ["export", "custom-generate", str(out), "--heads", str(DEMO_MODEL), "--json"]
    result = CliRunner().invoke(commands, command)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["folder"] == str(out)
    assert ["block", 4] in told["heads"]
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
        "exit_heads.safetensors",
        "selfspec.json",
    ]

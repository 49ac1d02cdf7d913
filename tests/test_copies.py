"""A wrapped model is an object like others: it can be copied, pickled, and moved to a process."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import EXIT, greedy, prompt, tiny_llama
from head_tools import KINDS, own_head
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder
from selfspec.schedule.profile import Place, Profile


def through_torch(spec):
    buffer = io.BytesIO()
    torch.save(spec, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda spec: pickle.loads(pickle.dumps(spec)),
    "torch.save": through_torch,
}
copied_by = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
IDS, MASK = prompt(6, 3)


def texts(spec, draft):
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False}
    text = spec.generate(IDS, draft=draft, **options)
    return text, spec.last_stats


def assert_alike(spec, other, draft):
    """Both write the same by the same drafts, and each has its own model or the same one."""
    (text, stats), (other_text, other_stats) = texts(spec, draft), texts(other, draft)
    assert torch.equal(text, other_text)
    assert (stats.drafted, stats.accepted) == (other_stats.drafted, other_stats.accepted)


@pytest.mark.matrix
@copied_by
@pytest.mark.parametrize("draft", ["early_exit", "tree", None], ids=str)
def test_a_copy_writes_what_the_original_writes(copied, draft):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    texts(spec, draft)  # whatever a call leaves behind is copied too
    other = copied(spec)
    assert_alike(spec, other, draft)
    assert (other.model is spec.model) == (copied is copy.copy)
    with torch.no_grad():
        other.model.lm_head.weight.mul_(-1)
    own = greedy(other.model, IDS, MASK, max_new_tokens=8)
    assert torch.equal(texts(other, draft)[0], own)
    assert torch.equal(texts(spec, draft)[0], own) == (copied is copy.copy)


@pytest.mark.matrix
@pytest.mark.parametrize("copied", [COPIES["pickle"], copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("trimmed", [False, True], ids=["", "trimmed"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_go_along(kind, trimmed, copied):
    target = tiny_llama("sometimes", dtype=torch.float32)
    try:
        head = own_head(Decoder(target), kind, EXIT, trimmed=trimmed)
    except ValueError as error:
        assert trimmed and "trim" in str(error)
        return
    spec = SelfSpecModel(target, heads=[head])
    texts(spec, {"drafter": "early_exit"})
    other = copied(spec)
    assert [type(head) for head in other.heads] == [type(head)]
    assert_alike(spec, other, {"drafter": "early_exit"})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("kernels", ["eager", "prepacked", "compiled"])
@pytest.mark.parametrize("small", ["another", "itself"])
def test_draft_models_kernels_and_caches_go_along(small, kernels, copied):
    target = tiny_llama("sometimes", dtype=torch.bfloat16)
    draft_model = target if small == "itself" else tiny_llama(dtype=torch.bfloat16, seed=1)
    dtype = "int8" if kernels != "compiled" else "auto"
    spec = SelfSpecModel(target, draft_model=draft_model, kernels=kernels, kv_cache_dtype=dtype)
    other = copied(spec)
    decoder = other.decoder
    assert (decoder.kernels, decoder.kv_cache_dtype) == (kernels, dtype)
    kept = other.engine.draft_models.given
    assert (kept is other.model) == (small == "itself")


@copied_by
def test_profile_statistics_and_own_attributes_go_along(copied):
    spec = SelfSpecModel(tiny_llama())
    place = Place.of(spec.decoder)
    spec.profile = Profile(draft=DraftConfig(exit_layer=1), place=place)
    spec.label = "mine"
    texts(spec, None)
    other = copied(spec)
    assert other.profile == spec.profile and other.default_draft == spec.default_draft
    assert other.last_stats.emitted == spec.last_stats.emitted and other.label == "mine"


@copied_by
def test_adapters_go_along(copied):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    spec = SelfSpecModel(get_peft_model(tiny_llama(), config).eval())
    other = copied(spec)
    assert type(other.model) is type(spec.model)
    assert_alike(spec, other, "early_exit")


@pytest.mark.parametrize("copied", [copy.deepcopy, COPIES["pickle"], through_torch])
def test_what_a_call_returns_can_be_copied(copied):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    options = {"max_new_tokens": 5, "do_sample": False, "draft": "early_exit"}
    out = spec.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **options)
    other = copied(out)
    assert torch.equal(other.sequences, out.sequences)
    text = torch.cat([out.sequences, IDS[:, -1:]], dim=1)
    mask = torch.cat([MASK, torch.ones(2, 6, dtype=torch.long)], dim=1)
    expected = greedy(spec.model, text, mask, max_new_tokens=5)
    for cache in (other.past_key_values, out.past_key_values):
        again = spec.generate(text, attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(again, expected)


@pytest.mark.parametrize("part", ["wrapper", "model"])
def test_a_copy_within_a_call_is_refused(part):
    """The model is changed then, and a copy would be of the changed one."""
    spec = SelfSpecModel(tiny_llama())
    copied = spec if part == "wrapper" else spec.model

    class Copies:
        def put(self, value):
            copy.deepcopy(copied)

        def end(self):
            """Nothing is left."""

    class Later(Copies):
        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls > 1:  # the first call brings the prompt, before anything runs
                super().put(value)

    with pytest.raises(RuntimeError, match="between calls"):
        spec.generate(IDS[:1], streamer=Later(), max_new_tokens=4, do_sample=False)
    assert_alike(spec, copy.deepcopy(spec), "early_exit")


@pytest.mark.slow
def test_a_pickle_works_in_another_process(tmp_path):
    spec = SelfSpecModel(tiny_llama("sometimes"))
    text, _ = texts(spec, "early_exit")
    with (tmp_path / "spec.pickle").open("wb") as file:
        pickle.dump((spec, IDS, MASK), file)
    code = (
        "import pickle, sys; spec, ids, mask = pickle.load(open(sys.argv[1], 'rb'));"
        "print(spec.generate(ids, attention_mask=mask, draft='early_exit', max_new_tokens=8,"
        " do_sample=False).tolist())"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "spec.pickle")]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(text.tolist())


@pytest.mark.parametrize("task", ["plain", "CAUSAL_LM", None])
def test_the_generation_config_can_be_replaced(task):
    """Wherever it is replaced, ours is the one that the wrapped model's own generate takes."""
    model = tiny_llama("sometimes")
    if task != "plain":
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type=task)
        model = get_peft_model(model, config).eval()
    spec = SelfSpecModel(model)
    for change in (spec, model):
        for penalty in (1.7, 1.0):
            change.generation_config = GenerationConfig(
                repetition_penalty=penalty, max_new_tokens=8, pad_token_id=0
            )
            own = model.generate(input_ids=IDS, attention_mask=MASK)
            assert torch.equal(spec.generate(IDS, attention_mask=MASK, draft="early_exit"), own)
            if change is spec:
                assert spec.generation_config.repetition_penalty == penalty

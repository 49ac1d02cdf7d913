"""PEFT models: whatever their own `generate` does with adapters, ours does, or it is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import EXIT, prompt, tiny_llama
from families import VOCAB, build
from peft import (
    AdaLoraConfig,
    IA3Config,
    LilyConfig,
    LoHaConfig,
    LoraConfig,
    PolyConfig,
    RoadConfig,
    XLoraConfig,
    get_peft_model,
)
from torch import nn
from transformers import AutoModelForCausalLM

from selfspec import SelfSpecModel
from selfspec.decoder.kernels.prepacked import bundles
from selfspec.drafters import DRAFTERS
from selfspec.heads import LensHead

WHERE = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
LORA = {"r": 4, "init_lora_weights": False, **WHERE}
INVOKED = [11, 12]
IDS, MASK = prompt(9, 4, 12, 7)
OPTIONS = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
FEW = pytest.mark.parametrize("draft", ["early_exit", "tree", "none"])


def lora(**configs):
    """A tiny model with some adapters, the first one active."""
    torch.manual_seed(1)
    first, *others = configs
    model = get_peft_model(tiny_llama("sometimes"), configs[first], adapter_name=first)
    for name in others:
        model.add_adapter(name, configs[name])
    return model.eval()


def drafting(draft, model):
    skip = {"attention": [2], "mlp": [1, 3]}
    config = {"drafter": draft, "skip": skip}
    config |= {"exit_layer": EXIT} if DRAFTERS[draft].takes_exit and draft != "none" else {}
    small = tiny_llama(seed=1) if draft == "two_model" else None
    return SelfSpecModel(model, draft_model=small), config


def base_text(model):
    with model.disable_adapter():
        return model.get_base_model().generate(IDS, **OPTIONS)


def ended_early(model, **options):
    """An end token with which rows of the model's own text end apart."""
    own = model.generate(input_ids=IDS, **OPTIONS, **options)[:, IDS.shape[1] :]
    return int(own[0, 3])


# Adapters of parameters, for which PEFT replaces weights while a module is called

PARAMETERS = {
    "llama": ["mlp.down_proj.weight", "self_attn.q_proj.weight"],
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", PARAMETERS)
@FEW
def test_adapters_of_parameters_act(draft, family, dtype):
    config = LoraConfig(
        r=4, init_lora_weights=False, target_modules=[], target_parameters=PARAMETERS[family]
    )
    model = get_peft_model(build(family, "sdpa").to(dtype), config).eval()
    (spec, chosen), ids = drafting(draft, model), IDS.clamp(max=VOCAB - 1)
    options = {"return_dict_in_generate": True, "output_logits": True, "draft": chosen}
    ours = spec.generate(ids, **OPTIONS, **options).logits[0]
    own = model(input_ids=ids, attention_mask=MASK).logits[:, -1].float()
    with model.disable_adapter():
        base = model(input_ids=ids, attention_mask=MASK).logits[:, -1].float()
    assert (ours - own).abs().max() < 0.1 * (base - own).abs().max()
    if dtype == torch.float32:
        text = model.generate(input_ids=ids, **OPTIONS)
        assert torch.equal(spec.generate(ids, draft=chosen, **OPTIONS), text)


def test_weights_that_are_replaced_in_every_call_are_not_packed():
    config = LoraConfig(r=4, target_modules=[], target_parameters=["mlp.down_proj.weight"])
    model = get_peft_model(tiny_llama(), config)
    packed = {part for parts in bundles(model, lambda m: type(m) is nn.Linear) for part in parts}
    wrapped = {layer.mlp.down_proj.get_base_layer() for layer in model.model.model.layers}
    assert packed and packed.isdisjoint(wrapped)


# One adapter per row

NAMES = ["one", "__base__", "two", "one"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("draft", "kind"), [*((draft, "lora") for draft in sorted(DRAFTERS)), ("early_exit", "road")]
)
def test_every_row_has_its_adapter_while_rows_leave(draft, kind):
    config = (
        LoraConfig(**LORA)
        if kind == "lora"
        else RoadConfig(init_weights=False, group_size=16, **WHERE)
    )
    model = lora(one=config, two=config)
    options = {"adapter_names": NAMES, "eos_token_id": ended_early(model, adapter_names=NAMES)}
    own = model.generate(input_ids=IDS, **OPTIONS, **options)
    spec, config = drafting(draft, model)
    assert torch.equal(spec.generate(IDS, draft=config, **OPTIONS, **options), own)
    assert not torch.equal(own, model.generate(input_ids=IDS, **OPTIONS))
    own = model.generate(input_ids=IDS, **OPTIONS)  # no hooks are left
    assert torch.equal(spec.generate(IDS, draft=config, **OPTIONS), own)


@pytest.mark.matrix
@FEW
def test_every_request_has_its_adapter_while_rows_leave_and_join(draft):
    model = lora(one=LoraConfig(**LORA), two=LoraConfig(**LORA))
    prompts = [row[real.bool()].tolist() for row, real in zip(IDS, MASK, strict=True)] * 2
    names, lengths = [*NAMES, *reversed(NAMES)], [3, 9, 5, 12, 7, 2, 9, 4]
    spec, config = drafting(draft, model)
    outputs = spec.generate_batch_iter(
        prompts, batch_size=3, adapter_names=names, max_new_tokens=lengths, do_sample=False,
        draft=config, prefill_chunk_size=5,
    )  # fmt: skip
    for output in outputs:
        number = output.number
        ids = torch.tensor([prompts[number]])
        options = {"max_new_tokens": lengths[number], "do_sample": False}
        own = model.generate(input_ids=ids, adapter_names=[names[number]], **options)
        assert output.error is None
        assert output.generated_tokens == own[0, ids.shape[1] :].tolist()
        assert torch.equal(spec.generate(ids, draft="none", **options), model.generate(
            input_ids=ids, **options
        ))  # fmt: skip


def test_compiled_layers_with_adapters_per_row_run_as_they_are():
    model = lora(one=LoraConfig(**LORA), two=LoraConfig(**LORA))
    own = model.generate(input_ids=IDS, adapter_names=NAMES, **OPTIONS)
    spec = SelfSpecModel(model, kernels="compiled")
    with pytest.warns(UserWarning, match="not compiled .hooks on"):
        out = spec.generate(IDS, adapter_names=NAMES, draft="early_exit", **OPTIONS)
    assert torch.equal(out, own)


def test_disabled_adapters_act_in_no_row():
    model = lora(one=LoraConfig(**LORA))
    spec = SelfSpecModel(model)
    with model.disable_adapter():
        out = spec.generate(IDS, adapter_names=["one"] * 4, draft="early_exit", **OPTIONS)
    assert torch.equal(out, base_text(model))


@pytest.mark.parametrize("names", [NAMES, None], ids=["named", "activated"])
def test_an_exception_leaves_no_hooks_of_the_rows_adapters(names):
    def failing(tokens, scores):
        raise RuntimeError("boom")

    one, two = (LoraConfig(**LORA), LoraConfig(**LORA)) if names else (ALORA, ALORA)
    model = lora(one=one, two=two)
    own, spec = model.generate(input_ids=IDS, **OPTIONS), SelfSpecModel(model)
    with pytest.raises(RuntimeError, match="boom"):
        spec.generate(IDS, adapter_names=names, logits_processor=[failing], **OPTIONS)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(spec.generate(IDS, **OPTIONS), own)


# Activated LoRA

ALORA = LoraConfig(**LORA, alora_invocation_tokens=INVOKED)


def invoking(ids):
    """Prompts that invoke the adapter at their end, in the middle, twice, and not at all."""
    ids = ids.clone()
    for row, places in enumerate(([10], [8], [1, 5], [])):
        for place in places:
            ids[row, place : place + 2] = torch.tensor(INVOKED)
    return ids


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("draft", "side"), [*((draft, "left") for draft in sorted(DRAFTERS)), ("early_exit", "right")]
)
def test_an_activated_adapter_acts_behind_its_invocation_tokens(draft, side):
    model, ids = lora(one=ALORA), invoking(IDS)
    own = model.generate(input_ids=ids, **OPTIONS)[:, ids.shape[1] :]
    with model.disable_adapter():
        base = model.generate(input_ids=ids, **OPTIONS)[:, ids.shape[1] :]
    assert not torch.equal(own[:3], base[:3]) and torch.equal(own[3], base[3])
    spec, config = drafting(draft, model)
    given, mask = ids, MASK
    if side == "right":
        shift = (MASK == 0).sum(-1).tolist()
        given, mask = (
            torch.stack([row.roll(-by) for row, by in zip(rows, shift, strict=True)])
            for rows in (ids, MASK)
        )
    out = spec.generate(given, draft=config, **{**OPTIONS, "attention_mask": mask})
    assert torch.equal(out[:, ids.shape[1] :], own)


@pytest.mark.parametrize("chunk", [None, 3])
def test_requests_and_turns_invoke_an_adapter_too(chunk):
    model, ids = lora(one=ALORA, two=LoraConfig(**LORA)), invoking(IDS)
    spec, options = SelfSpecModel(model), {"max_new_tokens": 6, "do_sample": False}
    names = ["one", "two", "one", "__base__"]
    own = model.generate(input_ids=ids, adapter_names=names, **{**OPTIONS, **options})
    prompts = [row[real.bool()].tolist() for row, real in zip(ids, MASK, strict=True)]
    outputs = spec.generate_batch(
        prompts, adapter_names=names, batch_size=2, prefill_chunk_size=chunk, **options
    )
    texts = [output.generated_tokens for output in outputs.values()]
    assert texts == own[:, ids.shape[1] :].tolist()
    row = ids[2:3]  # the longest one, in two turns
    first = spec.generate(row, return_dict_in_generate=True, **options)
    text = torch.cat([first.sequences, torch.tensor([[3, 4, 5]])], dim=1)
    again = spec.generate(text, past_key_values=first.past_key_values, **options)
    assert torch.equal(again, model.generate(input_ids=text, **options))


def test_the_adapter_that_is_active_in_a_call_counts():
    model, ids = lora(plain=LoraConfig(**LORA), activated=ALORA), invoking(IDS)
    spec = SelfSpecModel(model)
    texts = []
    for name in ("plain", "activated", "plain"):
        model.set_adapter(name)
        own = model.generate(input_ids=ids, **OPTIONS)
        texts.append(own)
        assert torch.equal(spec.generate(ids, draft="early_exit", **OPTIONS), own)
        with model.disable_adapter():
            own = model.generate(input_ids=ids, **OPTIONS)
            assert torch.equal(spec.generate(ids, draft="early_exit", **OPTIONS), own)
    assert torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[1])


def test_offsets_of_the_call_come_first():
    model, offsets = lora(one=ALORA), [5, None, 3, 7]
    own = model.generate(input_ids=IDS, alora_offsets=offsets, **OPTIONS)
    out = SelfSpecModel(model).generate(IDS, alora_offsets=offsets, draft="early_exit", **OPTIONS)
    assert torch.equal(out, own) and not torch.equal(out, base_text(model))


# What is refused


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one"], "adapter_names has 1 entries for 4 rows"),
        (["one"] * 5, "adapter_names has 5 entries for 4 rows"),
        (["one", "one", "other", "one"], "non-existing adapter.*other"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message, monkeypatch):
    spec = SelfSpecModel(lora(one=LoraConfig(**LORA)))
    monkeypatch.setattr(type(spec.engine), "prefill", None)
    with pytest.raises(ValueError, match=message):
        spec.generate(IDS, adapter_names=names, **OPTIONS)
    with pytest.raises(ValueError, match=message.replace("rows", "prompts|rows")):
        spec.generate_batch(IDS.tolist(), adapter_names=names, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["plain", "ia3"])
def test_models_without_an_adapter_per_row_refuse_names(kind):
    model = tiny_llama()
    if kind == "ia3":
        where = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
        model = get_peft_model(model, IA3Config(task_type="CAUSAL_LM", **where)).eval()
    message = "needs a PEFT model" if kind == "plain" else "IA3Model has no adapters per row"
    with pytest.raises(ValueError, match=f"adapter_names.*{message}"):
        SelfSpecModel(model).generate(IDS, adapter_names=["one"] * 4, **OPTIONS)


def test_calls_in_threads_have_adapters_of_their_own():
    """PEFT puts them into the model, where a running call would see them."""
    spec = SelfSpecModel(lora(one=LoraConfig(**LORA), two=LoraConfig(**LORA)))
    options = {"max_new_tokens": 10, "do_sample": False, "draft": "early_exit"}
    names = [None, "one", "two", "__base__"] * 2
    calls = [{} if name is None else {"adapter_names": [name]} for name in names]
    alone = [spec.generate(IDS[2:3], **options, **call) for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        together = [pool.submit(spec.generate, IDS[2:3], **options, **call) for call in calls]
    for text, own in zip(together, alone, strict=True):
        assert torch.equal(text.result(), own)
    assert len({tuple(text[0].tolist()) for text in alone}) == 3


def test_adapters_are_saved_with_the_heads_and_loaded_again(tmp_path):
    tiny_llama(dtype=torch.float32).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    spec = SelfSpecModel(get_peft_model(base, LoraConfig(**LORA)).eval())
    spec.engine.add(LensHead.build(spec.decoder, EXIT, rank=4))
    spec.save_pretrained(tmp_path / "adapter")
    again = SelfSpecModel.from_pretrained(tmp_path / "adapter")
    assert [head.kind for head in again.heads] == ["lens"]
    assert torch.equal(again.generate(IDS, **OPTIONS), spec.generate(IDS, **OPTIONS))


def test_tuners_that_compute_something_for_every_call_are_refused(tmp_path):
    base = tiny_llama(dtype=torch.float32)
    poly = get_peft_model(base, PolyConfig(r=4, n_tasks=2, n_skills=2, **WHERE))
    with pytest.raises(ValueError, match="PolyModel of PEFT computes something for every call"):
        SelfSpecModel(poly)
    lily = get_peft_model(tiny_llama(), LilyConfig(r=4, **WHERE))
    with pytest.raises(ValueError, match=r"LilyModel of PEFT .* from all tokens of a pass"):
        SelfSpecModel(lily)
    get_peft_model(tiny_llama(dtype=torch.float32), LoraConfig(**LORA)).save_pretrained(tmp_path)
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"a": str(tmp_path)})
    base = tiny_llama(dtype=torch.float32)
    base.config.use_cache = False  # X-LoRA asks for it
    mixed = get_peft_model(base, config)
    with pytest.raises(ValueError, match="XLoraModel of PEFT computes something for every call"):
        SelfSpecModel(mixed)


def test_tuners_that_only_pass_a_call_on_are_wrapped():
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, **WHERE)
    model = get_peft_model(tiny_llama("sometimes"), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_E" in name:
                parameter.fill_(1.0)
    own = model.generate(input_ids=IDS, **OPTIONS)
    assert torch.equal(SelfSpecModel(model).generate(IDS, draft="early_exit", **OPTIONS), own)
    assert not torch.equal(own, base_text(model))


def test_tuners_of_several_kinds_are_wrapped_together():
    model = get_peft_model(tiny_llama("sometimes"), LoraConfig(**LORA), mixed=True)
    model.add_adapter("other", LoHaConfig(target_modules=["o_proj"], init_weights=False))
    model.set_adapter(["default", "other"])
    own = model.eval().generate(input_ids=IDS, **OPTIONS)
    for draft in ("early_exit", "tree", "none"):
        assert torch.equal(SelfSpecModel(model).generate(IDS, draft=draft, **OPTIONS), own)
    assert not torch.equal(own, tiny_llama("sometimes").generate(IDS, **OPTIONS))

"""LayerSkip: the paper's schedules, layers dropped by row, exits that are the model's own."""

import json
import math
import random
from collections import Counter

import pytest
import torch
from conftest import VOCAB, gates, tiny_llama
from families import build
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from selfspec.config import load_config
from selfspec.decoder import Decoder, Span
from training.data import Batch, Document, Mixture, pack
from training.finetune_layerskip import FinetuneConfig, finetune, make_model
from training.language.layerskip import (
    LayerSkip,
    LayerSkipConfig,
    LayerStack,
    draw_dropped,
    drop_probabilities,
    exit_weights,
    exits_in_use,
)
from training.language.task import LanguageModelling, Windows, model_inputs
from training.loop.loop import LoopConfig

FAMILIES = ("llama", "gpt2", "falcon")  # falcon's layers return tuples
WIDTH = 12
CHECKED = LoopConfig(steps=8, batch_size=4, micro_batch_size=2, precision="no", save_every=3)


def network(family="llama", **kwargs):
    return build(family, "sdpa", **kwargs).double()


def some_blocks(rows=40, vocab=60, seed=0):
    source = random.Random(seed)
    tokens = [source.randrange(2, vocab) for _ in range(rows * WIDTH)]
    documents = [Document(tokens[i : i + 7], [True] * 7) for i in range(0, len(tokens) - 7, 7)]
    return pack(documents, WIDTH, "noise")


def a_batch(rows=4):
    return Mixture([some_blocks()], [1.0], 0).batch(0, rows)


def task(model, loop=CHECKED, **recipe):
    return LayerSkip(model, {}, LayerSkipConfig(**recipe), loop)


def gradients(task, batch, step=0):
    task.zero_grad()
    loss, _ = task(batch, step, 0.0)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in task.named_parameters() if p.grad is not None}


# The paper's schedules, by hand


def test_layers_are_dropped_the_more_the_higher():
    constant = LayerSkipConfig(p_max=0.4)
    assert drop_probabilities(constant, 3, 7, 9) == pytest.approx([0, 0.4 * 0.41421356, 0.4])


def test_from_scratch_dropout_rises_from_nothing_to_its_peak():
    rising = LayerSkipConfig(p_max=0.4, dropout="rising")
    assert drop_probabilities(rising, 3, 0, 5) == [0, 0, 0]
    middle = 0.41421356 * 0.4
    assert drop_probabilities(rising, 3, 2, 5) == pytest.approx([0, middle * 0.41421356, middle])
    assert drop_probabilities(rising, 3, 4, 5) == drop_probabilities(
        LayerSkipConfig(p_max=0.4), 3, 0, 5
    )


def test_exits_weigh_the_sum_of_the_layers_below():
    every = LayerSkipConfig(e_scale=0.5, curriculum="none")
    # 0.5·(0, 1, 3), then 3 + 0.5·(0 + 1 + 2), over their sum.
    expected = [0, 0.5 / 6.5, 1.5 / 6.5, 4.5 / 6.5]
    assert exit_weights(every, 4, 0, 9) == pytest.approx(expected)


@pytest.mark.parametrize("curriculum", ["rotational", "gradual", "none"])
@pytest.mark.parametrize("depth", [2, 5, 8])
def test_weights_sum_to_one_and_the_model_itself_always_counts(curriculum, depth):
    config = LayerSkipConfig(curriculum=curriculum, rotation=3)
    for step in range(20):
        weights = exit_weights(config, depth, step, 20)
        assert sum(weights) == pytest.approx(1)
        assert weights[-1] > 0


@pytest.mark.parametrize("rotation", [1, 2, 3, 7])
def test_a_rotation_uses_every_exit_once(rotation):
    config = LayerSkipConfig(rotation=rotation)
    uses = Counter(
        layer
        for step in range(5, 5 + rotation)
        for layer, used in enumerate(exits_in_use(config, 7, step, 100))
        if used
    )
    assert [uses[layer] for layer in range(7)] == [1] * 6 + [rotation]


def test_gradual_exits_come_from_the_top_until_half_the_run():
    config = LayerSkipConfig(curriculum="gradual")
    used = [sum(exits_in_use(config, 4, step, 16)) for step in range(16)]
    # Another one every T / 2L = 2 steps.
    assert used == [1, 1, 2, 2, 3, 3, *[4] * 10]
    assert exits_in_use(config, 4, 2, 16) == [False, False, True, True]


# Dropout


def test_the_share_of_dropped_layers_is_its_probability():
    probabilities = [0.0, 0.05, 0.3, 0.9]
    draws = torch.cat([draw_dropped(3, step, range(40), probabilities) for step in range(50)])
    for share, p in zip(draws.double().mean(0).tolist(), probabilities, strict=True):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / len(draws))


def test_what_is_dropped_depends_on_seed_step_and_place_alone():
    one = draw_dropped(0, 5, range(8), [0.5] * 6)
    parts = torch.cat([draw_dropped(0, 5, [place], [0.5] * 6) for place in range(8)])
    assert torch.equal(one, parts)
    assert not torch.equal(one, draw_dropped(0, 6, range(8), [0.5] * 6))
    assert not torch.equal(one, draw_dropped(1, 5, range(8), [0.5] * 6))


def test_micro_batches_draw_what_the_whole_batch_draws():
    model, whole = network(), a_batch(4)
    recipe = {"p_max": 0.9, "curriculum": "none"}
    together, expected = gradients(task(model, **recipe), whole, step=3)
    split = task(model, **recipe)
    split.zero_grad()
    losses = []
    for rows in (slice(0, 1), slice(1, 4)):
        loss, _ = split(Batch(whole.tokens[rows], whole.documents[rows], whole.trained[rows]), 3, 0)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(sum(losses), together)
    for name, parameter in split.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_row_goes_past_the_layer_and_no_other_row_does(family):
    stack, batch = LayerStack(network(family)), a_batch(3)
    inputs = model_inputs(stack.model, batch)
    dropped = draw_dropped(1, 0, range(3), [0.5] * len(stack))
    assert dropped.any() and not dropped.all()
    states = stack.states(inputs, dropped)
    for layer in range(1, len(stack)):
        handed_on = (states[layer] == states[layer - 1]).flatten(1).all(1)
        assert torch.equal(handed_on, dropped[:, layer])
    # Past every layer, all that is left is the embedding.
    alone = stack.states(inputs, torch.ones(3, len(stack), dtype=torch.bool))
    assert all(torch.equal(state, alone[0]) for state in alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_dropout_and_exits_it_is_language_modelling(family):
    model, batch = network(family), a_batch()
    expected = gradients(LanguageModelling(model, {}), batch)
    loss, grads = gradients(task(model, p_max=0, e_scale=0), batch)
    assert loss == expected[0]
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][name], rtol=1e-10, atol=1e-12)


# Exits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_is_the_model_cut_there_under_its_own_norm_and_head(family):
    stack, tokens = LayerStack(network(family)), torch.randint(2, 60, (2, WIDTH))
    inputs, targets = {"input_ids": tokens, "use_cache": False}, tokens.roll(-1, 1)
    decoder = Decoder(stack.model)
    states = stack.states(inputs)
    for depth, state in enumerate(states, start=1):
        cut = decoder.run(tokens, Span(0, depth), decoder.new_slots(2), unembed=True).output
        expected = torch.nn.functional.cross_entropy(
            cut.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )
        torch.testing.assert_close(stack.loss(state, inputs, targets), expected)


def test_scaling_and_soft_capping_of_the_logits_apply():
    stack = LayerStack(network("granite"))
    tokens = torch.randint(2, 60, (2, WIDTH))
    inputs, targets = {"input_ids": tokens, "use_cache": False}, tokens.roll(-1, 1)
    own = torch.nn.functional.cross_entropy(
        stack.model(**inputs).logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    assert stack.loss(stack.states(inputs)[-1], inputs, targets) == own


def test_held_out_figures_end_with_the_model_s_own():
    model = network()
    windows = Windows(torch.randint(2, 60, (5, WIDTH)), 321)
    bits = LayerSkip(model, {"noise": windows}, LayerSkipConfig(p_max=0.5), CHECKED).exit_bits(2)
    assert len(bits["noise"]) == model.config.num_hidden_layers
    with torch.no_grad():
        assert bits["noise"][-1] == pytest.approx(windows.measure(model))


def test_no_exit_s_logits_wait_for_the_backward_pass():
    skip, kept = task(network(), curriculum="none"), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        skip(a_batch(), 0, 0.0)
    weights = {id(parameter) for parameter in skip.parameters()}
    vocab = skip.model.config.vocab_size
    assert not [t for t in kept if t.shape[-1:] == (vocab,) and id(t) not in weights]


@pytest.mark.parametrize("curriculum", ["rotational", "gradual", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_and_every_exit_learns(family, curriculum):
    skip = task(network(family), p_max=0.5, e_scale=1.0, curriculum=curriculum, rotation=4)
    learned, exits = set(), set()
    for step in range(CHECKED.steps):
        _, metrics = skip(a_batch(), step, 0.0)
        exits |= metrics.keys()
        learned |= {n for n, grad in gradients(skip, a_batch(), step)[1].items() if grad.any()}
    assert {n for n, p in skip.named_parameters() if p.requires_grad} - learned <= useless(skip)
    # The paper gives the first exit no weight.
    assert exits == {f"exit_{depth}" for depth in range(2, len(skip.stack) + 1)}


def useless(skip):
    """Parameters that no loss of the model reaches: a key's bias moves no attention weight."""
    _, grads = gradients(LanguageModelling(skip.model, {}), a_batch())
    return {n for n, _ in skip.named_parameters() if n not in grads or not grads[n].any()}


# Nothing stays on the model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_clean_afterwards_an_exception_or_not(family):
    skip, batch = task(network(family), p_max=0.5, curriculum="none"), a_batch()
    gradients(skip, batch)
    assert gates(skip.model) == []
    skip.stack.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        skip(batch, 0, 0.0)
    assert gates(skip.model) == []


def test_recomputed_layers_are_dropped_alike():
    model = network()
    plain = gradients(task(model, p_max=0.9, curriculum="none"), a_batch(), 2)
    # Older transformers call it by another name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    recomputed = task(model, p_max=0.9, curriculum="none").train()
    again = gradients(recomputed, a_batch(), 2)
    assert plain[0] == again[0]
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 1}, "needs 2 layers or more, got 1"),
        ({"layerdrop": 0.1}, r"drops whole layers by itself \(layerdrop 0.1\)"),
    ],
)
def test_models_it_cannot_train_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LayerStack(tiny_llama(**config))


# Runs


@pytest.fixture
def experiment(tmp_path, tokenizer):
    """A target on disk, text, and the config of a short run over them."""
    tiny_llama(dtype=torch.float32, spread=0.1).to(torch.bfloat16).save_pretrained(tmp_path / "old")
    tokenizer.save_pretrained(tmp_path / "old")
    words = random.Random(0).choices(["the", "her", "stop", "in", "an", "xyz"], k=3000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    text = {"files": [str(tmp_path / "text.txt")]}
    return {
        "model": str(tmp_path / "old"),
        "output": str(tmp_path / "run"),
        "data": [text],
        "block_size": 16,
        "held_out": {"sources": {"words": text}, "window": 16, "windows": 20},
        "layerskip": {"e_scale": 1.0, "rotation": 2},
        "optimizer": {"lr": 1e-2},
        "loop": {"steps": 30, "batch_size": 4, "micro_batch_size": 4, "precision": "no"},
    }


def test_a_new_checkpoint_is_made_compared_and_said_to_be_new(experiment, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    comparison = finetune(FinetuneConfig(**experiment))
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    said = " ".join(capsys.readouterr().out.split())
    assert "LayerSkip changes the model" in said and "4 (full depth)" in said
    assert comparison.after["words"][0] < comparison.before["words"][0]
    facts = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert facts["full_depth"]["words"] == {
        "before": comparison.before["words"][-1],
        "after": comparison.after["words"][-1],
    }
    assert facts["exits"]["words"]["after"] == comparison.after["words"][:3]
    new = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert new.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == VOCAB


def test_the_comparison_is_of_the_checkpoint_that_was_saved(experiment, tmp_path):
    first = finetune(FinetuneConfig(**experiment))
    second = finetune(
        FinetuneConfig(
            **experiment
            | {"model": str(tmp_path / "run" / "model"), "output": str(tmp_path / "more")}
        )
    )
    assert second.before["words"] == pytest.approx(first.after["words"], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_changes_its_targets_alone_and_is_merged(experiment, tmp_path, family):
    if family == "gpt2":  # its matrices are Conv1D, which stand the other way round
        shape = GPT2Config(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=4, n_positions=64)
        GPT2LMHeadModel(shape).save_pretrained(tmp_path / "old")
    targets = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"]}[family]
    config = FinetuneConfig(**experiment, lora={"r": 2, "alpha": 4, "target_modules": targets})
    trained = [n for n, p in make_model(config).named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 4 * len(targets)
    assert all("lora_" in name for name in trained)
    finetune(config)
    old = load_file(tmp_path / "old" / "model.safetensors")
    new = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {n for n in old if n.endswith("weight") and any(t in n for t in targets)}
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("inside", ["", "model"])
def test_the_input_is_never_the_output(experiment, tmp_path, inside):
    source = tmp_path / "run" / inside
    config = FinetuneConfig(**experiment | {"model": str(source)})
    with pytest.raises(ValueError, match="would overwrite the model"):
        finetune(config)
    assert not (tmp_path / "run").exists()


def test_a_quantized_checkpoint_is_refused(experiment, tmp_path):
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantized"):
        finetune(FinetuneConfig(**experiment))


def test_an_adapter_is_refused(experiment, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "old")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds an adapter"):
        finetune(FinetuneConfig(**experiment | {"model": str(tmp_path / "adapter")}))


def test_there_has_to_be_text_to_compare_on(experiment):
    with pytest.raises(ValueError, match="sources is empty"):
        FinetuneConfig(**experiment | {"held_out": {}})


def test_the_example_config_is_valid(request):
    path = request.config.rootpath / "configs" / "layerskip.yaml"
    assert load_config(FinetuneConfig, path).layerskip == LayerSkipConfig()

"""What the user does to a model stays right: checkpointing, compiled parts, hooks on any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import greedy, prompt, tiny_llama
from families import HYBRIDS, VOCAB, build
from families import model_of as model_of_family
from torch import Tensor, nn
from transformers.utils import ModelOutput

from selfspec import SelfSpecModel
from selfspec.decoder import Decoder

DRAFTS: dict[str, Any] = {
    "none": "none",
    "early_exit": {"exit_layer": 2, "num_draft_tokens": 4},
    "tree": {"drafter": "tree", "exit_layer": 2},
    "skip_sublayers": {"drafter": "skip_sublayers", "skip": {"attention": [2], "mlp": [1, 2]}},
    "default": None,
}
FAMILIES = ("llama", "gemma2", "opt", "gpt2", "granitemoe", "qwen3_next")
NEW = 14


def model_of(family: str, attention: str, agreement: float = 1.0) -> Any:
    """A model in the most precise dtype that the family allows."""
    if family in HYBRIDS:
        return build(family, attention, agreement)
    return model_of_family(family, attention, agreement)


def ours(model: Any, draft: str, **options: Any) -> Tensor:
    """What selfspec writes behind three padded rows."""
    ids, mask = prompt(5, 11, 8, vocab=VOCAB)
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    spec = SelfSpecModel(model)
    return spec.generate(ids, attention_mask=mask, draft=DRAFTS[draft], **options)[:, -NEW:]


def own(model: Any) -> Tensor:
    """What the model's own `generate` writes behind the same rows, each alone."""
    rows = zip(*prompt(5, 11, 8, vocab=VOCAB), strict=True)
    texts = [greedy(model, row[mask.bool()][None], max_new_tokens=NEW) for row, mask in rows]
    return torch.cat([text[:, -NEW:] for text in texts])


# Training

# The name that all supported releases of transformers know.
OLD_NAME = "ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"


@pytest.mark.matrix
@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_gradient_checkpointing_in_training_mode_changes_nothing(draft, use_cache) -> None:
    model = tiny_llama()
    expected = own(model)
    model.gradient_checkpointing_enable()
    model.train()
    # Without use_cache=False the model's own text is wrong in this state.
    assert torch.equal(ours(model, draft, use_cache=use_cache), expected)
    assert model.training and model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3_next", "phi3"])
def test_families_with_checkpointing(family: str) -> None:
    model = model_of(family, "eager", 0.3)
    expected = own(model)
    model.gradient_checkpointing_enable()
    model.train()
    assert torch.equal(ours(model, "early_exit"), expected)


# Compiled parts

COMPILED: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model.compile(backend="eager"),
    "model.forward": lambda model: set_forward(model),
    "body": lambda model: model.model.compile(backend="eager"),
    "body.forward": lambda model: set_forward(model.model),
    "body, wrapped": lambda model: wrap(model, "model"),
    "head": lambda model: model.lm_head.compile(backend="eager"),
    "head, wrapped": lambda model: wrap(model, "lm_head"),
    "norm": lambda model: model.model.norm.compile(backend="eager"),
    "rotary": lambda model: model.model.rotary_emb.compile(backend="eager"),
    "layers": lambda model: [layer.compile(backend="eager") for layer in model.model.layers],
    "attention": lambda model: model.model.layers[2].self_attn.compile(backend="eager"),
}


def set_forward(module: Any) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


def wrap(parent: Any, name: str) -> None:
    setattr(parent, name, torch.compile(getattr(parent, name), backend="eager"))


SLOW_TO_COMPILE = ("layers", "attention")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.slow] * (part in SLOW_TO_COMPILE)) for part in COMPILED],
)
@pytest.mark.parametrize("draft", ["early_exit", "skip_sublayers"])
def test_compiled_parts_run(part: str, draft: str) -> None:
    torch._dynamo.reset()
    expected = own(tiny_llama())
    model = tiny_llama()
    COMPILED[part](model)
    before = [dict(vars(module)) for module in model.modules()]
    assert torch.equal(ours(model, draft), expected)
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.slow
def test_compiled_layers_with_a_recurrent_state_run() -> None:
    torch._dynamo.reset()
    expected = own(build("qwen3_next", "eager", agreement=0.3))
    model = build("qwen3_next", "eager", agreement=0.3)
    for layer in Decoder(model).layers:
        layer.compile(backend="eager")
    assert torch.equal(ours(model, "early_exit"), expected)


# Hooks


def steer_states(_, __, output: Any) -> Any:
    states = output.last_hidden_state
    output.last_hidden_state = states + torch.linspace(-1, 1, states.shape[-1], dtype=states.dtype)
    return output


def steer_as_dict(_, __, output: Any) -> Any:
    """As libraries do that go through whatever a module returns."""
    assert isinstance(output, ModelOutput)
    parts = {name: steered(value) for name, value in output.items()}
    return type(output)(**parts)


def steered(value: Any) -> Any:
    return value.roll(1, -1) if isinstance(value, Tensor) else value


def shift_logits(_, __, output: Any) -> Any:
    output.logits = output.logits.roll(1, -1)
    return output


def replace_tokens(_, args: Any, kwargs: dict[str, Any]) -> Any:
    ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    ids = torch.where(ids % 3 == 1, ids - 1, ids)
    return (
        (args, {**kwargs, "input_ids": ids})
        if "input_ids" in kwargs
        else ((ids, *args[1:]), kwargs)
    )


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "body, output": lambda model, body: body.register_forward_hook(steer_states),
    "body, as a dict": lambda model, body: body.register_forward_hook(steer_as_dict),
    "body, input": lambda model, body: body.register_forward_pre_hook(
        replace_tokens, with_kwargs=True
    ),
    "model, output": lambda model, body: model.register_forward_hook(shift_logits),
    "model, as a dict": lambda model, body: model.register_forward_hook(steer_as_dict),
    "model, input": lambda model, body: model.register_forward_pre_hook(
        replace_tokens, with_kwargs=True
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_act_as_in_plain_decoding(family: str, hook: str) -> None:
    model = model_of(family, "eager", 0.3)
    plain = own(model)
    HOOKS[hook](model, Decoder(model).base)
    expected = own(model)
    assert not torch.equal(expected, plain), "the hook changes nothing, so it shows nothing"
    for draft in ("none", "early_exit", "tree", "default"):
        if draft == "tree" and family == "qwen3_next":
            continue  # recurrent layers run no trees
        assert torch.equal(ours(model, draft), expected), draft


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_act_in_a_prefill_in_pieces(hook: str) -> None:
    model = model_of("llama", "eager", 0.3)
    HOOKS[hook](model, model.model)
    assert torch.equal(ours(model, "early_exit", prefill_chunk_size=3), own(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_see_each_token_once(family: str) -> None:
    model = model_of(family, "eager")
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> None:
        tokens = seen.setdefault(name, [])

        def note(_: Any, args: Any, kwargs: dict[str, Any], *output: Any) -> None:
            tokens.append(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

        module.register_forward_pre_hook(note, with_kwargs=True)
        module.register_forward_hook(note, with_kwargs=True)

    watch("body", Decoder(model).base)
    watch("model", model)
    ids, _ = prompt(6, vocab=VOCAB)

    def calls(run: Callable[[], Any]) -> list[Any]:
        for tokens in seen.values():
            tokens.clear()
        run()
        return [[each.tolist() for each in tokens] for tokens in seen.values()]

    expected = calls(lambda: greedy(model, ids, max_new_tokens=NEW))
    spec = SelfSpecModel(model)
    seen_here = calls(lambda: spec.generate(ids, max_new_tokens=NEW, do_sample=False, draft="none"))
    assert seen_here == expected


def test_read_outs_of_drafts_are_no_calls_of_the_model() -> None:
    model = model_of("llama", "eager", 0.3)
    model.register_forward_pre_hook(replace_tokens, with_kwargs=True)  # needs token ids
    assert torch.equal(ours(model, "default"), own(model))

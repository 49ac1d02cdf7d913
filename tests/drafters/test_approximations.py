"""Approximate drafts: weights in fewer bits, fewer keys. What is written is the model's own."""

import copy
from functools import cache

import pytest
import torch
from conftest import EXIT, equal_to_generate, greedy, prompt, requests_equal_to_generate, tiny_llama
from drafter_tools import draft as draft_of
from drafter_tools import drawn_text
from families import ALL_ROWS, CASES_BY_FAMILY, HYBRIDS, LONG_ROW, model_of, own_text, prompts
from families import build as build_family
from head_tools import KINDS, own_head
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.decoder import Approximation, Decoder, Span
from selfspec.decoder.cache import SlotCache
from selfspec.decoder.kernels.low_precision import KINDS as ROUNDED
from selfspec.decoder.kernels.low_precision import Int4Weights, round_to_4_bits
from selfspec.drafters import DRAFTERS
from selfspec.generation.loop import Session

MODEL_DRAFTERS = sorted(set(DRAFTERS) - {"none", "prompt_lookup", "lookahead"})
FAMILIES = ("llama", "gemma3_text", "gpt2", "mixtral")
WHERE = ("head", "all")
HOW = {
    "int8": {"precision": "int8"},
    "int4": {"precision": "int4"},
    "window": {"window": 3, "sinks": 2},
    "LM head": {"precision": "int4", "lm_head_precision": "int8"},
    "both": {"precision": "int4", "window": 3, "sinks": 2},
}
DEPTH = 4  # of `tiny_llama`
IDS, MASK = prompt(4, 19, 12)


def drafts(drafter, **more):
    return draft_of(drafter, num_draft_tokens=3, **more)


@cache
def family(name):
    model = model_of(name, CASES_BY_FAMILY[name])
    return model, own_text(model, *prompts("left"))


def spec_of(model, drafter):
    return SelfSpecModel(model, draft_model=model if drafter == "two_model" else None)


# Exactness


# Experts have no copies, which is refused below: there precision is for the LM head alone.
CASES = [
    (name, how)
    for name in FAMILIES
    for how in HOW
    if how != "LM head" and (name, how) != ("mixtral", "both")
]


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [LONG_ROW, ALL_ROWS], ids=["one row", "ragged"])
@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_greedy_text_is_the_models_own(name, drafter, how, rows):
    model, expected = family(name)
    experts = name == "mixtral" and "precision" in HOW[how]
    tokens, mask = prompts("left")
    out = spec_of(model, drafter).generate(
        tokens[rows],
        attention_mask=mask[rows],
        max_new_tokens=expected.shape[1],
        do_sample=False,
        draft=drafts(drafter, approximate="head" if experts else "all", **HOW[how]),
    )
    assert torch.equal(out[:, -expected.shape[1] :], expected[rows])


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("drafter", ["early_exit", "tree", "cascade"])
@pytest.mark.parametrize("agreement", ["seldom", "always"])
def test_the_whole_model_drafts_for_itself(agreement, drafter, how):
    spec = SelfSpecModel(tiny_llama(agreement))
    draft = drafts(drafter, exit_layer=DEPTH, **HOW[how])
    equal_to_generate(spec, IDS, MASK, draft=draft, max_new_tokens=24)
    assert spec.last_stats.drafted > 0


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["int8", "both"])
@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_rows_that_come_and_go(drafter, how):
    texts = [row[real.bool()].tolist() for row, real in zip(IDS, MASK, strict=True)]
    draft = drafts(drafter, approximate="all", **HOW[how])
    requests_equal_to_generate(spec_of(tiny_llama("sometimes"), drafter), texts, draft=draft)


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOW)
def test_layers_that_are_chosen_while_generating(how):
    model, skip = tiny_llama("sometimes"), {"search": "clasp", "layers": 1, "every": 4}
    draft = {"drafter": "skip_sublayers", "skip": skip, "approximate": "all", **HOW[how]}
    equal_to_generate(SelfSpecModel(model), IDS[1:2], draft=draft, max_new_tokens=24)


@pytest.mark.matrix
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head(kind, how, where):
    model = tiny_llama("sometimes")
    head = own_head(Decoder(model), kind, EXIT)
    spec = SelfSpecModel(model, [head])
    draft = drafts("early_exit", approximate=where, **HOW[how])
    call = {"attention_mask": MASK, "max_new_tokens": 16, "draft": draft}
    no_keys = kind.split()[0] in ("medusa", "dflash")
    no_keys |= kind in ("shared", "lens", "lora") and where == "head"
    if "window" in HOW[how] and no_keys:
        with pytest.raises(ValueError, match="window=3 limits the keys of layers that draft"):
            spec.generate(IDS, **call)
        return
    equal_to_generate(spec, IDS, MASK, max_new_tokens=16, draft=draft)
    assert spec.last_stats.drafted > 0


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_a_seed_draws_the_text_of_exact_drafts(drafter, how):
    spec = spec_of(tiny_llama("sometimes"), drafter)
    expected = drawn_text(spec, IDS, MASK, {"rule": "coupled"}, max_new_tokens=14)
    draft = drafts(drafter, rule="coupled", approximate="all", **HOW[how])
    assert torch.equal(drawn_text(spec, IDS, MASK, draft, max_new_tokens=14), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers_forget_approximate_drafts(name):
    model = build_family(name, "sdpa")
    ids, mask = prompt(11, 5, vocab=61)
    spec = SelfSpecModel(model)
    depth, rows = spec.decoder.depth, slice(0, 1)  # one row without padding
    expected = greedy(model, ids[rows], mask[rows], max_new_tokens=12)
    for how in ({"precision": "int8"}, {"window": 3}):
        draft = drafts("early_exit", exit_layer=depth, **how)
        try:
            out = spec.generate(ids[rows], draft=draft, max_new_tokens=12)
        except ValueError as refused:
            assert "experts are stacked" in str(refused) or "no plain linear layer" in str(refused)
            continue
        assert torch.equal(out, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
@pytest.mark.parametrize("how", HOW)
def test_committed_slots_hold_the_models_own_keys_after_every_round(how, drafter, monkeypatch):
    spec = SelfSpecModel(tiny_llama("seldom"))
    decoder, step, rounds = spec.decoder, Session.step, []

    def checked(session, state):
        step(session, state)
        for place, row in enumerate(state.context.rows):
            length = state.slots.lengths[place]
            text = torch.tensor([state.context.text[row][:length]])
            fresh = decoder.new_slots(1)
            decoder.run(text, Span(0, decoder.depth), fresh)
            for mine, own in zip(state.slots.layers, fresh.layers, strict=True):
                for kept, right in zip(mine.buffers, own.buffers, strict=True):
                    torch.testing.assert_close(kept[place, :, :length], right[0, :, :length])
        rounds.append(state.rows)

    monkeypatch.setattr(Session, "step", checked)
    draft = drafts(drafter, exit_layer=DEPTH, **HOW[how])
    spec.generate(IDS, attention_mask=MASK, draft=draft, max_new_tokens=10)
    assert len(rounds) > 2


@pytest.mark.matrix
@pytest.mark.parametrize("how", HOW)
def test_an_int8_cache(how):
    model = tiny_llama("sometimes")
    spec = SelfSpecModel(model, kv_cache_dtype="int8")
    options = {"attention_mask": MASK, "max_new_tokens": 16}
    plain = spec.generate(IDS, draft="none", **options)
    draft = drafts("early_exit", exit_layer=DEPTH, **HOW[how])
    assert torch.equal(spec.generate(IDS, draft=draft, **options), plain)


def test_an_adapter_on_top():
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(tiny_llama("sometimes"), config).eval()
    spec = SelfSpecModel(model)
    draft = drafts("early_exit", exit_layer=DEPTH, precision="int8")
    out = spec.generate(IDS, attention_mask=MASK, draft=draft, max_new_tokens=16)
    own = model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=16, do_sample=False)
    assert torch.equal(out, own)
    assert spec.last_stats.acceptance_rate > 0.5  # with the adapter, whose weights are not rounded


class Opinion:
    """Adds what the model itself says after the last token; each opinion is asked for once."""

    def __init__(self, model):
        self.model, self.known = model, {}

    def __call__(self, text, scores):
        last = text[:, -1:]
        if (key := tuple(last.flatten().tolist())) not in self.known:
            self.known[key] = self.model(last, use_cache=False).logits[:, -1]
        return scores + self.known[key].roll(1, -1)

    def fork(self):
        return self  # what it knows does not depend on the drafts that it sees


@pytest.mark.parametrize("how", HOW)
def test_a_processor_that_calls_the_model_gets_the_models_own_output(how):
    model, ids, options = tiny_llama("seldom"), IDS[1:2], {"max_new_tokens": 24}
    draft = drafts("early_exit", exit_layer=DEPTH, **HOW[how])
    text = SelfSpecModel(model).generate(
        ids, draft=draft, logits_processor=[Opinion(model)], **options
    )
    assert torch.equal(text, greedy(model, ids, logits_processor=[Opinion(model)], **options))


# What drafts are like


def acceptance(model, **draft):
    spec = SelfSpecModel(model)
    spec.generate(IDS, attention_mask=MASK, draft=drafts("early_exit", **draft), max_new_tokens=24)
    return spec.last_stats.acceptance_rate


def test_more_bits_and_more_keys_are_accepted_more_often():
    model, whole = tiny_llama("seldom"), {"exit_layer": DEPTH}
    assert acceptance(model, window=100, **whole) == 1  # as many as there are
    eight, four = (acceptance(model, precision=p, **whole) for p in ("int8", "int4"))
    mixed = acceptance(model, precision="int4", lm_head_precision="int8", **whole)
    assert 1 > eight > mixed > four > acceptance(model, exit_layer=EXIT)
    few, some = (acceptance(model, window=window, **whole) for window in (2, 12))
    assert few < some < 1


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("outputs", [32, 61])
@pytest.mark.parametrize("inputs", [40, 64, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_weights(precision, outputs, inputs, dtype):
    source = torch.Generator().manual_seed(0)
    linear = nn.Linear(inputs, outputs, dtype=dtype)
    nn.init.normal_(linear.weight, generator=source)
    made = ROUNDED[precision]([linear])
    assert sum(t.nbytes for t in made.tensors) == made.nbytes(outputs, inputs)
    states = torch.randn(3, 2 * inputs + 2, generator=source).to(dtype)[:, 1 : inputs + 1]
    with torch.inference_mode():
        found, full = made(states[:, None]), linear(states[:, None])
        rounded = made(torch.eye(inputs, dtype=dtype)) - linear.bias
    assert found.shape == full.shape and found.dtype == dtype and bool(found.isfinite().all())
    weight = rounded.float().T
    step = 2 * linear.weight.abs().amax() / (255 if precision == "int8" else 15)
    assert (weight - linear.weight.float()).abs().amax() < 0.55 * step + 0.03
    expected = states.float() @ weight.T + linear.bias.float()
    assert (found[:, 0].float() - expected).norm() < 0.02 * expected.norm()


def test_four_bits_are_the_nearest_of_sixteen_values():
    groups = torch.randn(7, 3, 32, generator=torch.Generator().manual_seed(1))
    numbers, scales, zeros = round_to_4_bits(groups)
    assert numbers.amin() == 0 and numbers.amax() == 15
    values = (torch.arange(16.0) - 8) * scales.float()[..., None] + zeros.float()[..., None]
    nearest = (groups[..., None] - values[..., None, :]).abs().amin(-1)
    chosen = (groups - values.gather(-1, numbers.long())).abs()
    torch.testing.assert_close(chosen, nearest)


def test_pieces_are_packed_as_the_whole_would_be():
    linear = nn.Linear(64, 2 * 256 + 48, bias=False)
    packed, _ = Int4Weights([linear]).tensors
    numbers, _, _ = round_to_4_bits(linear.weight.detach().unflatten(1, (-1, 32)))
    assert torch.equal(packed, torch._convert_weight_to_int4pack_for_cpu(numbers.flatten(1), 1))


def test_copies_follow_weights_that_change():
    model = tiny_llama("seldom")
    draft = drafts("early_exit", exit_layer=DEPTH, precision="int8")
    spec = SelfSpecModel(model)
    for seed in (1, 2):
        spec.generate(IDS, attention_mask=MASK, draft=draft, max_new_tokens=16)
        assert spec.last_stats.acceptance_rate > 0.7
        with torch.no_grad():
            for own, other in zip(
                model.parameters(), tiny_llama("seldom", seed=seed).parameters(), strict=True
            ):
                own.copy_(other)


def an_adapter_of_keys(model):
    get_peft_model(model, LoraConfig(target_modules=["k_proj"], init_lora_weights=False)).eval()


def more_tokens(model):
    model.resize_token_embeddings(90)


def fewer_tokens(model):
    model.resize_token_embeddings(61)  # as many as before in multiples of 16


def a_bias(model):
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.randn(32).double())


@pytest.mark.matrix
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("change", [an_adapter_of_keys, more_tokens, fewer_tokens, a_bias])
def test_copies_follow_layers_that_change(change, precision, tied):
    model = tiny_llama("seldom", num_key_value_heads=4, tie_word_embeddings=tied)
    ids, draft = IDS.clamp(max=60), drafts("early_exit", exit_layer=DEPTH, precision=precision)

    def accepted(spec):
        equal_to_generate(spec, ids, MASK, draft=draft, max_new_tokens=16)
        return spec.last_stats.accepted

    spec = SelfSpecModel(model)
    accepted(spec)
    change(model)
    assert accepted(spec) == accepted(SelfSpecModel(copy.deepcopy(model)))  # copies made anew


def test_nothing_is_left_in_the_model():
    model = tiny_llama()
    before = {name: dict(part.__dict__) for name, part in model.named_modules()}
    draft = drafts("early_exit", exit_layer=DEPTH, precision="int4", window=2)
    SelfSpecModel(model).generate(IDS, attention_mask=MASK, draft=draft, max_new_tokens=6)
    for name, part in model.named_modules():
        assert part.__dict__.keys() == before[name].keys()


@pytest.mark.parametrize("precision", ROUNDED)
def test_what_info_announces_is_what_is_taken(precision):
    spec = SelfSpecModel.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16)
    decoder = spec.decoder
    announced = decoder.copy_bytes(precision)
    draft = {"exit_layer": decoder.depth, "precision": precision}
    spec.generate(torch.tensor([[5, 6, 7]]), draft=draft, max_new_tokens=4)
    assert sum(announced.values()) == decoder.gates.low_precision.nbytes
    assert sum(announced.values()) < {"int8": 0.55, "int4": 0.35}[precision] * sum(
        part.weight.nbytes
        for root in (*decoder.layers, decoder.lm_head, *spec.heads)
        for part in root.modules()
        if isinstance(part, nn.Linear)
    )


def test_a_smaller_model_drafts_with_fewer_bits_as_a_whole():
    model, small = tiny_llama("seldom"), tiny_llama("seldom", num_hidden_layers=2)
    spec = SelfSpecModel(model, draft_model=small)

    def copies(**more):
        draft = DraftConfig.of({"drafter": "two_model", "precision": "int8", **more})
        equal_to_generate(spec, IDS, MASK, draft=draft, max_new_tokens=8)
        decoder = spec.engine.draft_models.chosen(draft).decoder
        return decoder.gates.low_precision.nbytes, decoder.copy_bytes("int8")

    taken, sizes = copies(approximate="head")
    assert taken == sizes["lm_head"]
    taken, sizes = copies()
    assert taken == sizes["lm_head"] + sizes["layers"] > sizes["lm_head"]


def test_what_is_refused_is_not_announced():
    announced = Decoder(model_of("mixtral", "sdpa")).copy_bytes("int8")
    assert announced["layers"] == 0 < announced["lm_head"]


# The view of the slots


def visible(slots: SlotCache, states: Tensor, offset: int, sinks: int, recent: int):
    """What a pass of these `[rows, heads, width, dim]` states sees, by a view and by all slots."""
    window = slots.window(states.shape[2], offset)
    window.view = slots.view(window, sinks, recent)
    outer = slots.set_window(window, {})
    keys, values = slots.update(states, -states, 0)
    mask = slots.mask(None, states.dtype)
    slots.set_window(*outer)
    assert window.view is not None
    return keys, values, mask[:, 0] == 0, window


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("lengths", [(30,), (30, 30), (30, 9, 3), (12, 30)])
@pytest.mark.parametrize("sinks", [0, 4])
def test_a_view_shows_the_first_and_the_most_recent_keys(lengths, sinks, kv):
    recent, rows = 5, len(lengths)
    source = torch.Generator().manual_seed(0)

    def states(width):
        return torch.randn(rows, 2, width, 8, generator=source)

    slots = SlotCache((None,), rows, kv_cache_dtype=kv)
    with slots.writing(max(lengths)):
        slots.update(states(max(lengths)), states(max(lengths)), 0)
    slots.commit(lengths)
    for _ in range(3):  # rounds
        for offset in range(3):  # drafts, each of which adds to the view of the one before
            keys, values, seen, window = visible(slots, states(1), offset, sinks, recent)
            own, _ = slots.layers[0].seen(window.end)
            for row, length in enumerate(slots.lengths):
                end = length + offset + 1
                near = range(max(0, length - recent), end)
                expected = sorted({*range(min(sinks, end)), *near})
                torch.testing.assert_close(
                    keys[row, :, seen[row, 0]], own[row][:, expected], rtol=0, atol=0
                )
                assert values.shape == keys.shape
        slots.commit([1 + row % 3 for row in range(rows)])


def test_drafts_are_those_of_the_model_with_the_other_keys_hidden():
    model, sinks, recent = tiny_llama("seldom"), 2, 4
    decoder = Decoder(model)
    ids = prompt(20)[0]
    slots = decoder.new_slots(1)
    with torch.inference_mode(), decoder:
        decoder.run(ids[:, :-1], Span(0, DEPTH), slots)
        slots.commit([19])
        with decoder.approximating(Approximation(window=recent, sinks=sinks, layers=True)):
            found = decoder.run(ids[:, -1:], Span(0, DEPTH), slots, unembed=True).output
    places = torch.arange(20)
    hidden = places > places[:, None]  # what is in the slots was computed in full
    hidden[-1] = ~((places >= 19 - recent) | (places < sinks))
    mask = torch.zeros(1, 1, 20, 20, dtype=torch.float64)
    mask.masked_fill_(hidden, torch.finfo(torch.float64).min)
    with torch.no_grad():
        own = model(ids, attention_mask=mask).logits[:, -1:]
    torch.testing.assert_close(found, own)


# Refusals


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"drafter": "prompt_lookup", "precision": "int8"}, "'prompt_lookup' runs none to draft"),
        ({"drafter": "lookahead", "window": 8}, "'lookahead' runs none to draft"),
        ({"exit_layer": DEPTH}, "exit_layer must be in"),
        ({"exit_layer": DEPTH, "precision": "int8", "approximate": "head"}, "leave approximate"),
        ({"exit_layer": DEPTH, "precision": "int8", "head": "block"}, "set head='shared'"),
        ({"window": 8, "approximate": "head"}, "limits the keys of layers that draft"),
        ({"approximate": "all"}, "says where precision and window apply"),
        ({"sinks": 2}, "set window, or leave it out"),
        ({"precision": "int3"}, "precision: .*'int8'"),
        ({"window": 0}, "window: .*got 0"),
    ],
)
def test_what_would_do_nothing_is_refused(draft, message):
    with pytest.raises(ValueError, match=message):
        SelfSpecModel(tiny_llama()).generate(IDS, attention_mask=MASK, draft=draft)


class Packed(nn.Linear):
    """A linear map of another library, whose weight is not its values."""


def packed(model):
    for layer in model.model.layers:
        for parent, name in ((layer.mlp, "up_proj"), (layer.mlp, "down_proj")):
            linear = getattr(parent, name)
            other = Packed(linear.in_features, linear.out_features, bias=False)
            other.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
            setattr(parent, name, other)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: model_of("mixtral", "sdpa"), "experts are stacked in three dimensions"),
        (lambda: packed(tiny_llama()), "a weight is quantized already"),
    ],
)
def test_layers_without_copies_are_refused_and_their_lm_head_is_not(model, message):
    decoder = Decoder(model())
    with pytest.raises(ValueError, match=message):
        decoder.check_approximation(Approximation("int4", layers=True))
    decoder.check_approximation(Approximation("int4", "int4"))


def test_compiled_layers_have_no_copies():
    spec = SelfSpecModel(tiny_llama(), kernels="compiled")
    with pytest.raises(ValueError, match="choose other kernels than 'compiled'"):
        spec.generate(IDS, draft={"precision": "int8", "exit_layer": DEPTH})

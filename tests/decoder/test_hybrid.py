"""Models with recurrent layers: rejected tokens leave no trace in their states."""

from __future__ import annotations

import inspect
import random
import sys
import types
from functools import partial
from itertools import pairwise
from typing import Any

import families
import pytest
import torch
from conftest import ContraryHead, gates
from families import HYBRIDS, LAYERS, RECURRENT, VOCAB, build
from fit_tools import EVERY_KIND, WORDS, settings, write_target
from head_tools import assert_reads_as_forced, own_head, record
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from selfspec import SelfSpecModel
from selfspec.apps.cli.info import describe
from selfspec.apps.export.draft_model import fold
from selfspec.decoder import CACHE, Decoder, Packing, Span
from selfspec.generation.loop import Session
from selfspec.heads import BlockHead, FusedHead, SharedHead
from training.exits import report
from training.fit_heads import fit

NEW_TOKENS = 10
LENGTHS = (5, 11, 8)
LAYERS_OWN = ("block", "fused")
EXITS = (1, LAYERS // 2, LAYERS - 1)
DRAFTS = (1, 4, 8)
AGREEMENTS = (1.0, 0.1, 0.0)
prompts = partial(families.prompts, lengths=LENGTHS)


def row(index: int) -> Tensor:
    tokens, mask = prompts()
    return tokens[index, mask[index].bool()][None]


def own_text(model: Any, **options: Any) -> list[list[int]]:
    """What the model's own generate writes behind each row, one row at a time, unpadded."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return [
        model.generate(row(index), **options)[0, length:].tolist()
        for index, length in enumerate(LENGTHS)
    ]


def text_of(spec: SelfSpecModel, rows: slice = slice(3), side: str = "left", **options: Any):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    tokens, mask = (part[rows] for part in prompts(side))
    out = spec.generate(tokens, attention_mask=mask, **options)
    return out[:, tokens.shape[1] :].tolist()


# Equality


@pytest.mark.matrix(share=1)
@pytest.mark.parametrize("agreement", AGREEMENTS, ids=["seldom", "sometimes", "always"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_text_is_the_models_own(family, agreement):
    model = build(family, "sdpa", agreement)
    spec, expected = SelfSpecModel(model), own_text(model)
    assert len({token for text in expected for token in text}) > 3
    turn = AGREEMENTS.index(agreement)  # all three have every exit with every number of drafts
    counts = DRAFTS[turn:] + DRAFTS[:turn]
    for exit_layer, count, side in zip(EXITS, counts, ("left", "right", "left"), strict=True):
        draft = {"exit_layer": exit_layer, "num_draft_tokens": count}
        assert text_of(spec, side=side, draft=draft) == expected, draft
    assert text_of(spec, slice(1, 2), draft=draft) == expected[1:2], draft
    assert text_of(spec, draft="none") == expected
    if agreement == 0.0:
        assert (
            spec.generate(row(0), draft={"exit_layer": LAYERS // 2}, max_new_tokens=9) is not None
        )
        assert spec.last_stats.acceptance_rate == 1.0


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", HYBRIDS)
def test_eager_attention_and_a_drafter_that_is_never_right(family):
    model = build(family, "eager")
    spec = SelfSpecModel(model)
    spec.engine.add(ContraryHead.build(spec.decoder, 2))
    draft = {"exit_layer": 2, "head": "contrary", "num_draft_tokens": 4}
    assert text_of(spec, draft=draft) == own_text(model)
    assert spec.last_stats.acceptance_rate < 0.1


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", HYBRIDS)
def test_coupled_samples_are_those_of_plain_decoding(family):
    spec = SelfSpecModel(build(family, "sdpa", 0.3))

    def sampled(draft: dict[str, Any]) -> list[list[int]]:
        source = torch.Generator().manual_seed(5)
        options = {"do_sample": True, "temperature": 0.8, "generator": source}
        return text_of(spec, draft={"rule": "coupled", **draft}, **options)

    plain = sampled({"drafter": "none"})
    for exit_layer, count in zip(EXITS, DRAFTS, strict=True):
        assert sampled({"exit_layer": exit_layer, "num_draft_tokens": count}) == plain


@pytest.mark.matrix
@pytest.mark.parametrize(
    "draft",
    [
        {"drafter": "prompt_lookup"},
        {"drafter": "cascade", "exit_layer": 2},
        {"drafter": "auto", "exit_layer": 2},
        {"drafter": "skip_sublayers", "skip": {"attention": [2, 3], "mlp": [2, 3]}},
        {"drafter": "two_model"},
        {"exit_layer": 2, "schedule": "confidence"},
    ],
    ids=lambda draft: draft.get("drafter", "confidence"),
)
@pytest.mark.parametrize("family", RECURRENT)
def test_other_drafters(family, draft):
    model = build(family, "sdpa", 0.3)
    small = build(family, "sdpa", 0.0) if draft.get("drafter") == "two_model" else None
    spec = SelfSpecModel(model, draft_model=small)
    assert text_of(spec, draft=draft) == own_text(model)


@pytest.mark.matrix
@pytest.mark.parametrize("family", RECURRENT)
def test_rows_that_end_at_different_times_and_prompts_in_pieces(family):
    model = build(family, "sdpa", 0.3)
    spec, free = SelfSpecModel(model), own_text(model)
    end = free[1][4]
    cut = [text[: text.index(end) + 1] if end in text else text for text in free]
    for draft in ("none", {"exit_layer": 2, "num_draft_tokens": 3}):
        texts = text_of(spec, draft=draft, eos_token_id=end, pad_token_id=0)
        padded = [text + [0] * (max(map(len, cut)) - len(text)) for text in cut]
        assert texts == padded
        if family not in ("nemotron_h", "zamba2"):
            assert text_of(spec, draft=draft, prefill_chunk_size=3) == free


# States


def states_of(model: Any, text: list[int], prompt: int, cache: Any = None) -> Any:
    """The model's own cache after a text: the prompt in one pass, then token by token."""
    if cache is None:
        own = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
        cache = own() if own else DynamicCache(config=model.config)
        places = torch.arange(prompt)[None]
        model(torch.tensor([text[:prompt]]), position_ids=places, **{CACHE: cache})
    for place in range(prompt, len(text)):
        token, at = torch.tensor([[text[place]]]), torch.tensor([[place]])
        model(token, position_ids=at, **{CACHE: cache})
    return cache


def assert_states(slots: Any, place: int, cache: Any, tolerance: float) -> None:
    """The committed states of a row are those of the model's own cache of that row.

    The tolerance is that of a state whose largest number is 1.
    """
    assert slots.recurrent
    for index, layer in slots.recurrent.items():
        mine = [*layer.convs.values(), *([] if layer.state is None else [layer.state])]
        if hasattr(cache, "linear_cache"):
            own = [cache.linear_cache[index]]
        else:
            kept = cache.layers[index]
            own = [*kept.conv_states.values(), *kept.recurrent_states.values()]
            own = [state for state in own if state is not None]
        for state, expected in zip(mine, own, strict=True):
            least = tolerance * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(state[place], expected[0], rtol=0, atol=least)


def calmed(model: Any) -> Any:
    """The model with weights of a size that trained models have, where rounding does not grow."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter *= 0.4
    return model


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", HYBRIDS)
def test_after_every_round_states_are_those_of_plain_decoding(family, monkeypatch):
    model = calmed(build(family, "sdpa", 0.3))
    spec, step = SelfSpecModel(model), Session.step
    caches: dict[int, Any] = {}
    lengths: dict[int, int] = {}

    def checked(session: Session, state: Any) -> None:
        step(session, state)
        for place, number in enumerate(state.context.rows):
            text = state.context.text[number][:-1]  # the last token is pending
            first = lengths.get(number, LENGTHS[number])
            caches[number] = states_of(model, text, first, caches.get(number))
            lengths[number] = len(text)
            assert state.slots.lengths[place] == len(text)
            assert_states(state.slots, place, caches[number], 1e-5)

    monkeypatch.setattr(Session, "step", checked)
    text_of(spec, draft={"exit_layer": 2, "num_draft_tokens": 3})
    assert sorted(caches) == [0, 1, 2]


def in_double(model: Any) -> Any:
    """The model in float64, its kernels too, which transformers computes in float32."""
    module = sys.modules[type(model).__module__]
    source = inspect.getsource(module)
    for single, double in (("torch.float32", "torch.float64"), (".float()", ".double()")):
        source = source.replace(single, double)
    copy = types.ModuleType(f"{module.__name__}_in_double")
    copy.__package__, copy.__file__ = module.__package__, module.__file__
    sys.modules[copy.__name__] = copy
    exec(compile(source, copy.__name__, "exec"), copy.__dict__)
    model.config._experts_implementation = "eager"  # the others have no double precision
    made = getattr(copy, type(model).__name__)._from_config(model.config).double()
    made.load_state_dict(model.double().state_dict())
    return made.eval()


@torch.no_grad()
def committed_states(model: Any, count: int, tolerance: float) -> None:
    """Run rounds with random drafts and rejections; compare what is left of them."""
    decoder, source = Decoder(model), random.Random(0)
    texts = [[source.randrange(1, VOCAB) for _ in range(2 * count)] for _ in range(2)]
    slots, prompt = decoder.new_slots(2), [5, 9]
    with decoder:
        slots.will_commit = prompt
        block = torch.tensor([text[:9] for text in texts])
        decoder.run(block, Span(0, LAYERS), slots)
        slots.commit(prompt)
        while min(slots.lengths) < count:
            drafts, exit_layer = source.randrange(6), source.randrange(1, LAYERS)
            accepted = [source.randrange(drafts + 1) for _ in texts]
            tokens = torch.randint(1, VOCAB, (2, drafts + 1))
            for number, (text, kept) in enumerate(zip(texts, accepted, strict=True)):
                first = slots.lengths[number]
                tokens[number, : kept + 1] = torch.tensor(text[first : first + kept + 1])
            shallow = [
                decoder.run(tokens[:, at : at + 1], Span(0, exit_layer), slots, offset=at).hidden
                for at in range(drafts + 1)
            ]
            decoder.run(tokens, Span(exit_layer, LAYERS), slots, torch.cat(shallow, dim=1))
            slots.commit([kept + 1 for kept in accepted])
    for number, text in enumerate(texts):
        cache = states_of(model, text[: slots.lengths[number]], prompt[number])
        assert_states(slots, number, cache, tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("family", RECURRENT)
def test_states_after_many_rejections(family):
    committed_states(calmed(build(family, "sdpa")), 30, 1e-5)
    committed_states(in_double(calmed(build(family, "sdpa"))), 30, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_states_after_thousands_of_tokens(family, monkeypatch):
    monkeypatch.setitem(families._COMMON, "max_position_embeddings", 4096)
    committed_states(calmed(build(family, "sdpa")), 2000, 1e-5)
    committed_states(in_double(calmed(build(family, "sdpa"))), 2000, 1e-10)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", HYBRIDS)
def test_nothing_but_committed_states_is_kept_between_rounds(family, monkeypatch):
    spec, step, seen = SelfSpecModel(build(family, "sdpa", 0.3)), Session.step, []

    def checked(session: Session, state: Any) -> None:
        step(session, state)
        for layer in state.slots.recurrent.values():
            kept = [value for value in vars(layer).values() if isinstance(value, (Tensor, dict))]
            tensors = [part for value in kept for part in _tensors(value)]
            assert sum(part.nbytes for part in tensors) == layer.nbytes
            seen.append(layer.nbytes // max(state.rows, 1))

    monkeypatch.setattr(Session, "step", checked)
    text_of(spec, slice(1, 2), draft={"exit_layer": 2, "num_draft_tokens": 3})
    assert len(set(seen)) == 1


def _tensors(value: Any) -> list[Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


# Caches from turn to turn


def turns(spec: SelfSpecModel, rows: slice, cache: Any, draft: Any) -> tuple[list[Any], Any]:
    """Two turns, the second of which goes on with two more tokens."""
    tokens, mask = (part[rows] for part in prompts())
    options = {"max_new_tokens": 6, "do_sample": False, "draft": draft}
    options["return_dict_in_generate"] = True
    first = spec.generate(tokens, attention_mask=mask, past_key_values=cache, **options)
    more = torch.cat([first.sequences, torch.tensor([[7, 9]]).expand(len(tokens), 2)], dim=1)
    mask = torch.nn.functional.pad(mask, (0, 8), value=1)
    kept = first.past_key_values
    second = spec.generate(more, attention_mask=mask, past_key_values=kept, **options)
    return [first.sequences.tolist(), second.sequences.tolist()], second.past_key_values


@pytest.mark.matrix
@pytest.mark.parametrize("family", RECURRENT)
def test_a_cache_goes_from_turn_to_turn(family):
    model = build(family, "sdpa", 0.3)
    spec, draft = SelfSpecModel(model), {"exit_layer": 2, "num_draft_tokens": 3}
    expected, _ = turns(spec, slice(3), None, "none")
    assert turns(spec, slice(3), None, draft)[0] == expected
    alone, _ = turns(spec, slice(1, 2), None, draft)
    again, cache = turns(spec, slice(1, 2), DynamicCache(config=model.config), draft)
    assert again == alone and type(cache) is DynamicCache
    # MiniMax's own generate takes another class of cache; Jamba's begins a scan over two tokens
    # with an empty state.
    if family not in ("minimax", "jamba"):
        text = torch.tensor(again[1])
        longer = torch.cat([text, torch.tensor([[3]])], dim=1)
        own = model.generate(longer, max_new_tokens=4, do_sample=False, **{CACHE: cache})
        fresh = model.generate(longer, max_new_tokens=4, do_sample=False)
        assert torch.equal(own, fresh)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["SlotCache", "DynamicCache"])
@pytest.mark.parametrize("family", RECURRENT)
def test_an_exception_leaves_model_and_cache_as_they_were(family, kind):
    model = build(family, "sdpa", 0.3)
    spec, draft = SelfSpecModel(model), {"exit_layer": 2, "num_draft_tokens": 3}
    cache = DynamicCache(config=model.config) if kind == "DynamicCache" else None
    options = {"do_sample": False, "draft": draft, "return_dict_in_generate": True}
    first = spec.generate(row(1), past_key_values=cache, max_new_tokens=5, **options)
    cache, calls = first.past_key_values, []
    more = torch.cat([first.sequences, torch.tensor([[7, 9]])], dim=1)

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt

    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    deep = spec.decoder.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        spec.generate(more, past_key_values=cache, max_new_tokens=20, **options)
    deep.remove()
    assert not gates(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    after = spec.generate(more, past_key_values=cache, max_new_tokens=6, **options).sequences
    fresh = spec.generate(more, max_new_tokens=6, do_sample=False, draft="none")
    assert torch.equal(after, fresh)


def test_a_cache_without_states_is_refused():
    spec = SelfSpecModel(build("lfm2", "sdpa"))
    with pytest.raises(ValueError, match=r"make it with DynamicCache\(config=model.config\)"):
        spec.generate(row(0), past_key_values=DynamicCache(), max_new_tokens=3)


def test_committed_tokens_cannot_be_cropped():
    spec = SelfSpecModel(build("lfm2", "sdpa"))
    out = spec.generate(row(0), max_new_tokens=3, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="cannot be removed from recurrent layers"):
        out.past_key_values.crop(-1)
    out.past_key_values.crop(0)


# Heads, training, refusals


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("head", [BlockHead, FusedHead])
@pytest.mark.parametrize("family", HYBRIDS)
def test_heads_have_a_layer_with_attention(family, head):
    model = build(family, "sdpa")
    decoder = Decoder(model)
    if family in ("falcon_h1", "zamba2"):
        with pytest.raises(ValueError, match="recurrent state, so that a head cannot have one"):
            head.build(decoder, 2)
        return
    made = head.build(decoder, 2)
    assert made.place in decoder.attention_layers
    spec = SelfSpecModel(model, heads=[made])
    draft = {"exit_layer": 2, "head": head.kind, "num_draft_tokens": 3}
    assert text_of(spec, draft=draft) == own_text(model)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["block", "fused", "fused parallel"])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "nemotron_h", "minimax"])
def test_a_head_reads_while_decoding_what_it_reads_while_fitted(family, kind, monkeypatch):
    decoder = Decoder(calmed(build(family, "sdpa")))
    exit_layer = 0 if "parallel" in kind else 2
    head = own_head(decoder, kind, exit_layer, noise=0.1)
    seen = record(monkeypatch)
    spec = SelfSpecModel(decoder.causal_lm, heads=[head])
    draft = {"exit_layer": exit_layer, "head": head.kind, "num_draft_tokens": 3}
    assert text_of(spec, draft=draft) == own_text(spec.model)
    if family != "nemotron_h":  # which reads a text otherwise than it writes it
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
        assert_reads_as_forced(spec.decoder, head, seen[::5], close)
    with pytest.raises(ValueError, match="recurrent, so it cannot run over a mask after every"):
        own_head(decoder, "fused parallel", 2)


@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_documents_begin_with_an_empty_state(family):
    decoder = Decoder(calmed(build(family, "sdpa")))
    tokens = torch.randint(1, VOCAB, (2, 14), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 9, [3] * 7 + [4] + [3] * 6])
    everything = Span(0, LAYERS)
    packed = decoder.run_packed(tokens, everything, Packing.of(documents)).output
    for line, starts in enumerate([(0, 5, 14), (0, 7, 8, 14)]):
        for start, end in pairwise(starts):
            part = tokens[line : line + 1, start:end]
            alone = decoder.run_packed(part, everything, Packing.of(part, whole=True)).output
            torch.testing.assert_close(packed[line, start:end], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drafter", ["tree", "lookahead", "skip_sublayers"])
def test_trees_are_refused(drafter):
    """CLaSp, too, which chooses the layers to skip, compares states in a tree."""
    spec = SelfSpecModel(build("lfm2", "sdpa"))
    with pytest.raises(ValueError, match="recurrent layers, whose state has no branches"):
        text_of(spec, draft={"drafter": drafter})


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_heads_are_fitted_to_packed_text(family, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw_plots", lambda *_: [])
    write_target(tmp_path)  # a tokenizer, and its text
    monkeypatch.setitem(families._COMMON, "vocab_size", WORDS)
    calmed(build(family, "sdpa")).save_pretrained(tmp_path / "target")
    kinds = [head for head in EVERY_KIND if family != "falcon_h1" or head["kind"] not in LAYERS_OWN]
    depths = {"depths": 2}
    fit(settings(tmp_path, heads=kinds, loss=depths, measure=depths))
    folder = tmp_path / "run" / "heads"
    spec = SelfSpecModel.from_pretrained(tmp_path / "target", heads=folder, dtype=torch.float32)
    expected = own_text(spec.model)
    for head in spec.heads:
        draft = {"exit_layer": head.exit_layer, "head": head.kind, "num_draft_tokens": 3}
        assert text_of(spec, draft=draft) == expected


@pytest.mark.matrix(share=4)
@torch.no_grad()
@pytest.mark.parametrize("family", HYBRIDS)
def test_exits_fold_where_a_stock_model_can_have_their_layers(family, tmp_path):
    decoder = Decoder(build(family, "sdpa"))
    tokens = row(1)
    if family == "zamba2":  # whose layers know how many share their attention
        with pytest.raises(ValueError, match="no exit of it can be folded"):
            fold(decoder, SharedHead.build(decoder, 2))
        return
    if family != "falcon_h1":
        with pytest.raises(ValueError, match="choose an exit_layer above 1"):
            fold(decoder, SharedHead.build(decoder, 1))
    fold(decoder, SharedHead.build(decoder, 3)).save_pretrained(tmp_path)
    slots = decoder.new_slots(1)
    decoder.run(tokens, Span(0, LAYERS), slots)
    exit_logits = decoder.run(tokens, Span(0, 3), slots, unembed=True).output
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(stock(tokens).logits, exit_logits, rtol=1e-3, atol=1e-3)


# What the command line says


@pytest.mark.usefixtures("untimed")
@pytest.mark.matrix(share=4)
@pytest.mark.parametrize("family", HYBRIDS)
def test_info_says_how_large_states_are(family):
    """The state does not grow with the text, and a token of a round costs a fraction of it."""
    model = build(family, "sdpa")
    spec = SelfSpecModel(model)
    facts = describe(spec.engine, context=100)
    cache = states_of(model, row(1)[0].tolist(), LENGTHS[1])
    if family == "minimax":
        own = sum(state.nbytes for state in cache.linear_cache if len(state))
    else:
        kept = [c for c in cache.layers if hasattr(c, "conv_states")]
        parts = [p for c in kept for p in (*c.conv_states.values(), *c.recurrent_states.values())]
        own = sum(part.nbytes for part in parts if part is not None)
    assert facts["state_bytes"] == own
    assert 0 < facts["state_bytes_per_draft"]
    assert facts["recurrent_layers"] == len(spec.decoder.recurrent_layers)

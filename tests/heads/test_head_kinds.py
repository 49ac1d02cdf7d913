"""Every kind of head, over all tokens or some: the text is the target's, whatever it drafts."""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import EXIT, VOCAB, equal_to_generate, gates, greedy, paused, prompt, tiny_llama
from head_tools import COPIES, KINDS, WITH_LAYER, build, class_of, exit_of, own_head
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LogitsProcessor,
    LogitsProcessorList,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
)
from transformers.generation.streamers import BaseStreamer

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder, Span
from selfspec.drafters.engine import Engine
from selfspec.heads import HEAD_KINDS, LensHead, LoraHead, SharedHead

IDS, MASK = prompt(4, 9, 6)
ONE = IDS[1:2]
NEW = 11
EVERY_HEAD = [
    pytest.param(kind, trimmed, id=f"{kind}{' trimmed' if trimmed else ''}")
    for kind in KINDS
    for trimmed in (False, True)
]
every_head = pytest.mark.parametrize(("kind", "trimmed"), EVERY_HEAD)


@pytest.fixture(scope="module")
def target():
    return tiny_llama("sometimes")


def with_head(model, kind, exit_layer=EXIT, **options):
    """`model` with one head, and how to draft with it."""
    head = own_head(Decoder(model), kind, exit_layer, **options)
    return SelfSpecModel(model, heads=[head])


def drafting(head, k=4):
    return DraftConfig(exit_layer=head.exit_layer, head=head.kind, num_draft_tokens=k)


def exits(kind):
    """The lowest, one in the middle, the highest."""
    return sorted({exit_of(kind, layer) for layer in (class_of(kind).lowest_exit, EXIT, 3)})


# Equality


def check_equality(target, kind, trimmed, settings):
    """Assert the target's own text at every exit, for each draft length and rows."""
    expected = greedy(target, IDS, MASK, max_new_tokens=NEW)
    for exit_layer in exits(kind):
        spec = with_head(target, kind, exit_layer, trimmed=trimmed)
        for k, rows in settings:
            text = spec.generate(
                IDS[rows],
                attention_mask=MASK[rows],
                max_new_tokens=NEW,
                draft=drafting(spec.heads[0], k),
            )
            assert torch.equal(text, expected[rows]), (exit_layer, k)
    assert gates(target) == []


RAGGED, SINGLE = slice(0, 3), slice(1, 2)


@pytest.mark.matrix(share=1)
@every_head
def test_greedy_text_is_the_targets_own(target, kind, trimmed):
    check_equality(target, kind, trimmed, [(4, RAGGED), (1, SINGLE)])


@pytest.mark.slow
@every_head
def test_every_combination_gives_the_targets_own_text(target, kind, trimmed):
    every = [(k, rows) for k in (1, 2, 4, 8) for rows in (RAGGED, SINGLE, slice(0, 1))]
    check_equality(target, kind, trimmed, every)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_the_target_may_be_wrapped_by_peft(kind):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_llama("sometimes"), config).eval()
    own = model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False)
    spec = with_head(model, kind, trimmed=True)
    draft = drafting(spec.heads[0])
    text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft)
    assert torch.equal(text, own)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_the_target_may_have_device_hooks_on_every_module(kind):
    """Copies of its modules get hooks of their own."""
    model = tiny_llama("sometimes")
    expected = with_head(model, kind, 3)
    draft = drafting(expected.heads[0])
    expected.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft)
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    spec = with_head(model, kind, 3)
    equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW, draft=draft)
    assert spec.last_trace == expected.last_trace


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_in_half_precision(kind):
    spec = with_head(tiny_llama("sometimes", dtype=torch.bfloat16), kind, trimmed=True)
    assert all(p.dtype == torch.bfloat16 for p in spec.heads[0].parameters())
    draft = drafting(spec.heads[0])
    text = spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft)
    assert text.shape == (3, IDS.shape[1] + NEW)
    assert spec.last_stats.drafted > 0


# Caches of earlier turns


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WITH_LAYER)
def test_rows_that_leave_a_cache_that_was_handed_in(target, kind):
    """Also with a drafter that knows nothing of the layer that another one added."""
    spec = with_head(target, kind)
    own = drafting(spec.heads[0])
    options = {"attention_mask": MASK, "return_dict_in_generate": True}
    out = spec.generate(IDS, max_new_tokens=6, draft=own, **options)
    text, cache = out.sequences, out.past_key_values
    assert len(cache.layers) == spec.decoder.depth  # without the head's
    for draft in ("none", own, "none", own):
        more = torch.cat([text, torch.full((3, 2), 5)], dim=1)
        mask = torch.cat([MASK, MASK.new_ones(3, more.shape[1] - IDS.shape[1])], dim=1)
        plain = greedy(target, more, mask, max_new_tokens=8)
        ends = {"eos_token_id": plain[:, more.shape[1] + 2].tolist(), "pad_token_id": 0}
        before = list(cache.lengths)
        equal_to_generate(
            spec, more, mask, max_new_tokens=8, past_key_values=cache, draft=draft, **ends
        )
        assert len(cache.layers) == spec.decoder.depth
        assert cache.rows == len(cache.added_from) == 3
        # The next turn goes on from what this one began with.
        cache.lengths = before
        text = more


# Untrained


@pytest.mark.parametrize("kind", [LensHead, LoraHead])
@pytest.mark.parametrize("trimmed", [False, True])
def test_an_untrained_correction_says_what_the_shared_head_says(target, kind, trimmed):
    decoder = Decoder(target)
    heads = [k.build(decoder, EXIT) for k in (SharedHead, kind)]
    if trimmed:
        for head in heads:
            head.trim(decoder, torch.arange(0, VOCAB, 3))
    hidden = decoder.run(ONE, Span(0, EXIT), decoder.new_slots(1)).hidden
    shared, other = (head.logits(decoder, hidden) for head in heads)
    torch.testing.assert_close(other, shared, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_an_untrained_fused_head_drafts_what_the_block_drafts(target, exit_layer):
    decoder = Decoder(target)
    heads = [HEAD_KINDS[kind].build(decoder, exit_layer) for kind in COPIES]
    spec, traces = SelfSpecModel(target, heads=heads), []
    for head in heads:
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=20, draft=drafting(head))
        traces.append(spec.last_trace)
    assert traces[0] == traces[1]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_last_layer_behind_the_last_exit_is_always_accepted(kind, chunk, k):
    """Then the head is the target, if its KV, masks and positions are."""
    model = tiny_llama("seldom")
    head = HEAD_KINDS[kind].build(Decoder(model), 3)
    spec = SelfSpecModel(model, heads=[head])
    rounds = {"max_new_tokens": 1 + 4 * (k + 1), "prefill_chunk_size": chunk}
    text = spec.generate(IDS, attention_mask=MASK, draft=drafting(head, k), **rounds)
    assert spec.last_stats.acceptance_rate == 1
    assert spec.last_stats.mean_accepted_length == k + 1
    assert torch.equal(text, greedy(model, IDS, MASK, max_new_tokens=1 + 4 * (k + 1)))


# Trimmed vocabularies

NO_IDS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SHAPE = {**NO_IDS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"intermediate_size": 48, "num_key_value_heads": 2}
TAILS = {
    "tied": GPT2Config(**NO_IDS, n_embd=32, n_head=4, n_layer=3),
    "untied": Qwen2Config(**SHAPE, **WIDE),
    "bias": PhiConfig(**SHAPE, intermediate_size=48),
    "soft cap": Gemma2Config(**SHAPE, **WIDE, head_dim=8, final_logit_softcapping=0.5),
    "divided": GraniteConfig(**SHAPE, **WIDE, logits_scaling=3.0),
    "scaled": CohereConfig(**SHAPE, **WIDE, logit_scale=0.3),
}


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", ["shared", "lens", "block"])
@pytest.mark.parametrize("tail", TAILS)
def test_trimmed_logits_are_the_rows_of_all_logits(tail, kind):
    decoder = Decoder(random_model(TAILS[tail]))
    head = own_head(decoder, kind, 1)
    hidden = decoder.run(ONE, Span(0, 1), decoder.new_slots(1)).hidden
    everything = head.logits(decoder, hidden)
    ids = torch.tensor([0, 3, 4, 40, VOCAB - 1])
    head.trim(decoder, ids)
    torch.testing.assert_close(head.logits(decoder, hidden), everything[..., ids])
    assert torch.equal(head.lm_head.weight, decoder.lm_head.weight[ids])
    if tail == "bias":
        assert torch.equal(head.lm_head.bias, decoder.lm_head.bias[ids])
    spread = head.vocabulary(decoder).spread(head.logits(decoder, hidden), -torch.inf)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, ids, False)
    assert bool((spread[..., others] == -torch.inf).all())
    assert bool((spread.softmax(-1)[..., others] == 0).all())


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_only_tokens_of_the_trimmed_vocabulary_are_drafted(target, kind):
    spec = with_head(target, kind, trimmed=True)
    draft, can = drafting(spec.heads[0]), set(spec.heads[0].vocab_ids.tolist())
    sampled = {"do_sample": True, "generator": torch.Generator().manual_seed(0)}
    for options in ({}, sampled):
        spec.generate(IDS, attention_mask=MASK, max_new_tokens=NEW, draft=draft, **options)
        for row in spec.last_trace.rows:
            assert {token for step in row for token in step.drafted} <= can


@pytest.mark.parametrize(
    "draft",
    [
        {"drafter": "early_exit", "schedule": "optimal"},
        {"drafter": "early_exit", "schedule": "confidence"},
        {"drafter": "tree", "tree": {"nodes": 4}, "num_draft_tokens": 2},
    ],
    ids=["optimal", "confidence", "tree"],
)
def test_a_vocabulary_of_one_token(target, draft):
    decoder = Decoder(target)
    head = own_head(decoder, "block", EXIT)
    head.trim(decoder, greedy(target, IDS, MASK, max_new_tokens=NEW)[0, -1:])
    spec = SelfSpecModel(target, heads=[head])
    equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW, draft=draft)
    assert spec.last_stats.drafted > 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["shared", "block"])
def test_a_caller_who_allows_nothing_of_the_trimmed_vocabulary(
    target, kind, do_sample, monkeypatch
):
    """Nothing can be drafted rightly; the text is what it would be, and q a distribution."""
    verify, sums = Engine.verify, []

    def noting(engine, state, draft):
        if draft.probs is not None:
            sums.append(draft.probs.sum(-1))
        return verify(engine, state, draft)

    monkeypatch.setattr(Engine, "verify", noting)
    head = own_head(Decoder(target), kind, EXIT)
    head.trim(Decoder(target), torch.arange(10, 30))
    allowed = [1, 2, 40, 41]
    spec = SelfSpecModel(target, heads=[head])
    options = {"do_sample": do_sample, "max_new_tokens": NEW}
    text = spec.generate(
        IDS,
        attention_mask=MASK,
        draft=drafting(head),
        logits_processor=only(allowed),
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    assert set(text[:, IDS.shape[1] :].flatten().tolist()) <= set(allowed)
    if do_sample:
        assert sums and all(torch.allclose(total, torch.ones_like(total)) for total in sums)
    else:
        plain = greedy(target, IDS, MASK, max_new_tokens=NEW, logits_processor=only(allowed))
        assert torch.equal(text, plain)


class Only(LogitsProcessor):
    def __init__(self, allowed):
        self.allowed = allowed

    def __call__(self, input_ids, scores):
        kept = scores[:, self.allowed]
        return torch.full_like(scores, -torch.inf).index_copy_(1, torch.tensor(self.allowed), kept)


def only(allowed):
    return LogitsProcessorList([Only(allowed)])


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([], "whole numbers in one dimension"),
        ([[1, 2]], "whole numbers in one dimension"),
        ([1.0, 2.0], "whole numbers in one dimension.*float"),
        ([True, False], "whole numbers in one dimension.*bool"),
        ([-1, 2], rf"in \[0, {VOCAB - 1}\], got -1 to 2"),
        ([1, VOCAB], rf"in \[0, {VOCAB - 1}\], got 1 to {VOCAB}; was another tokenizer used"),
        ([VOCAB, 1], rf"in \[0, {VOCAB - 1}\]"),
        ([1, 1, 2], "must rise"),
        ([2, 1], "must rise"),
    ],
    ids=str,
)
def test_ids_that_are_no_vocabulary_are_refused(target, ids, match):
    head = SharedHead.build(Decoder(target), EXIT)
    with pytest.raises(ValueError, match=match):
        head.trim(Decoder(target), torch.tensor(ids))
    assert head.vocab_ids is None and head.lm_head is None


@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_an_lm_head_with_an_adapter_has_no_rows_to_take_and_takes_no_other(where):
    adapted = {"target_modules": ["lm_head"]}
    if where == "modules_to_save":
        adapted = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    config = LoraConfig(r=2, task_type="CAUSAL_LM", **adapted)
    model = get_peft_model(tiny_llama(), config)
    decoder, names = Decoder(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match="merge its adapter"):
        SharedHead.build(decoder, EXIT).trim(decoder, torch.arange(5))
    with pytest.raises(ValueError, match="merge its adapter"):
        LoraHead.build(decoder, EXIT)
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shared"])
def test_a_projection_in_front_of_the_lm_head_is_refused(kind):
    shape = {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
    decoder = Decoder(random_model(OPTConfig(**shape)))
    with pytest.raises(ValueError, match="OPTForCausalLM projects 32 to 16"):
        build(decoder, kind, 1)
    with pytest.raises(ValueError, match="OPTForCausalLM projects 32 to 16"):
        SharedHead.build(decoder, 1).trim(decoder, torch.arange(5))


# The target stays what it is


@pytest.mark.matrix
@every_head
def test_a_head_leaves_the_target_as_it_is(kind, trimmed):
    """Its weights, gradients' flags, modules and text, after a call and within one."""
    model = tiny_llama("sometimes")
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modules = [(name, type(module)) for name, module in model.named_modules()]
    own = greedy(model, IDS, MASK, max_new_tokens=NEW)
    spec = with_head(model, kind, trimmed=trimmed)
    during = []

    class Asking(BaseStreamer):
        def put(self, value):
            during.append(greedy(model, ONE, max_new_tokens=2))

        def end(self):
            pass

    draft = drafting(spec.heads[0])
    spec.generate(ONE, max_new_tokens=NEW, draft=draft, streamer=Asking())
    assert len(during) > 2 and all(torch.equal(t[0], own[1, : t.shape[1]]) for t in during)
    assert torch.equal(greedy(model, IDS, MASK, max_new_tokens=NEW), own)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert [(name, type(module)) for name, module in model.named_modules()] == modules
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, weights[n]) for n, value in model.state_dict().items())
    mine = {id(p) for p in model.parameters()}
    assert not mine & {id(p) for p in spec.heads[0].parameters()}


@pytest.mark.parametrize("kind", ["shared", "lora", "block"])
def test_building_a_head_without_new_weights_draws_nothing(target, kind):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    heads = [HEAD_KINDS[kind].build(Decoder(target), EXIT) for _ in range(2)]
    for head in heads:
        head.trim(Decoder(target), torch.arange(9))
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, other in zip(*(head.state_dict().values() for head in heads), strict=True):
        assert torch.equal(one, other)


def test_another_thread_gets_all_logits_while_a_trimmed_head_reads(target):
    spec = with_head(target, "lens", trimmed=True)
    alone = target(IDS, attention_mask=MASK).logits
    with paused(spec.heads[0].lm_head, spec.generate, ONE, draft=drafting(spec.heads[0])):
        meanwhile = target(IDS, attention_mask=MASK).logits
    assert torch.equal(meanwhile, alone)
    assert gates(target) == []


# Heads that cannot be


@pytest.mark.parametrize(
    ("kind", "exit_layer", "options", "match"),
    [
        ("block", 0, {}, r"exit_layer must be in \[1, 3\], got 0"),
        ("block", 4, {}, r"exit_layer must be in \[1, 3\], got 4"),
        ("fused", 4, {}, r"exit_layer must be in \[0, 3\], got 4"),
        ("block", 2, {"place": 4}, r"place must be a layer in \[0, 3\], got 4"),
        ("fused", 2, {"place": -1}, r"place must be a layer in \[0, 3\], got -1"),
        ("fused", 2, {"feature_layers": []}, r"feature_layers must be in \[2, 4\], got \[\]"),
        ("fused", 2, {"feature_layers": [1, 4]}, r"in \[2, 4\], got \[1, 4\]; verification"),
        ("fused", 2, {"feature_layers": [5]}, r"in \[2, 4\], got \[5\]"),
        ("block", 2, {"parallel": True, "markov": -1}, "at least 0.*got markov=-1"),
        ("fused", 2, {"markov": 8}, "needs parallel=True; got markov=8, parallel=False"),
        ("lens", 2, {"rank": 0}, "rank must be at least 1, got 0"),
        ("lora", 2, {"rank": 0}, "positive"),
    ],
)
def test_a_head_that_cannot_be_is_refused(target, kind, exit_layer, options, match):
    with pytest.raises(ValueError, match=match):
        HEAD_KINDS[kind].build(Decoder(target), exit_layer, **options)


def test_two_heads_of_one_kind_at_one_exit_are_refused(target):
    decoder = Decoder(target)
    heads = [own_head(decoder, "lens", EXIT, seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="two heads of kind 'lens' at exit_layer 2"):
        SelfSpecModel(target, heads=heads)


def test_the_embedding_is_an_exit_for_fused_heads_only(target):
    spec = with_head(target, "fused", 2)
    for draft, match in [
        ({"exit_layer": 0}, r"exit_layer must be in \[1, 3\], got 0"),
        ({"exit_layer": 0, "head": "lens"}, r"exit_layer must be in \[1, 3\], got 0"),
        ({"exit_layer": 0, "head": "fused"}, "no 'fused' head was fitted at exit_layer 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            spec.generate(ONE, max_new_tokens=4, draft=draft)


def test_a_head_for_more_layers_or_tokens_is_refused(target):
    deeper = Decoder(tiny_llama(num_hidden_layers=6))
    with pytest.raises(ValueError, match="place must be a layer"):
        SelfSpecModel(target, heads=[own_head(deeper, "block", 2, place=5)])
    with pytest.raises(ValueError, match="feature_layers"):
        SelfSpecModel(target, heads=[own_head(deeper, "fused", 2)])
    larger = Decoder(tiny_llama(vocab_size=90))
    head = SharedHead.build(larger, EXIT)
    head.trim(larger, torch.arange(80))
    with pytest.raises(ValueError, match="was another tokenizer used"):
        SelfSpecModel(target, heads=[head])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", WITH_LAYER)
def test_a_layer_made_for_another_depth_leaves_the_targets_kv_alone(target, kind):
    shallower = Decoder(tiny_llama(num_hidden_layers=3))
    spec = SelfSpecModel(target, heads=[own_head(shallower, kind, 2)])
    equal_to_generate(spec, IDS, MASK, max_new_tokens=NEW)


def test_heads_are_not_copied_out_of_a_pass(target):
    """Else they would carry what stands in for the target's modules meanwhile."""
    decoder = Decoder(target)
    with decoder, pytest.raises(RuntimeError, match="build heads outside `with decoder:`"):
        LensHead.build(decoder, EXIT)

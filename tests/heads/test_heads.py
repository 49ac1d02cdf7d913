"""Exit heads: the lens begins as the shared head; files are whole, and fit their target or none."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import EXIT, TINY, VOCAB, equal_to_generate, prompt, tiny_llama
from head_tools import KINDS, PARALLEL, class_of, exit_of, own_head
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, Qwen2Config

from selfspec import DEMO_MODEL, DraftConfig, SelfSpecModel
from selfspec.decoder import Decoder, Span
from selfspec.heads import (
    HEAD_KINDS,
    Calibrator,
    CheckpointFiles,
    ExitHead,
    LensHead,
    SharedHead,
    build_head,
    fingerprint,
    load_heads,
    register_head,
    save_heads,
)
from selfspec.heads import store as store_module

IDS, MASK = prompt(4, 9)
CONFIG, WEIGHTS = "selfspec.json", "exit_heads.safetensors"


@pytest.fixture
def target():
    return tiny_llama("sometimes")


def lens(decoder, exit_layer=EXIT, seed=0, **options):
    """A lens that says something of its own."""
    head = LensHead.build(decoder, exit_layer, **options)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.up.weight.copy_(torch.randn(head.up.weight.shape, generator=source) * 0.1)
        head.norm.weight.mul_(1.5)
    return head


def exits(decoder, *heads, ids=IDS[1:]):
    """Draft logits of each head."""
    slots = decoder.new_slots(ids.shape[0])
    with torch.no_grad():
        return [
            head.logits(decoder, decoder.run(ids, Span(0, head.exit_layer), slots).hidden)
            for head in heads
        ]


def same(heads, others):
    assert [(h.kind, h.exit_layer, h.options) for h in heads] == [
        (h.kind, h.exit_layer, h.options) for h in others
    ]
    for head, other in zip(heads, others, strict=True):
        for name, tensor in head.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])


# Before training


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_untrained_lens_is_the_shared_head(exit_layer, dtype):
    decoder = Decoder(tiny_llama("sometimes", dtype=dtype))
    shared, untrained = (kind.build(decoder, exit_layer) for kind in (SharedHead, LensHead))
    assert torch.equal(*exits(decoder, shared, untrained))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_head=4, n_layer=4, vocab_size=VOCAB),
        Gemma2Config(**TINY, head_dim=8),
    ],
    ids=["layer norm", "offset norm and soft cap"],
)
def test_an_untrained_lens_is_the_shared_head_for_every_norm(config):
    torch.manual_seed(0)
    decoder = Decoder(AutoModelForCausalLM.from_config(config).double().eval())
    shared, untrained = (kind.build(decoder, 2) for kind in (SharedHead, LensHead))
    torch.testing.assert_close(*exits(decoder, shared, untrained), rtol=1e-12, atol=1e-12)


def test_a_lens_starts_with_a_copy_of_the_norm(target):
    decoder = Decoder(target)
    before = target.model.norm.weight.clone()
    lens(decoder)
    assert torch.equal(target.model.norm.weight, before)


# Which head drafts


def test_heads_at_two_exits(target):
    decoder = Decoder(target)
    heads = [lens(decoder, 3), lens(decoder, 1, seed=1), SharedHead.build(decoder, 1)]
    spec = SelfSpecModel(target, heads=heads)
    pick = lambda **draft: spec.engine.head(DraftConfig(**draft))  # noqa: E731
    assert pick() is heads[0]  # the first fitted head is the default
    assert pick(exit_layer=1) is heads[1]
    assert pick(head="shared") is heads[2]
    assert pick(exit_layer=1, head="shared") is heads[2]
    made = pick(exit_layer=2)
    assert (made.kind, made.exit_layer) == ("shared", 2)
    for exit_layer in (1, 2, 3):
        draft = DraftConfig(exit_layer=exit_layer)
        equal_to_generate(spec, IDS, MASK, max_new_tokens=12, draft=draft)


def test_without_heads_a_quarter_of_the_layers_drafts(target):
    head = SelfSpecModel(target).engine.head(DraftConfig())
    assert (head.kind, head.exit_layer) == ("shared", 1)


def test_a_head_that_was_not_fitted_is_refused_with_those_that_were(target):
    spec = SelfSpecModel(target, heads=[lens(Decoder(target), 3)])
    with pytest.raises(ValueError, match=r"no 'lens' head was fitted at exit_layer 2 .*lens at 3"):
        spec.engine.head(DraftConfig(exit_layer=2, head="lens"))


@pytest.mark.parametrize("exit_layer", [0, 4, 7])
def test_a_head_beyond_the_model_is_refused(target, exit_layer):
    heads = [LensHead(exit_layer, torch.nn.Identity(), 32, 2)]
    with pytest.raises(ValueError, match=rf"in \[1, 3\], got {exit_layer}; the model has 4 layers"):
        SelfSpecModel(target, heads=heads).engine.head(DraftConfig())


# On disk


def test_heads_beside_a_target_are_not_taken_for_its_weights(target, tmp_path):
    """Serving engines read every safetensors file of a folder that the index names, or just all."""
    spec = SelfSpecModel(target)
    spec.engine.heads.append(lens(spec.decoder))
    spec.save_pretrained(tmp_path)
    for folder in (tmp_path, DEMO_MODEL):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        weights = load_file(folder / "model.safetensors")
        assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")


def test_heads_beside_a_target_in_a_subfolder_are_loaded_with_it(target, tmp_path):
    spec = SelfSpecModel(target)
    spec.engine.heads.append(lens(spec.decoder))
    spec.save_pretrained(tmp_path / "target")
    loaded = SelfSpecModel.from_pretrained(tmp_path, subfolder="target")
    assert [head.kind for head in loaded.heads] == ["lens"]


def test_head_weights_are_never_a_copy_of_the_lm_head(target, tmp_path):
    decoder = Decoder(target)
    save_heads([lens(decoder, rank=2)], decoder, tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_size < target.lm_head.weight.nbytes


def calibrated(head, seed=0):
    """`head` with calibrators of its own."""
    source = torch.Generator().manual_seed(seed)
    for mode in ("greedy", "sampled"):
        head.calibrators[mode] = calibrator = Calibrator()
        for name, buffer in calibrator.named_buffers():
            setattr(calibrator, name, torch.rand(buffer.shape, generator=source) + 0.5)
    return head


def every_kind(decoder, **options):
    """A head of each kind, over all tokens and over some, with calibrators and without."""
    exits = {  # a file holds one head of a kind at an exit
        (class_of(kind), exit_of(kind, exit_layer)): kind
        for kind in KINDS
        for exit_layer in ((2,) if kind in PARALLEL else (1, 3))
    }
    heads = [
        own_head(decoder, kind, exit_layer, trimmed=exit_layer != 1, seed=seed, **options)
        for seed, ((_, exit_layer), kind) in enumerate(exits.items())
    ]
    return [calibrated(head, n) if n % 3 else head for n, head in enumerate(heads)]


def test_heads_of_every_kind_come_back_as_they_were_saved(target, tmp_path):
    spec = SelfSpecModel(target)
    heads = every_kind(spec.decoder)
    spec.engine.heads.extend(heads)
    save_heads(heads, spec.decoder, tmp_path / "heads")
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [WEIGHTS, CONFIG]
    spec.save_pretrained(tmp_path / "all")
    for other in (
        SelfSpecModel(target, heads=tmp_path / "heads"),
        SelfSpecModel.from_pretrained(tmp_path / "all", dtype=torch.float64),
    ):
        same(other.heads, heads)
        for head, loaded in zip(heads, other.heads, strict=True):
            if head.vocab_ids is not None:
                weight = loaded.lm_head.weight
                assert torch.equal(weight, target.lm_head.weight[head.vocab_ids])
            assert list(head.calibrators) == list(loaded.calibrators)
            assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    for head in heads:
        options = {"attention_mask": MASK, "max_new_tokens": 6}
        options["draft"] = DraftConfig(exit_layer=head.exit_layer, head=head.kind)
        assert torch.equal(spec.generate(IDS, **options), other.generate(IDS, **options))
        assert spec.last_trace == other.last_trace


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_lm_head_are_not_stored(target, kind, tmp_path):
    decoder = Decoder(target)
    weights = []
    for folder, trimmed in (("whole", False), ("trimmed", True)):
        head = own_head(decoder, kind, EXIT, trimmed=trimmed)
        save_heads([head], decoder, tmp_path / folder)
        weights.append(load_file(tmp_path / folder / WEIGHTS))
    whole, trimmed = weights
    name = f"{head.kind}_{head.exit_layer}.vocab_ids"
    assert trimmed.keys() - whole.keys() == {name}
    assert trimmed[name].dtype == torch.long
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in (whole, trimmed)]
    assert sizes[1] <= sizes[0] + 8 * (VOCAB // 2)


def test_two_heads_of_one_kind_at_one_exit_are_not_saved_over_each_other(target, tmp_path):
    decoder = Decoder(target)
    heads = [lens(decoder, EXIT, seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="two heads of kind 'lens' at exit_layer 2"):
        save_heads(heads, decoder, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_from_before_trimming_and_calibration_loads(saved):
    _, decoder, heads, folder = saved
    rewrite(folder, lambda d: [d["heads"][0].pop(k) for k in ("trimmed", "calibrated", "facts")])
    same(load_heads(decoder, folder), heads)


@pytest.fixture
def saved(target, tmp_path):
    """A target, and a folder with a lens fitted to it."""
    decoder = Decoder(target)
    heads = [lens(decoder)]
    save_heads(heads, decoder, tmp_path)
    return target, decoder, heads, tmp_path


@pytest.mark.parametrize("part", ["save_file", "json"])
def test_a_failed_write_leaves_the_old_heads(saved, part, monkeypatch):
    _, decoder, heads, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fails(*args, **kwargs):
        Path(args[-1] if part == "save_file" else args[0]).write_bytes(b"half")
        raise OSError("disk full")

    if part == "save_file":
        monkeypatch.setattr(store_module, "save_file", fails)
    else:
        write = Path.write_text
        monkeypatch.setattr(
            Path, "write_text", lambda self, *a, **k: (write(self, "half"), fails(self))
        )
    with pytest.raises(OSError, match="disk full"):
        save_heads([lens(decoder, 3, seed=9)], decoder, folder)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    same(load_heads(decoder, folder), heads)


def test_a_save_replaces_older_heads(saved):
    _, decoder, _, folder = saved
    newer = [lens(decoder, 3, seed=9), lens(decoder, 1, seed=3)]
    save_heads(newer, decoder, folder)
    same(load_heads(decoder, folder), newer)


# Kinds from outside the package


@pytest.fixture
def doubled(monkeypatch):
    """A kind that only this test knows."""
    monkeypatch.setattr("selfspec.heads.base.HEAD_KINDS", dict(HEAD_KINDS))

    @register_head
    class DoubledLens(LensHead):
        kind = "doubled"

        def forward(self, hidden):
            return 2 * super().forward(hidden)

    return DoubledLens


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_registered_kind_is_saved_loaded_and_drafts(target, doubled, trimmed, tmp_path):
    decoder = Decoder(target)
    head = doubled.build(decoder, EXIT, rank=3)
    if trimmed:
        head.trim(decoder, torch.arange(0, VOCAB, 2))
    save_heads([calibrated(head)], decoder, tmp_path)
    spec = SelfSpecModel(target, heads=tmp_path)
    assert type(spec.heads[0]) is doubled
    same(spec.heads, [head])
    for drafter in ("early_exit", "tree"):
        draft = DraftConfig(drafter=drafter, head="doubled", exit_layer=EXIT)
        equal_to_generate(spec, IDS, MASK, max_new_tokens=12, draft=draft)
        assert spec.last_stats.drafted > 0


def test_a_kind_has_one_class(doubled):
    assert register_head(doubled) is doubled
    with pytest.raises(ValueError, match=r"'doubled' is already registered by .*DoubledLens; give"):

        @register_head
        class Other(LensHead):
            kind = "doubled"


def test_a_kind_that_is_not_registered_is_named(target, doubled, monkeypatch, tmp_path):
    decoder = Decoder(target)
    save_heads([doubled.build(decoder, EXIT)], decoder, tmp_path)
    monkeypatch.setattr("selfspec.heads.base.HEAD_KINDS", dict(HEAD_KINDS))
    with pytest.raises(ValueError, match=r"unknown head kind: 'doubled'; .* import the module"):
        load_heads(decoder, tmp_path)


@pytest.mark.parametrize("bases", [(), (ExitHead,)])
def test_a_class_that_is_no_kind_of_head_is_not_registered(bases):
    with pytest.raises(ValueError, match="Part must be a subclass of ExitHead with a `kind`"):
        register_head(type("Part", bases, {}))
    with pytest.raises(ValueError, match="'part' must be a subclass of ExitHead with a `kind`"):
        register_head("part")


def answering(target, doubled, monkeypatch, method, answer):
    """A model whose head answers one of its methods in another way."""
    monkeypatch.setattr(doubled, method, answer)
    return SelfSpecModel(target, heads=[doubled.build(Decoder(target), EXIT)])


@pytest.mark.parametrize("shape", [(2, 1, VOCAB - 1), (2, VOCAB)])
@pytest.mark.parametrize("drafter", ["early_exit", "tree"])
def test_logits_of_another_shape_are_refused_by_the_heads_name(
    target, doubled, monkeypatch, shape, drafter
):
    def answer(self, decoder, hidden, depth=0):
        return torch.zeros(shape)

    spec = answering(target, doubled, monkeypatch, "logits", answer)
    with pytest.raises(ValueError, match=r"the doubled head \(.*\) returned .*, 64\]"):
        spec.generate(IDS, attention_mask=MASK, draft=drafter, max_new_tokens=6)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (lambda self, hidden: hidden[..., 1:], r"shape \(2, 1, \d+\)"),
        (lambda self, hidden: hidden[:, 0], r"shape \(2, \d+\)"),
        (lambda self, hidden: None, "NoneType"),
    ],
)
def test_what_no_lm_head_can_read_is_refused_by_the_heads_name(
    target, doubled, monkeypatch, answer, given
):
    spec = answering(target, doubled, monkeypatch, "forward", answer)
    with pytest.raises(ValueError, match=rf"`forward` of the doubled head .* returned {given},"):
        spec.generate(IDS, attention_mask=MASK, draft="early_exit", max_new_tokens=6)


def test_a_kind_that_builds_no_head_is_named(target, doubled, monkeypatch):
    monkeypatch.setattr(doubled, "build", lambda decoder, exit_layer: None)
    with pytest.raises(ValueError, match=r"DoubledLens.build returned NoneType, expected the head"):
        build_head(Decoder(target), "doubled", EXIT, {})


def test_watching_sees_a_head_that_changes_its_input(target, doubled, monkeypatch, watch):
    def answer(self, hidden):
        return hidden.mul_(2)

    watch(spec := answering(target, doubled, monkeypatch, "forward", answer))
    with pytest.raises(AssertionError, match="the doubled head changed its input in place"):
        spec.generate(IDS, attention_mask=MASK, draft="early_exit", max_new_tokens=6)


# Files that are not whole


def shortened(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize(
    ("name", "damage", "match"),
    [
        *((name, Path.unlink, f"no {name} in ") for name in (CONFIG, WEIGHTS)),
        *(
            (name, shortened(share), f"{name}.*may be truncated")
            for name in (CONFIG, WEIGHTS)
            for share in (0, 0.1, 0.5, 0.99)
        ),
        *(
            (CONFIG, lambda path, text=text: path.write_bytes(text), r"selfspec\.json")
            for text in (b"[1]", b"3", b"null", b'"text"', b"[]", b"\xff\xfe\x00")
        ),
    ],
)
def test_a_file_that_is_not_whole_is_named(saved, name, damage, match):
    target, _, _, folder = saved
    damage(folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        SelfSpecModel(target, heads=folder)


def rewrite(folder, change):
    data = json.loads((folder / CONFIG).read_text())
    change(data)
    (folder / CONFIG).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["heads"][0].update(kind="lems"), "unknown head kind: 'lems'; did you mean 'l"),
        (lambda d: d["heads"][0].update(exit_layer=4), r"in \[1, 3\], got 4"),
        (lambda d: d["heads"][0].update(exit_layer=0), r"in \[1, 3\], got 0"),
        (lambda d: d["heads"][0].update(exit_layer=3), "does not fit"),
        (lambda d: d["heads"][0]["options"].update(rank=3), "does not fit"),
        (lambda d: d["heads"][0]["options"].update(rank="3"), "does not fit"),
        (lambda d: d["heads"][0]["options"].update(rnak=3), "unknown option of the lens head"),
        (lambda d: d["heads"][0].update(kind="block", options={}), "does not fit"),
        (lambda d: d["heads"][0].update(trimmed=True), "does not fit.*vocab_ids"),
        (lambda d: d["heads"][0].update(calibrated=["greedy"]), "(?s)does not fit.*calibrators"),
        (lambda d: d["heads"].append(d["heads"][0]), "two heads of kind 'lens'"),
        (lambda d: d["heads"][0].update(extra=1), "unknown key of _HeadEntry: 'extra'"),
        (lambda d: d.pop("target"), r"selfspec\.json: target: "),
        (lambda d: d.update(format_version=99), "format_version 99, this version reads"),
    ],
    ids=[
        *("kind", "depth", "zero", "exit", "rank", "rank type", "option", "other kind", "trimmed"),
        *("calibrated", "twice", "key", "missing", "version"),
    ],
)
def test_a_file_that_says_something_else_is_refused(saved, change, match):
    target, _, _, folder = saved
    rewrite(folder, change)
    with pytest.raises(ValueError, match=match):
        SelfSpecModel(target, heads=folder)


@pytest.mark.parametrize("damage", ["unsorted", "beyond", "fewer", "gone", "kept untrimmed"])
@pytest.mark.parametrize("kind", ["shared", "lens", "lora"])
def test_damaged_vocab_ids_are_refused(target, tmp_path, kind, damage):
    decoder = Decoder(target)
    save_heads([own_head(decoder, kind, EXIT, trimmed=True)], decoder, tmp_path)
    name, weights = f"{kind}_{EXIT}.vocab_ids", load_file(tmp_path / WEIGHTS)
    ids = weights.pop(name)
    if damage == "kept untrimmed":
        rewrite(tmp_path, lambda data: data["heads"][0].update(trimmed=False))
    if damage != "gone":
        changed = {"unsorted": ids.flip(0), "beyond": ids + 1000, "fewer": ids[:0]}
        weights[name] = changed.get(damage, ids).contiguous()
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=rf"(?s){WEIGHTS} does not fit .*{CONFIG}: .*vocab_ids"):
        SelfSpecModel(target, heads=tmp_path)


# The target they were fitted to


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5 here and 4 there"),
        ({"hidden_size": 16}, "hidden_size is 16 here and 32 there"),
        ({"vocab_size": 80}, "vocab_size is 80 here and 64 there"),
        ({"seed": 1}, "the weights differ"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_target_is_refused_with_what_differs(saved, other, differs):
    _, _, _, folder = saved
    with pytest.raises(ValueError, match="fitted to another target") as refusal:
        SelfSpecModel(tiny_llama("sometimes", **other), heads=folder)
    assert differs in str(refusal.value)


def test_another_family_is_refused(saved):
    _, _, _, folder = saved
    other = AutoModelForCausalLM.from_config(Qwen2Config(**TINY))
    with pytest.raises(ValueError, match="model_type is 'qwen2' here and 'llama' there"):
        SelfSpecModel(other, heads=folder)


def four_bits(weight: Tensor) -> Tensor:
    """Rounded to 16 values between the least and the greatest of each group of 16."""
    groups = weight.reshape(-1, 16)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-9)  # a row of padding is zero
    return (((groups - low) / step).round() * step + low).reshape(weight.shape)


def fine_tuned(weight: Tensor) -> Tensor:
    return weight + 0.1 * weight.std() * torch.randn_like(weight)


@pytest.mark.parametrize("change", [four_bits, fine_tuned])
def test_slightly_other_weights_give_a_warning(saved, change):
    """The checkpoint in another precision, or fine-tuned: heads draft, and outputs stay exact."""
    target, _, _, folder = saved
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.copy_(change(parameter))
    with pytest.warns(UserWarning, match=r"slightly other weights \(the weights differ"):
        spec = SelfSpecModel(target, heads=folder)
    ids = torch.randint(VOCAB, (1, 6))
    draft = DraftConfig(exit_layer=EXIT, num_draft_tokens=3)
    equal_to_generate(spec, ids, max_new_tokens=12, draft=draft)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("origin", [torch.float32, torch.bfloat16])
def test_a_target_is_known_in_every_dtype(origin, dtype, tmp_path):
    """A checkpoint in float32 or bfloat16, loaded in another dtype, keeps its heads."""
    # Values as checkpoints have them: spread as initialised, and not all of them exact in 16 bits.
    model = tiny_llama("sometimes", dtype=origin, spread=0.02)
    decoder = Decoder(model)
    save_heads([lens(decoder)], decoder, tmp_path)
    loaded = SelfSpecModel(model.to(dtype), heads=tmp_path)
    assert loaded.heads[0].kind == "lens"


@pytest.mark.parametrize("kind", ["block", "fused"])
@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["mlp"]}])
@pytest.mark.filterwarnings("ignore:the heads in .* were fitted to slightly other weights")
def test_a_heads_own_layer_has_no_adapter(kind, more, tmp_path):
    """It starts as the adapted layer, and loads over the target with the adapter, without, merged.

    Warnings of other weights are right: adapters move them.
    """
    base = tiny_llama("sometimes", dtype=torch.float32)
    maps = ["q_proj", "o_proj"]
    config = LoraConfig(
        r=2, target_modules=maps, init_lora_weights=False, task_type="CAUSAL_LM", **more
    )
    adapted = get_peft_model(copy.deepcopy(base), config).eval()
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    decoder = Decoder(adapted)
    head = build_head(decoder, kind, EXIT, {})
    save_heads([head], decoder, tmp_path)
    with adapted.disable_adapter():
        disabled = build_head(decoder, kind, EXIT, {})
    merged = copy.deepcopy(adapted).merge_and_unload()
    for target, like in ((base, disabled), (merged, head)):
        plain = build_head(Decoder(target), kind, EXIT, {})
        torch.testing.assert_close(dict(plain.layer.state_dict()), dict(like.layer.state_dict()))
    for target in (base, adapted, merged):
        assert SelfSpecModel(target, heads=tmp_path).heads[0].kind == kind


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_target_is_known_under_lora(family, tmp_path):
    """Also where the layers that LoRA wraps have biases, which then change their names."""
    torch.manual_seed(0)
    if family == "llama":
        model, modules = tiny_llama("sometimes", dtype=torch.float32), ["q_proj", "down_proj"]
    elif family == "qwen2":
        model = AutoModelForCausalLM.from_config(Qwen2Config(**TINY))
        modules = ["q_proj", "down_proj"]
    else:
        config = GPT2Config(n_embd=32, n_head=4, n_layer=4, vocab_size=VOCAB)
        model, modules = AutoModelForCausalLM.from_config(config), ["c_proj"]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    decoder = Decoder(model)
    save_heads([lens(decoder)], decoder, tmp_path)
    fan = family == "gpt2"
    adapter = LoraConfig(r=2, target_modules=modules, fan_in_fan_out=fan, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, adapter)
    loaded = SelfSpecModel(adapted, heads=tmp_path)
    assert loaded.heads[0].kind == "lens"


def test_heads_load_for_a_target_that_is_on_disk_only(tmp_path):
    """As inside a serving engine, where the target's weights are the engine's."""
    for name, seed in (("one", 0), ("other", 1)):
        tiny_llama(dtype=torch.float32, seed=seed).save_pretrained(tmp_path / name)
    decoder = SelfSpecModel.from_pretrained(tmp_path / "one").decoder
    with torch.device("meta"):
        bare = Decoder(AutoModelForCausalLM.from_config(decoder.config))
    files = CheckpointFiles(tmp_path / "one")
    assert fingerprint(bare, files) == fingerprint(decoder)
    for kind in KINDS:
        heads = [own_head(decoder, kind, EXIT, trimmed=True)]
        save_heads(heads, decoder, tmp_path / "heads")
        same(load_heads(bare, tmp_path / "heads", files), heads)
    with pytest.raises(ValueError, match="the weights differ"):
        load_heads(bare, tmp_path / "heads", CheckpointFiles(tmp_path / "other"))


def test_the_fingerprint_is_stable(target):
    assert fingerprint(Decoder(target)) == fingerprint(Decoder(tiny_llama("sometimes")))


def test_heads_of_another_width_are_refused_before_anything_runs(target):
    """Heads handed over as objects have no file that says what they were fitted to."""
    wide = Decoder(tiny_llama("sometimes", hidden_size=64))
    with pytest.raises(ValueError, match=r"64.*32|32.*64"):
        SelfSpecModel(target, heads=[lens(wide)])


def test_a_folder_without_heads_is_named(target, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*absent.*selfspec\.json"):
        SelfSpecModel(target, heads=str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"no selfspec\.json in "):
        SelfSpecModel(target, heads=str(tmp_path))
    decoder = Decoder(target)
    save_heads([lens(decoder)], decoder, tmp_path / "run" / "heads")
    with pytest.raises(FileNotFoundError, match=r"run; did you mean .*run/heads\?$"):
        SelfSpecModel(target, heads=str(tmp_path / "run"))
    assert not shutil.os.path.exists(tmp_path / "absent")


def test_what_cannot_be_saved_leaves_what_is_there(target, tmp_path):
    decoder = Decoder(target)
    head = build_head(decoder, "lens", EXIT, {})
    save_heads([head], decoder, tmp_path / "heads")
    with pytest.raises(ValueError, match="there are no heads to save"):
        save_heads([], decoder, tmp_path / "heads")
    for no_list in ("heads", head):
        with pytest.raises(TypeError, match=r"a head is an ExitHead, got str|got a LensHead"):
            save_heads(no_list, decoder, tmp_path / "heads")
    assert len(load_heads(decoder, tmp_path / "heads")) == 1
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "file" / "heads"):
        with pytest.raises(ValueError, match="cannot be made, a file is in its way; give another"):
            save_heads([head], decoder, path)
    assert (tmp_path / "file").read_text() == "kept"


def test_what_is_no_head_and_no_profile_is_named(target):
    head = build_head(Decoder(target), "lens", EXIT, {})
    for given in (5, head):
        with pytest.raises(TypeError, match="heads are a list of exit heads, a folder or a hub id"):
            SelfSpecModel(target, heads=given)
    with pytest.raises(TypeError, match="a head is an ExitHead, got str; load_heads reads"):
        SelfSpecModel(target, heads=["/a/folder"])
    with pytest.raises(TypeError, match="a profile is a Profile or the file of one, got dict"):
        SelfSpecModel(target, profile={})


@pytest.mark.matrix
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_made_in_another_dtype_is_brought_to_the_targets(kind, trimmed):
    """As it is if the target is cast after it was given."""
    model = tiny_llama("sometimes", dtype=torch.float32)
    decoder = Decoder(model)
    head, other = (own_head(decoder, kind, EXIT, trimmed=trimmed) for _ in range(2))
    draft = {"head": head.kind, "exit_layer": head.exit_layer, "num_draft_tokens": 3}
    given_before = SelfSpecModel(model, heads=[head])
    model.to(torch.float64)
    given_after = SelfSpecModel(model, heads=[other])
    accepted = []
    for spec in (given_before, given_after):
        equal_to_generate(spec, IDS, MASK, [draft], max_new_tokens=9)
        accepted.append(spec.last_stats.accepted)
    assert accepted[0] == accepted[1]

"""A model over several devices, or off all of them until it is used: every tensor goes where it is.

Weights on disk have no values but in their own module's hands, so a hook that is passed by is an
error. Two devices are played by torch's fake tensors, which have a device and a shape but no
values, and refuse to be mixed.
"""

import traceback
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from conftest import EXIT, prompt, tiny_llama
from head_tools import exit_of, own_head
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, LogitsProcessorList, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

from selfspec import DraftConfig, SelfSpecModel
from selfspec.decoder import CACHE
from selfspec.decoder.devices import fitting_device
from selfspec.drafters import make_drafter
from selfspec.drafters.engine import State
from selfspec.heads import HEAD_KINDS, save_heads
from selfspec.sampling import accept
from selfspec.sampling.context import Context
from selfspec.sampling.sampler import Sampler

IDS, MASK = prompt(5, 3, 7)
FITTED = [kind for kind in HEAD_KINDS if kind != "shared"]
DRAFTERS = [
    *[{"head": kind, "exit_layer": exit_of(kind, EXIT)} for kind in HEAD_KINDS],
    {"drafter": "tree"},
    {"drafter": "lookahead"},
    {"drafter": "skip_sublayers", "skip": {"search": "clasp", "every": 2}},
]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def fitted(model, trimmed, kinds=FITTED):
    decoder = SelfSpecModel(model).decoder
    return [own_head(decoder, kind, EXIT, trimmed=trimmed) for kind in kinds]


# On disk


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A target on disk, and its heads."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama("sometimes", dtype=torch.float32)
    model.save_pretrained(folder)
    save_heads(fitted(model, True), SelfSpecModel(model).decoder, folder)
    return folder


@pytest.fixture(scope="module")
def offloaded(checkpoint, tmp_path_factory):
    """The target with nothing in memory but one layer."""
    parts = ["embed_tokens", "norm", "rotary_emb", *[f"layers.{index}" for index in range(4)]]
    places = {f"model.{part}": "disk" for part in parts} | {"lm_head": "disk"}
    places["model.layers.1"] = "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, device_map=places, offload_folder=tmp_path_factory.mktemp("offload")
    )
    return SelfSpecModel(model.eval(), heads=checkpoint)


# Before transformers 5.20 `generate` tells that tokens are not on the device of the weights.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on")
@pytest.mark.matrix
@pytest.mark.parametrize("draft", DRAFTERS, ids=lambda draft: "-".join(map(str, draft.values())))
def test_weights_on_disk_write_what_weights_in_memory_write(checkpoint, offloaded, draft):
    spec = SelfSpecModel.from_pretrained(checkpoint)
    off = {name for name, weight in offloaded.model.named_parameters() if weight.is_meta}
    assert len(off) == 3 * 9 + 3
    options = {"attention_mask": MASK, "max_new_tokens": 9, "draft": draft}
    assert torch.equal(offloaded.generate(IDS, **options), spec.generate(IDS, **options))
    assert offloaded.last_stats.accepted == spec.last_stats.accepted
    after = {name for name, weight in offloaded.model.named_parameters() if weight.is_meta}
    assert after == off


def test_heads_of_weights_on_disk_need_no_disk(offloaded):
    for head in offloaded.heads:
        assert {tensor.device.type for tensor in head.parameters()} == {"cpu"}
        assert not any({"forward", "_hf_hook"} & vars(part).keys() for part in head.modules())


# On two devices

# In a build of torch for CPUs, fakes of other devices cannot be indexed. The exit's hidden states
# are on the first device or on the second, by the number of layers on the first.
SPLITS = [slow("cpu", "meta", EXIT), ("meta", "cpu", EXIT - 1)]


class Mover(ModelHook):
    """Brings to a module's device what it is called with, as accelerate's own hook does."""

    def __init__(self, device):
        self.execution_device = device

    def pre_forward(self, module, *args, **kwargs):
        return send_to_device((args, kwargs), self.execution_device, skip_keys=CACHE)


@contextmanager
def two_devices(monkeypatch):
    """Devices that there need not be; whatever is brought to the host is 0."""
    monkeypatch.setattr(FakeTensor, "tolist", lambda fake: np.zeros(fake.shape, int).tolist())
    monkeypatch.setattr("selfspec.heads.base.check_vocab_ids", lambda decoder, ids: None)
    monkeypatch.setattr(nn.Module, "_apply", put_anew)
    monkeypatch.setattr(FakeTensor, "__deepcopy__", copied, raising=False)
    failure = ""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            yield
    except Exception:
        failure = traceback.format_exc()  # as text: outside of the mode fakes cannot be shown
    if failure:
        pytest.fail(failure, pytrace=False)


def copied(fake, memo):
    """What a deep copy of a tensor is, without a look at the values."""
    alone = fake.detach().clone()
    return nn.Parameter(alone, fake.requires_grad) if isinstance(fake, nn.Parameter) else alone


def put_anew(module, fn, recurse=True):
    """What `module.to` does, with new parameters: fake ones cannot become others in place."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(fn(weight), requires_grad=weight.requires_grad)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = fn(buffer)
    return module


def split(model, low, high, border):
    """Put the embeddings and the layers below the border on one device, all else on the other."""
    body = model.model
    below = [body.embed_tokens, body.rotary_emb, *body.layers[:border]]
    for module in (*below, *body.layers[border:], body.norm, model.lm_head):
        device = low if module in below else high
        add_hook_to_module(module.to(device), Mover(device))
    return model


@pytest.mark.matrix
@pytest.mark.parametrize(("low", "high", "border"), SPLITS, ids=["exit-low", "exit-high"])
@pytest.mark.parametrize("sampled", [slow(False), True], ids=["greedy-whole", "sampled-trimmed"])
@pytest.mark.parametrize("draft", DRAFTERS, ids=lambda draft: "-".join(map(str, draft.values())))
def test_two_devices_are_never_mixed(monkeypatch, draft, sampled, low, high, border):
    with two_devices(monkeypatch):
        model = split(tiny_llama("sometimes", dtype=torch.float32), low, high, border)
        kinds = [draft["head"] if draft.get("head", "shared") != "shared" else "fused"]
        spec = SelfSpecModel(model, fitted(model, trimmed=sampled, kinds=kinds))
        engine = spec.engine
        config = DraftConfig.of(draft)
        drafter = make_drafter(engine, config)
        rows, width = IDS.shape
        tokens = torch.zeros(rows, width, dtype=torch.long, device=low)
        text = [[0] * width for _ in range(rows)]
        context = Context(tokens.clone(), [width] * rows, list(range(rows)), text)
        processors = LogitsProcessorList([TopKLogitsWarper(4)] if sampled else [])
        sampler = Sampler(processors, sampled, rule=config.rule)
        slots = engine.decoder.new_slots(rows)
        state = State(slots, context, tokens[:, -1:], sampler, keep=drafter.keep)
        counts = [width - row for row in range(rows)]

        def watch(block, offset):
            drafter.prefilled(state, block, offset, counts)

        logits = engine.prefill(state, tokens, counts, 2, keep=drafter.keep, on_block=watch)
        assert logits.device == torch.device(low)
        slots.commit([count - 1 for count in counts])
        for _ in range(2):
            drafted = drafter.propose(state, 3)
            verified = engine.verify(state, drafted)
            assert verified.logits.device == torch.device(low)
            verdict = accept(drafted, verified.logits, sampler)
            drafter.commit(state, drafted, verified, verdict)
            slots.commit([1] * rows)
            state.pending = verdict.tokens.gather(1, verdict.accepted[:, None])
            assert state.pending.device == torch.device(low)
        slots.select([0, 2])


# A default device of torch's


class Notes(BaseStreamer):
    """Keeps the tokens that it is given."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        """The text is over."""


def never(input_ids, scores, **kwargs):
    return False


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("draft", ["none", None, *DRAFTERS], ids=str)
def test_the_default_device_is_not_asked(draft, rows):
    """Tensors on `meta`, the default here, have no values: one among the others is noticed."""
    model = tiny_llama()
    spec = SelfSpecModel(model, heads=fitted(model, trimmed=False))
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.2}
    options["stopping_criteria"] = [never]
    ids, mask = IDS[:rows], MASK[:rows]
    written = [row[-12:] for row in spec.generate(ids, attention_mask=mask, **options).tolist()]
    notes = Notes()
    with torch.device("meta"):
        text = spec.generate(ids, attention_mask=mask, streamer=notes, draft=draft, **options)
        prompts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        outputs = spec.generate_batch(prompts, batch_size=2, draft=draft, **options)
    assert [row[-12:] for row in text.tolist()] == written
    assert [output.generated_tokens for output in outputs.values()] == written
    assert sorted(notes.tokens) == sorted(text.flatten().tolist())


def test_torch_built_for_a_gpu_that_is_not_there_fits_on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert fitting_device() == torch.device("cpu")
